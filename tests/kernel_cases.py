"""What any kernel may be called with, and how two forms of it are compared bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from okrt.kernels import reference
from okrt.kernels.bits import MAGNITUDE_MASK, narrow, threshold_value
from okrt.kernels.packed import KINDS, room_words

GUARD = 9  # elements; odd, so that kernels also start where no vector register is aligned

# Of each gradient type: the dtype of its words, its mantissa bits, the bits of infinity.
TYPES = {
    np.float32: (np.uint32, 23, 0x7F800000),
    np.uint16: (np.uint16, 10, 0x7C00),
    np.int16: (np.uint16, 7, 0x7F80),
}
each_type = pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "fp16", "bf16"])

# Magnitudes as bits, from (generator, size, mantissa bits, bits of infinity).
MAGNITUDES = {
    "zero": lambda rng, n, mantissa, infinity: np.zeros(n, np.int64),
    "equal": lambda rng, n, mantissa, infinity: np.full(n, rng.integers(1, infinity)),
    "ties": lambda rng, n, mantissa, infinity: rng.choice([0, 1, infinity // 2, infinity // 2 + 1], n),
    "subnormal": lambda rng, n, mantissa, infinity: rng.integers(0, 1 << mantissa, n),
    "huge": lambda rng, n, mantissa, infinity: rng.integers(infinity - 3, infinity, n),
    "any": lambda rng, n, mantissa, infinity: rng.integers(0, infinity, n),
}
FLOATS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "heavy": lambda rng, n: rng.standard_cauchy(n) ** 3,
}


def sample(rng, kind: str, size: int, dtype) -> np.ndarray:
    """A finite gradient of a type, with random signs (of zeros too)."""
    word, mantissa, infinity = TYPES[dtype]
    if kind in FLOATS:
        return narrow(FLOATS[kind](rng, size).astype(np.float32), np.dtype(dtype))
    sign = rng.integers(0, 2, size) << (8 * np.dtype(dtype).itemsize - 1)
    return (MAGNITUDES[kind](rng, size, mantissa, infinity) | sign).astype(word).view(dtype)


@st.composite
def cases(draw, sizes):
    """What any kernel may be called with; the fields are put together in ARGUMENTS."""
    case = SimpleNamespace(size=draw(sizes))
    kinds = st.sampled_from([*MAGNITUDES, *FLOATS])
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    case.residual = sample(rng, draw(kinds), case.size, np.float32)
    case.other = sample(rng, draw(kinds), case.size, np.float32)
    gradient_kind = draw(kinds)
    case.gradients = [sample(rng, gradient_kind, case.size, dtype) for dtype in TYPES]
    case.pick = draw(st.integers(0, 2**16))
    case.level = draw(st.sampled_from(["data", "data", "one", "above"]))
    case.nudge = draw(st.sampled_from([-1, 0, 0, 1]))
    case.capacity = draw(st.sampled_from([0, 1, case.size // 2, case.size, case.size + 5]))
    last = 2**31 - 1 - max(0, case.size - 1)
    case.first_index = draw(st.sampled_from([0, 3, 2**24 + 1, last]))
    case.k = draw(st.sampled_from([0, 1, case.size // 3, max(0, case.size - 1), case.size, case.size + 2]))
    case.shift = draw(st.sampled_from([0, 1, 7, 12, 19, 30]))
    case.low_bins = draw(st.sampled_from([None, 0, 3]))
    case.bins = draw(st.sampled_from([0, 1, 7, 128, 4096]))
    in_a = rng.random(case.size) < draw(st.sampled_from([0, 0.1, 0.5, 1]))
    in_b = rng.random(case.size) < draw(st.sampled_from([0, 0.1, 0.5, 1]))
    relation = draw(st.sampled_from(["free", "free", "equal", "disjoint", "after"]))
    in_b = {"free": in_b, "equal": in_a, "disjoint": in_b & ~in_a, "after": in_b & ~in_a}[relation]
    if relation == "after":
        in_a[case.size // 2 :], in_b[: case.size // 2] = False, False
    case.a, case.b = (np.flatnonzero(chosen).astype(np.int32) for chosen in (in_a, in_b))
    return case


def picked(case, values: np.ndarray) -> int:
    """The magnitude of some element."""
    return int(values[case.pick % values.size].view(np.uint32)) & MAGNITUDE_MASK if values.size else 0


def threshold(case, values: np.ndarray) -> int:
    levels = {"data": max(1, picked(case, values) + case.nudge), "one": 1, "above": 0x7FFFFFFF}
    return levels[case.level]


def location(case, values: np.ndarray) -> float:
    """Zero, or the magnitude of some element."""
    return threshold_value(picked(case, values)) if case.pick % 3 else 0.0


def outputs(size: int):
    return np.full(size, -7, np.int32), np.full(size, -7, np.float32)


def histogram_table(case, values: np.ndarray):
    below = 0 if case.low_bins is None else max(0, picked(case, values) - (case.low_bins << case.shift))
    return below, case.shift, np.arange(case.bins)


def accumulated(case, gradient: np.ndarray) -> np.ndarray:
    total = case.residual.copy()
    with np.errstate(over="ignore"):
        reference.accumulate(total, gradient)
    return total


SMALLEST = {"kth_magnitude": 1, "cut_to_top": 2}  # elements that a kernel needs


def kth_arguments(case, gradient):
    assume(case.size >= SMALLEST["kth_magnitude"])
    return case.residual, min(max(case.k, 1), case.size)


def cut_arguments(case):
    assume(case.size >= SMALLEST["cut_to_top"])
    values = np.where(case.residual == 0, np.float32(1), case.residual)
    return np.arange(case.size, dtype=np.int32), values, min(max(case.k, 1), case.size - 1), 1.0625


SPREADS = (1, 5, 3000)  # between neighbouring indexes: the layouts of a message
LAST_INDEX = 2**31 - 2


def pack_arguments(index, value, kind: int):
    """With the least room that there must be."""
    span = int(index[-1]) - int(index[0]) + 1 if index.size else 0
    value = value[: 0 if kind == KINDS["none"] else index.size]
    error = outputs(index.size if kind in (KINDS["fp16"], KINDS["bf16"]) else 0)[1]
    return index, value, kind, outputs(room_words(index.size, kind, span))[0], error


def packed_case(case):
    spread = SPREADS[case.pick % 3]
    index = case.a * spread + min(case.first_index, LAST_INDEX - spread * case.size)
    return pack_arguments(index.astype(np.int32), case.residual, case.pick // 3 % 4)


def message_of(arguments) -> np.ndarray:
    index, value, kind, message, error = (np.copy(argument) for argument in arguments)
    return message[: reference.pack(index, value, int(kind), message, error)]


def inspect_arguments(case):
    """Every other message is not what it was."""
    message = message_of(packed_case(case))
    message[case.pick // 12 % message.size] ^= case.pick % 2 << 31 - case.pick % 32
    return (message,)


def unpack_arguments(arguments):
    return message_of(arguments), *(outputs(array.size)[place] for place, array in enumerate(arguments[:2]))


ARGUMENTS = {
    "all_finite": lambda c, g: (g,),
    "accumulate": lambda c, g: (c.residual, g),
    "accumulate_select": lambda c, g: (
        *(c.residual, g, threshold(c, accumulated(c, g)), c.first_index),
        *outputs(c.capacity),
    ),
    "select": lambda c, g: (c.residual, threshold(c, c.residual), c.first_index, *outputs(c.capacity)),
    "select_top": lambda c, g: (c.residual, threshold(c, c.residual), c.k, *outputs(c.size)),
    "count": lambda c, g: (c.residual, threshold(c, c.residual)),
    "histogram": lambda c, g: (c.residual, *histogram_table(c, c.residual)),
    "accumulate_histogram": lambda c, g: (c.residual, g, *histogram_table(c, accumulated(c, g))),
    "kth_magnitude": kth_arguments,
    "keep_reaching": lambda c, g: (
        *(np.arange(c.size, dtype=np.int32) + c.first_index, c.residual),
        *(threshold(c, c.residual), c.k),
    ),
    "keep_top": lambda c, g: (np.arange(c.size, dtype=np.int32) + c.first_index, c.residual, c.k),
    "cut_to_top": lambda c, g: cut_arguments(c),
    "scatter_add": lambda c, g: (c.residual, c.a, c.other[: c.a.size]),
    "merge_add": lambda c, g: (
        *(c.a + c.first_index, c.residual[: c.a.size], c.b + c.first_index, c.other[: c.b.size]),
        *outputs(np.union1d(c.a, c.b).size),
    ),
    "clear_common": lambda c, g: (c.residual, c.a, c.b),
    "moments": lambda c, g: (c.residual,),
    "exceedances": lambda c, g: (c.residual, location(c, c.residual)),
    "accumulate_select_exceedances": lambda c, g: (
        *(c.residual, g, threshold(c, accumulated(c, g)), c.first_index),
        *(*outputs(c.capacity), location(c, accumulated(c, g))),
    ),
    "counts": lambda c, g: (c.residual, [1, threshold(c, c.residual), 2**31 - 1]),
    "take": lambda c, g: (c.residual, c.a, outputs(c.a.size)[1]),
    "put": lambda c, g: (g, c.first_index, c.a + c.first_index, g[: c.a.size].copy()),
    "cuts": lambda c, g: (c.a + c.first_index, np.array([0, c.first_index + c.size // 2, 2**31], np.int64)),
    "keep_lost": lambda c, g: (c.residual, c.a, c.other[: c.a.size], c.a[c.pick % 3 :: 2].copy(), c.b),
    "mean": lambda c, g: (c.residual, 1 + c.pick % 9, np.zeros_like(g)),
    "rounding_error": lambda c, g: (c.residual, 1 + c.pick % 9, g, outputs(c.size)[1]),
    "pack": lambda c, g: packed_case(c),
    "inspect_packed": lambda c, g: inspect_arguments(c),
    "unpack": lambda c, g: unpack_arguments(packed_case(c)),
}
BY_GRADIENT = [
    name
    for name in ARGUMENTS
    if name in ("all_finite", "put", "mean", "rounding_error") or name.startswith("accumulate")
]


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy with bytes of 0xFF (NaN in every float) before and after: a read or write past an end shows."""
    held = np.full((array.size + 2 * GUARD) * array.itemsize, 0xFF, np.uint8).view(array.dtype)
    held[GUARD : GUARD + array.size] = array
    return held


def run(kernels, name: str, arguments):
    """What a kernel returns, and the bits of all its arrays and their guards afterwards."""
    held = [guarded(a) if isinstance(a, np.ndarray) else a for a in arguments]
    with np.errstate(over="ignore"):
        result = getattr(kernels, name)(*(a[GUARD:-GUARD] if isinstance(a, np.ndarray) else a for a in held))
    arrays = [a.view(f"u{a.itemsize}") for a in held if isinstance(a, np.ndarray)]
    kept = {"keep_reaching": lambda: result, "keep_top": lambda: result, "cut_to_top": lambda: arguments[2]}
    if name in kept:  # what is left behind the pairs kept is not specified
        for array in arrays:
            array[GUARD + kept[name]() : -GUARD] = 0
    if name == "pack":  # nor what is behind the message
        arrays[2][GUARD + result : -GUARD] = 0
    return result, arrays


def assert_same(kernels, oracle, name: str, arguments) -> None:
    result, arrays = run(kernels, name, arguments)
    expected, expected_arrays = run(oracle, name, arguments)
    np.testing.assert_array_equal(result, expected, strict=isinstance(expected, np.ndarray), err_msg=name)
    for array, expected_array in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected_array, err_msg=name)


def assert_all_same(kernels, oracle, names: list[str], case) -> None:
    """Of these kernels, each with all that the case has for it."""
    for name in names:
        if case.size >= SMALLEST.get(name, 0):
            for gradient in case.gradients if name in BY_GRADIENT else case.gradients[:1]:
                assert_same(kernels, oracle, name, ARGUMENTS[name](case, gradient))
