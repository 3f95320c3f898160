"""What the kernels are checked and timed with: inputs that are the same wherever they are made."""

from collections.abc import Callable
from typing import Any

import numpy as np

from okrt.kernels import reference
from okrt.kernels.bits import narrow, threshold_value
from okrt.kernels.packed import KINDS as VALUES
from okrt.kernels.packed import room_words

# The gradient types and of each the dtype of its words, its mantissa bits, the bits of infinity.
TYPES = {
    "fp32": (np.float32, np.uint32, 23, 0x7F800000),
    "fp16": (np.uint16, np.uint16, 10, 0x7C00),
    "bf16": (np.int16, np.uint16, 7, 0x7F80),
}
FLOATS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "ties": lambda rng, size: rng.integers(-2, 3, size),
    "zeros": lambda rng, size: np.zeros(size),
    "heavy": lambda rng, size: rng.standard_cauchy(size) ** 3,
}
SUBNORMAL = "subnormal"
KINDS = (*FLOATS, SUBNORMAL)

FIRST_INDEX = 2**24 + 1  # no float32 is this number
LARGEST = 2**31 - 1  # a threshold that nothing finite reaches
RANKS = 3
SPREAD = 50  # between neighbouring indexes of a sparse message
MOST_PACKED = 20_000  # entries of all messages but one: their oracle is slow


def sample(rng: np.random.Generator, kind: str, size: int, type_name: str) -> np.ndarray:
    """A finite gradient; subnormal numbers are random bits, with random signs of the zeros too."""
    dtype, word, mantissa, _ = TYPES[type_name]
    if kind != SUBNORMAL:
        return narrow(FLOATS[kind](rng, size).astype(np.float32), np.dtype(dtype))
    sign = rng.integers(0, 2, size) << (8 * np.dtype(dtype).itemsize - 1)
    return (rng.integers(0, 1 << mantissa, size) | sign).astype(word).view(dtype)


class Inputs:
    """Arrays of one length and kind of numbers; ARGUMENTS puts together what a kernel is called with."""

    def __init__(self, size: int, kind: str = "normal", share: float = 0.3) -> None:
        """share: of the elements that the lists of entries hold, and that reach the threshold."""
        rng = np.random.default_rng([size, KINDS.index(kind)])
        self.size, self.kind = size, kind
        self.k = int(share * size)
        self.residual = sample(rng, kind, size, "fp32")
        self.other = sample(rng, kind, size, "fp32")
        self.gradients = {name: sample(rng, kind, size, name) for name in TYPES}
        self.a, self.b = (np.flatnonzero(rng.random(size) < share).astype(np.int32) for _ in "ab")
        self.index = np.arange(size, dtype=np.int32) + FIRST_INDEX

    def threshold(self, values: np.ndarray) -> int:
        """The magnitude of the k-th largest: there are ties at it where the kind has any."""
        if not values.size:
            return 1
        at = values.size - max(1, self.k)
        return max(1, int(np.partition(reference.magnitude_bits(values), at)[at]))

    def locations(self, values: np.ndarray) -> tuple[float, float]:
        return 0.0, threshold_value(self.threshold(values))

    def accumulated(self, gradient: np.ndarray) -> np.ndarray:
        total = self.residual.copy()
        reference.accumulate(total, gradient)
        return total


def room(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(size, -7, np.int32), np.full(size, -7, np.float32)


def with_infinity(gradient: np.ndarray) -> np.ndarray:
    infinity = next(of[3] for of in TYPES.values() if of[0] == gradient.dtype)
    broken = gradient.copy()
    broken.view(f"u{gradient.itemsize}")[gradient.size // 2 :][:1] = infinity
    return broken


def all_finite(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    return [(gradient,), (with_infinity(gradient),)]


def accumulate_select(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    threshold = x.threshold(x.accumulated(gradient))
    return [(x.residual, gradient, threshold, FIRST_INDEX, *room(size)) for size in (x.size, x.k // 2)]


def select(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    threshold = x.threshold(x.residual)
    return [(x.residual, threshold, FIRST_INDEX, *room(size)) for size in (x.size, x.k // 2)]


def histogram_bins(x: Inputs, values: np.ndarray) -> list[tuple]:
    """Low end, shift and counts: the coarse ones of all magnitudes, and fine ones from the threshold on."""
    return [(0, 19, np.arange(4096)), (x.threshold(values), 7, np.arange(100))]


def cut_to_top(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    values = np.where(x.residual == 0, np.float32(1), x.residual)
    return [(x.index, values, k, 1.0625) for k in sorted({1, x.k, x.size - 1}) if 0 < k < x.size]


def merge_add(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    a, b = x.a + np.int32(FIRST_INDEX), x.b + np.int32(FIRST_INDEX)
    return [(a, x.residual[: a.size], b, x.other[: b.size], *room(a.size + b.size))]


def messages(x: Inputs) -> list[tuple]:
    """What is packed: gaps, a bitmap, runs, a few entries, and every kind of values."""
    sparse, dense = x.a.astype(np.int64) * SPREAD, x.a[:MOST_PACKED]
    runs = np.arange(dense.size) + np.arange(dense.size) // 40 * 1000
    calls: list[tuple[np.ndarray, str]] = [(sparse, "fp16"), (dense, "bf16"), (runs, "fp32"), (runs, "fp16")]
    calls += [(dense, "none"), (sparse[:MOST_PACKED], "none"), (sparse[:2], "bf16")]
    return [packing(index.astype(np.int32), x.residual, kind) for index, kind in calls]


def packing(index: np.ndarray, value: np.ndarray, kind: str) -> tuple:
    value = value[: index.size if kind != "none" else 0]
    error = room(index.size if kind in ("fp16", "bf16") else 0)[1]
    return index, value, VALUES[kind], room(room_words(index.size, VALUES[kind], 2**31))[0], error


def message_of(arguments: tuple) -> np.ndarray:
    from okrt.kernels.host import Host  # compiled code: only what packs is to load it

    index, value, kind, message, error = arguments
    return message[: Host().pack(index, value.copy(), kind, message, error)]


def unpack(x: Inputs, gradient: np.ndarray) -> list[tuple]:
    return [(message_of(call), room(call[0].size)[0], room(call[1].size)[1]) for call in messages(x)]


# Of each kernel, the arguments of a few calls. Arrays of int64 are the host's, all others those of the kernels.
ARGUMENTS: dict[str, Callable[[Inputs, np.ndarray], list[tuple[Any, ...]]]] = {
    "all_finite": all_finite,
    "accumulate": lambda x, g: [(x.residual, g)],
    "accumulate_select": accumulate_select,
    "select": select,
    "select_top": lambda x, g: [(x.residual, x.threshold(x.residual), ties, *room(x.size)) for ties in (x.size, 2, 0)],
    "count": lambda x, g: [(x.residual, threshold) for threshold in (x.threshold(x.residual), 1, LARGEST)],
    "counts": lambda x, g: [(x.residual, [x.threshold(x.residual), 1, LARGEST])],
    "histogram": lambda x, g: [(x.residual, *bins) for bins in histogram_bins(x, x.residual)],
    "accumulate_histogram": lambda x, g: [(x.residual, g, *bins) for bins in histogram_bins(x, x.accumulated(g))],
    "moments": lambda x, g: [(x.residual,)],
    "exceedances": lambda x, g: [(x.residual, location) for location in x.locations(x.residual)],
    "accumulate_select_exceedances": lambda x, g: [
        (*call, location) for call in accumulate_select(x, g) for location in x.locations(x.accumulated(g))
    ],
    "kth_magnitude": lambda x, g: [(x.residual, k) for k in sorted({1, max(1, x.k), x.size}) if x.size],
    "keep_reaching": lambda x, g: [(x.index, x.residual, x.threshold(x.residual), k) for k in (x.k, 0, x.size)],
    "keep_top": lambda x, g: [(x.index, x.residual, k) for k in (x.k, 0, x.size)],
    "cut_to_top": cut_to_top,
    "scatter_add": lambda x, g: [(x.residual, x.a, x.other[: x.a.size])],
    "clear_common": lambda x, g: [(x.residual, x.a, x.b)],
    "merge_add": merge_add,
    "take": lambda x, g: [(x.residual, x.a, room(x.a.size)[1])],
    "put": lambda x, g: [(g, FIRST_INDEX, x.a + np.int32(FIRST_INDEX), g[: x.a.size].copy())],
    "cuts": lambda x, g: [(x.a, np.array([0, x.size // 2, x.size, 2**31], np.int64))],
    "keep_lost": lambda x, g: [(x.residual, x.a, x.other[: x.a.size], x.a[::2].copy(), x.b)],
    "mean": lambda x, g: [(x.residual, RANKS, np.zeros_like(g))],
    "rounding_error": lambda x, g: [(x.residual, RANKS, g, room(x.size)[1])],
    "pack": lambda x, g: messages(x),
    "inspect_packed": lambda x, g: [(message_of(call),) for call in messages(x)],
    "unpack": unpack,
}
