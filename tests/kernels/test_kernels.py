"""Every CPU kernel is bit for bit the NumPy reference, and the reference is what plain Python gives."""

import inspect
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from okrt.kernels import cpu, reference
from okrt.kernels.bits import MAGNITUDE_MASK, narrow, threshold_bits, threshold_value

BLOCK = cpu.BLOCK
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


EDGES = [cpu.LANES - 1, cpu.LANES, cpu.LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + cpu.LANES]
large = cases(st.sampled_from([0, 1, 9, *EDGES, 2 * BLOCK, 3 * BLOCK + 5]))
small = cases(st.integers(0, 40))


def picked(case, values: np.ndarray) -> int:
    """The magnitude of some element."""
    return int(values[case.pick % values.size].view(np.uint32)) & MAGNITUDE_MASK if values.size else 0


def threshold(case, values: np.ndarray) -> int:
    levels = {"data": max(1, picked(case, values) + case.nudge), "one": 1, "above": 0x7FFFFFFF}
    return levels[case.level]


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


def kth_arguments(case, gradient):
    assume(case.size > 0)
    return case.residual, min(max(case.k, 1), case.size)


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
    "scatter_add": lambda c, g: (c.residual, c.a, c.other[: c.a.size]),
    "merge_add": lambda c, g: (
        *(c.a + c.first_index, c.residual[: c.a.size], c.b + c.first_index, c.other[: c.b.size]),
        *outputs(np.union1d(c.a, c.b).size),
    ),
    "clear_common": lambda c, g: (c.residual, c.a, c.b),
}
each_kernel = pytest.mark.parametrize("name", ARGUMENTS)


def decoded(gradient: np.ndarray) -> list[float]:
    """The elements of a gradient as Python floats."""
    if gradient.dtype == np.uint16:
        return [value for (value,) in struct.iter_unpack("<e", gradient.tobytes())]
    if gradient.dtype == np.int16:
        return [struct.unpack("<f", b"\0\0" + struct.pack("<h", word))[0] for word in gradient.tolist()]
    return gradient.tolist()


class Plain:
    """The kernels in Python: magnitudes are abs() of floats here, not bits."""

    def all_finite(gradient):
        return all(math.isfinite(x) for x in decoded(gradient))

    def accumulate(residual, gradient):
        # The sum of two float32 in double precision, rounded once more, is their float32 sum.
        residual[:] = [r + g for r, g in zip(residual.tolist(), decoded(gradient), strict=True)]

    def accumulate_select(residual, gradient, *rest):
        Plain.accumulate(residual, gradient)
        return Plain.select(residual, *rest)

    def select(values, threshold, first_index, index_out, value_out):
        found = [i for i, x in enumerate(values.tolist()) if abs(x) >= threshold_value(threshold)]
        for place, i in list(enumerate(found))[: index_out.size]:
            index_out[place], value_out[place] = first_index + i, values[i]
        return len(found)

    def select_top(values, threshold, ties, index_out, value_out):
        found = 0
        for i, x in enumerate(values.tolist()):
            tie = abs(x) == threshold_value(threshold)
            if abs(x) > threshold_value(threshold) or (tie and ties > 0):
                index_out[found], value_out[found] = i, x
                ties, found = ties - tie, found + 1
        return found

    def count(values, threshold):
        return sum(abs(x) >= threshold_value(threshold) for x in values.tolist())

    def histogram(values, low, shift, counts):
        for x in values.tolist():
            (magnitude,) = struct.unpack("<i", struct.pack("<f", abs(x)))
            j = (magnitude - low) // 2**shift
            if 0 <= j < counts.size:
                counts[j] += 1

    def accumulate_histogram(residual, gradient, *rest):
        Plain.accumulate(residual, gradient)
        Plain.histogram(residual, *rest)

    def kth_magnitude(values, k):
        return threshold_bits(sorted(map(abs, values.tolist()), reverse=True)[k - 1])

    def keep_reaching(index, value, threshold, k):
        strengths = [abs(x) for x in value.tolist()]
        level = threshold_value(threshold)
        above = [i for i, strength in enumerate(strengths) if strength > level]
        equal = [i for i, strength in enumerate(strengths) if strength == level]
        kept = sorted(above + equal[: max(0, k - len(above))])
        for place, i in enumerate(kept):
            index[place], value[place] = index[i], value[i]
        return len(kept)

    def keep_top(index, value, k):
        pairs = list(zip(index.tolist(), value.tolist(), strict=True))
        kept = sorted(sorted(pairs, key=lambda pair: (-abs(pair[1]), pair[0]))[:k])
        for place, (i, x) in enumerate(kept):
            index[place], value[place] = i, x
        return len(kept)

    def scatter_add(dense, index, value):
        for i, x in zip(index, value, strict=True):
            dense[i] += x

    def merge_add(index_a, value_a, index_b, value_b, index_out, value_out):
        total = dict(zip(index_a, value_a, strict=True))
        for i, x in zip(index_b, value_b, strict=True):
            total[i] = total[i] + x if i in total else x
        for place, i in enumerate(sorted(total)):
            index_out[place], value_out[place] = i, total[i]
        return len(total)

    def clear_common(residual, index_a, index_b):
        residual[list(set(index_a.tolist()) & set(index_b.tolist()))] = 0


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
    if name.startswith("keep_"):  # what is left behind the pairs kept is not specified
        for array in arrays:
            array[GUARD + result : -GUARD] = 0
    return result, arrays


def assert_same(kernels, oracle, name: str, arguments) -> None:
    result, arrays = run(kernels, name, arguments)
    expected, expected_arrays = run(oracle, name, arguments)
    assert result == expected
    for array, expected_array in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected_array)


def test_every_kernel_is_tested():
    compiled = {n for n, f in vars(cpu).items() if isinstance(f, Dispatcher) and not n.startswith("_")}
    oracles = {n for n, _ in inspect.getmembers(reference, inspect.isfunction)}
    assert ARGUMENTS.keys() | {"moments", "lag_adamw", "balance"} == compiled == oracles - {"magnitude_bits", "widen"}


@each_kernel
@given(case=large)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cpu_equals_reference(name, case):
    for gradient in case.gradients:
        assert_same(cpu, reference, name, ARGUMENTS[name](case, gradient))


@each_kernel
@given(case=small)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_reference_equals_plain_python(name, case):
    for gradient in case.gradients:
        assert_same(reference, Plain, name, ARGUMENTS[name](case, gradient))


@pytest.mark.parametrize("kernels", [reference, cpu])
@given(case=large)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_moments(kernels, case):
    (total, squares), _ = run(kernels, "moments", (case.residual,))
    values = case.residual.tolist()
    assert total == pytest.approx(math.fsum(values), rel=0, abs=1e-12 * math.fsum(map(abs, values)))
    assert squares == pytest.approx(math.fsum(x * x for x in values), rel=1e-12, abs=0)


@each_type
@pytest.mark.parametrize("bad", ["infinity", "nan", "quiet nan"])
@pytest.mark.parametrize("kernels, sizes", [(reference, (1, 2, 9)), (cpu, (1, 2, 9, 2 * BLOCK, 4 * BLOCK + 3))])
def test_all_finite_finds_one_bad_element_anywhere(kernels, sizes, bad, dtype):
    word, mantissa, infinity = TYPES[dtype]
    sign = 1 << (8 * np.dtype(dtype).itemsize - 1)
    pattern = infinity + {"infinity": 0, "nan": 1, "quiet nan": 1 << (mantissa - 1)}[bad]
    for size in sizes:
        words = np.full(size, infinity - 1, word)
        words[::2] |= sign
        gradient = words.view(dtype)
        assert run(kernels, "all_finite", (gradient,))[0] is True
        for place, finite in enumerate(words.tolist()):
            for signed in (pattern, pattern | sign):
                words[place] = signed
                assert kernels.all_finite(gradient) is False, (size, place, hex(signed))
            words[place] = finite


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("kind", [*MAGNITUDES, *FLOATS])
def test_kth_magnitude_and_keep_top_for_every_k(kernels, kind):
    values = sample(np.random.default_rng(5), kind, 100, np.float32)
    index = np.arange(100, dtype=np.int32)
    for k in range(102):
        assert_same(kernels, Plain, "keep_top", (index, values, k))
        if 1 <= k <= 100:
            assert_same(kernels, Plain, "kth_magnitude", (values, k))


@each_type
@pytest.mark.parametrize("kernels", [reference, cpu])
def test_accumulate_adds_every_finite_16_bit_pattern_exactly(kernels, dtype):
    _, _, infinity = TYPES[dtype]
    magnitudes = np.arange(infinity if dtype != np.float32 else 0x7C00)
    gradient = np.concatenate([magnitudes, magnitudes | 0x8000]).astype(np.uint16).view(np.int16)
    gradient = gradient.view(dtype) if dtype != np.float32 else gradient.view(np.float16).astype(np.float32)
    residual = np.full(gradient.size, -0.0, np.float32)  # x + -0.0 is x, its sign of zero included
    kernels.accumulate(residual, gradient)
    expected = np.array(decoded(gradient), np.float32)
    np.testing.assert_array_equal(residual.view(np.uint32), expected.view(np.uint32))


@each_type
def test_a_gradient_may_be_read_only(dtype):
    gradient = sample(np.random.default_rng(1), "normal", BLOCK + 1, dtype)
    gradient.flags.writeable = False
    expected = np.zeros(gradient.size, np.float32)
    reference.accumulate(expected, gradient)
    residual = np.zeros_like(expected)
    cpu.accumulate(residual, gradient)
    np.testing.assert_array_equal(residual, expected)
    assert cpu.all_finite(gradient)
