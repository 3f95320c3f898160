"""More device code of `cuda`: the sums that fits of distributions need, in the order of `cpu_exceedances`."""

from typing import Any

import numpy as np
from numba import cuda, types

from okrt.kernels.cpu import BLOCK, LANES
from okrt.kernels.cuda_code import IS_SIMULATED, bits_of, float_of

_f4, _f8, _i8 = types.float32[::1], types.float64[::1], types.int64[::1]
_FRACTION = (1 << 52) - 1

if IS_SIMULATED:

    @cuda.jit(device=True)
    def _long_of(x):
        return np.float64(x).view(np.int64)

    @cuda.jit(device=True)
    def _double_of(bits):
        return np.int64(bits).view(np.float64)

else:

    @cuda.jit(device=True)
    def _long_of(x):
        return cuda.libdevice.double_as_longlong(x)

    @cuda.jit(device=True)
    def _double_of(bits):
        return cuda.libdevice.longlong_as_double(bits)


@cuda.jit(device=True)
def _exponent(x):
    return (_long_of(x) >> np.int64(52)) - np.int64(1023)


@cuda.jit(device=True)
def _normalized(x):
    return _double_of((_long_of(x) & np.int64(_FRACTION)) | np.int64(1023 << 52))


@cuda.jit
def lane_exceedances(values, location, sums, squares, products, found):
    """Of each lane of each block; adds to found how many there are, and the exponents of the product of all."""
    lanes = (values.size + BLOCK - 1) // BLOCK * LANES
    for i in range(cuda.grid(1), lanes, cuda.gridsize(1)):
        first = np.int64(i) // LANES * BLOCK + i % LANES
        total, squared, product = 0.0, 0.0, 1.0
        count, exponent = np.int64(0), np.int64(0)
        for j in range(first, min(first - i % LANES + BLOCK, values.size), LANES):
            excess = float_of(bits_of(values[j]) & np.int32(0x7FFFFFFF)) - location
            if excess > 0:
                wide = np.float64(excess)
                total += wide
                # The square of a float32 is exact: fused or not, the sum is the same.
                squared += wide * wide
                product *= np.float64(float_of((bits_of(excess) & np.int32(0x7FFFFF)) | np.int32(0x3F800000)))
                exponent += np.int64((bits_of(excess) >> np.int32(23)) - np.int32(127))
                count += 1
        sums[i], squares[i], products[i] = total, squared, _normalized(product)
        cuda.atomic.add(found, 0, count)
        cuda.atomic.add(found, 1, exponent + _exponent(product))


@cuda.jit
def multiply_halves(lanes, out):
    """The product of each 64 numbers: halves are multiplied with each other."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        half = LANES // 2
        while half:
            for j in range(half):
                lanes[i * LANES + j] *= lanes[i * LANES + j + half]
            half //= 2
        out[i] = lanes[i * LANES]


@cuda.jit
def multiply_blocks(products, found, out):
    """One thread: out[2:] becomes count, mantissa and exponent of the product of all."""
    mantissa, exponent = 1.0, found[1]
    for block in range(products.size):
        mantissa *= products[block]
        exponent += _exponent(mantissa)
        mantissa = _normalized(mantissa)
    out[2], out[3], out[4] = np.float64(found[0]), mantissa, np.float64(exponent)


# As SIGNATURES of `cuda_code`.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lane_exceedances": (lane_exceedances, (_f4, types.float32, _f8, _f8, _f8, _i8)),
    "multiply_halves": (multiply_halves, (_f8, _f8)),
    "multiply_blocks": (multiply_blocks, (_f8, _i8, _f8)),
}
