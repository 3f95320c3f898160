"""More device code of `cuda`: kernels in which every thread has its own elements, and sums in a fixed order."""

from typing import Any

import numpy as np
from numba import cuda, types

from okrt.kernels.cpu import BLOCK, CHUNK, LANES
from okrt.kernels.cuda_code import GRADIENTS, IS_SIMULATED, WIDEN, bits_of, float_of, place_of

LARGEST = np.float32(np.finfo(np.float32).max)

_f4, _f8, _i4, _i8 = types.float32[::1], types.float64[::1], types.int32[::1], types.int64[::1]

if IS_SIMULATED:

    @cuda.jit(device=True)
    def _product(x, y):
        return x * y

else:

    @cuda.jit(device=True)
    def _product(x, y):
        """Never fused with an addition, which would round once instead of twice."""
        return cuda.libdevice.fmul_rn(x, y)


@cuda.jit(device=True)
def _missing(x, seen):
    """x - seen, or 0 where that is no number."""
    lacking = x - seen
    is_number = bits_of(lacking) & np.int32(0x7F800000) != np.int32(0x7F800000)
    return lacking if is_number else np.float32(0)


@cuda.jit(device=True)
def _narrow_float32(x):
    return x


@cuda.jit(device=True)
def _narrow_float16(x):
    """To nearest even; what overflows becomes the largest finite number."""
    bits = bits_of(x)
    sign, magnitude = (bits >> np.int32(16)) & np.int32(0x8000), bits & np.int32(0x7FFFFFFF)
    if magnitude > np.int32(0x7F800000):
        half = np.int32(0x7E00)
    else:
        magnitude = min(magnitude, np.int32(0x477FE000))
        if magnitude < np.int32(0x38800000):
            # Adding a half puts the last bit of a subnormal number of fp16 where float32 rounds.
            half = bits_of(float_of(magnitude) + np.float32(0.5)) - np.int32(0x3F000000)
        else:
            rounded = magnitude + np.int32(0xFFF) + ((magnitude >> np.int32(13)) & np.int32(1))
            half = (rounded - np.int32(0x38000000)) >> np.int32(13)
    return np.uint16(sign | half)


@cuda.jit(device=True)
def _narrow_bfloat16(x):
    """As above; NaN becomes the positive one."""
    bits = bits_of(x)
    sign, magnitude = (bits >> np.int32(16)) & np.int32(0x8000), bits & np.int32(0x7FFFFFFF)
    if magnitude > np.int32(0x7F800000):
        word = np.int32(0x7FC0)
    else:
        rounded = magnitude + np.int32(0x7FFF) + ((magnitude >> np.int32(16)) & np.int32(1))
        word = sign | min(rounded >> np.int32(16), np.int32(0x7F7F))
    return np.int16(word - np.int32(0x10000) if word & np.int32(0x8000) else word)


_NARROW = {"float32": _narrow_float32, "float16": _narrow_float16, "bfloat16": _narrow_bfloat16}


def _make_mean(narrow):
    @cuda.jit
    def mean(total, size, out):
        for i in range(cuda.grid(1), total.size, cuda.gridsize(1)):
            out[i] = narrow(total[i] / size)

    return mean


MEAN = {kind: _make_mean(narrow) for kind, narrow in _NARROW.items()}


def _make_rounding_error(widen):
    @cuda.jit
    def rounding_error(total, size, rounded, out):
        for i in range(cuda.grid(1), total.size, cuda.gridsize(1)):
            out[i] = _missing(total[i], _product(widen(rounded[i]), size))

    return rounding_error


ROUNDING_ERROR = {kind: _make_rounding_error(widen) for kind, widen in WIDEN.items()}


@cuda.jit
def take(dense, index, out):
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        out[i] = dense[index[i]]
        dense[index[i]] = 0


@cuda.jit
def put(dense, first_index, index, value):
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        dense[index[i] - first_index] = value[i]


@cuda.jit
def cuts(index, bounds, out):
    for i in range(cuda.grid(1), bounds.size, cuda.gridsize(1)):
        out[i] = place_of(index, bounds[i])


@cuda.jit
def count_from(value, control, ratio, found):
    """found becomes the threshold in control, at least 1, and how many values reach `ratio` times it."""
    threshold = max(control[0], np.int32(1))
    limit = max(bits_of(min(_product(float_of(threshold), ratio), LARGEST)), np.int32(1))
    mine = np.int64(0)
    for i in range(cuda.grid(1), value.size, cuda.gridsize(1)):
        mine += (bits_of(value[i]) & np.int32(0x7FFFFFFF)) >= limit
    if mine:
        cuda.atomic.add(found, 1, mine)
    if cuda.grid(1) == 0:
        found[0] = threshold


@cuda.jit(device=True)
def _holds(index, wanted):
    place = place_of(index, wanted)
    return place < index.size and index[place] == wanted


@cuda.jit
def keep_lost(residual, index, value, kept, delivered):
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        if _holds(delivered, index[i]) and not _holds(kept, index[i]):
            residual[index[i]] += value[i]


@cuda.jit
def lane_moments(values, sums, squares):
    """Of each block of 2048 the sums of its 64 lanes, as `cpu.block_moments` has them before it adds up halves."""
    lanes = (values.size + BLOCK - 1) // BLOCK * LANES
    for i in range(cuda.grid(1), lanes, cuda.gridsize(1)):
        first = np.int64(i) // LANES * BLOCK + i % LANES
        total, squared = 0.0, 0.0
        for j in range(first, min(first - i % LANES + BLOCK, values.size), LANES):
            wide = np.float64(values[j])
            total += wide
            # The square of a float32 is exact: fused or not, the sum is the same.
            squared += wide * wide
        sums[i], squares[i] = total, squared


@cuda.jit
def add_halves(lanes, out):
    """The sum of each 64 numbers: halves are added to each other."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        half = LANES // 2
        while half:
            for j in range(half):
                lanes[i * LANES + j] += lanes[i * LANES + j + half]
            half //= 2
        out[i] = lanes[i * LANES]


@cuda.jit
def sum_chunks(values, length, out):
    """The sums of 64 numbers each, of the first `length`."""
    for i in range(cuda.grid(1), (length + CHUNK - 1) // CHUNK, cuda.gridsize(1)):
        total = 0.0
        for j in range(i * CHUNK, min((i + 1) * CHUNK, length)):
            total += values[j]
        out[i] = total


# As SIGNATURES of `cuda_code`.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "take": (take, (_f4, _i4, _f4)),
    "cuts": (cuts, (_i4, _i8, _i8)),
    "count_from": (count_from, (_f4, _i4, types.float32, _i8)),
    "keep_lost": (keep_lost, (_f4, _i4, _f4, _i4, _i4)),
    "lane_moments": (lane_moments, (_f4, _f8, _f8)),
    "add_halves": (add_halves, (_f8, _f8)),
    "sum_chunks": (sum_chunks, (_f8, types.int64, _f8)),
}
for _kind, _gradient in GRADIENTS.items():
    SIGNATURES |= {
        f"put {_kind}": (put, (_gradient, types.int32, _i4, _gradient)),
        f"mean {_kind}": (MEAN[_kind], (_f4, types.float32, _gradient)),
        f"rounding_error {_kind}": (ROUNDING_ERROR[_kind], (_f4, types.float32, _gradient, _f4)),
    }
