"""The kernel that fits of distributions need, for CPUs, compiled by Numba as those of `cpu` are."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from okrt.kernels.compile_lock import compile_lock
from okrt.kernels.cpu import _GRADIENTS, _WORD, BLOCK, LANES, _compiled, accumulate_select

COUNT, TOTAL, SQUARES, MANTISSA, EXPONENT = range(5)
COLUMNS = 5
"""of what is known of a block"""

_f4, _i4 = types.float32[::1], types.int32[::1]
_f8_rows = types.Array(types.float64, 2, "C")
_LONG = ir.IntType(64)


@intrinsic
def _excess(typing_context, x, location):
    """What the magnitude of a float32 exceeds the location by, or zero."""

    def generate(context, builder, signature, args):
        magnitude = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0x7FFFFFFF))
        over = builder.fsub(builder.bitcast(magnitude, ir.FloatType()), args[1])
        zero = ir.Constant(ir.FloatType(), 0.0)
        return builder.select(builder.fcmp_ordered(">", over, zero), over, zero)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def _mantissa(typing_context, x):
    """From 1 to 2; 1 of zero."""

    def generate(context, builder, signature, args):
        bits = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0x7FFFFF))
        return builder.bitcast(builder.or_(bits, ir.Constant(_WORD, 0x3F800000)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _exponent_field(typing_context, x):
    """Of a number without a sign; kept to 32 bits, so that it vectorizes."""

    def generate(context, builder, signature, args):
        return builder.lshr(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 23))

    return types.int32(types.float32), generate


@intrinsic
def _exponent(typing_context, x):
    """Of a normal positive float64."""

    def generate(context, builder, signature, args):
        field = builder.lshr(builder.bitcast(args[0], _LONG), ir.Constant(_LONG, 52))
        return builder.sub(field, ir.Constant(_LONG, 1023))

    return types.int64(types.float64), generate


@intrinsic
def _normalized(typing_context, x):
    """A normal positive float64 without its power of two: from 1 to 2."""

    def generate(context, builder, signature, args):
        bits = builder.and_(builder.bitcast(args[0], _LONG), ir.Constant(_LONG, (1 << 52) - 1))
        return builder.bitcast(builder.or_(bits, ir.Constant(_LONG, 1023 << 52)), ir.DoubleType())

    return types.float64(types.float64), generate


with compile_lock():

    @njit(inline="always")
    def _sum_block(values, location, lanes, counts, row):
        """Fills the row of a block; lanes and counts are working memory."""
        total, squares, product, fields, over = lanes[0], lanes[1], lanes[2], counts[0], counts[1]
        total[:], squares[:], product[:] = 0, 0, 1
        fields[:], over[:] = 0, 0
        for start in range(0, values.size, LANES):
            here = values[start : start + LANES]
            for j in range(here.size):
                excess = _excess(here[j], location)
                wide = np.float64(excess)
                total[j] += wide
                squares[j] += wide * wide
                product[j] *= np.float64(_mantissa(excess))
                fields[j] += _exponent_field(excess)
                over[j] += np.int32(excess > 0)
        count, exponent = np.int64(0), np.int64(0)
        for j in range(LANES):
            count += over[j]
            exponent += fields[j] + _exponent(product[j])
            product[j] = _normalized(product[j])
        half = LANES // 2
        while half:
            for j in range(half):
                total[j] += total[j + half]
                squares[j] += squares[j + half]
                product[j] *= product[j + half]
            half //= 2
        row[COUNT], row[TOTAL], row[SQUARES], row[MANTISSA] = count, total[0], squares[0], product[0]
        row[EXPONENT] = exponent - 127 * count

    @_compiled(types.void(_f4, types.float32, _f8_rows))
    def block_exceedances(values, location, sums):
        """A row for each block of the values."""
        lanes, counts = np.empty((3, LANES)), np.empty((2, LANES), np.int32)
        for block in range(sums.shape[0]):
            here = values[block * BLOCK : min((block + 1) * BLOCK, values.size)]
            _sum_block(here, location, lanes, counts, sums[block])

    @_compiled(types.Tuple((types.float64, types.int64))(_f8_rows))
    def product_of_blocks(sums):
        mantissa, exponent = 1.0, np.int64(0)
        for block in range(sums.shape[0]):
            mantissa *= sums[block, MANTISSA]
            exponent += np.int64(sums[block, EXPONENT]) + _exponent(mantissa)
            mantissa = _normalized(mantissa)
        return mantissa, exponent

    @_compiled(*(types.int64(_f4, g, types.int32, types.int32, _i4, _f4, types.float32, _f8_rows) for g in _GRADIENTS))
    def accumulate_select_exceedances(residual, gradient, threshold, first_index, index_out, value_out, location, sums):
        # A block of the residual is looked at a second time while it is in the first-level cache.
        lanes, counts = np.empty((3, LANES)), np.empty((2, LANES), np.int32)
        found, capacity = np.int64(0), index_out.size
        for block in range(sums.shape[0]):
            start, end = block * BLOCK, min((block + 1) * BLOCK, residual.size)
            room = min(found, capacity)
            found += accumulate_select(
                *(residual[start:end], gradient[start:end], threshold, np.int32(first_index + start)),
                *(index_out[room:], value_out[room:]),
            )
            _sum_block(residual[start:end], location, lanes, counts, sums[block])
        return found
