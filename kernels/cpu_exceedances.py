"""The kernel that fits of distributions need, for CPUs, compiled by Numba as those of `cpu` are."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from okrt.kernels.bits import MAGNITUDE_MASK
from okrt.kernels.compile_lock import compile_lock
from okrt.kernels.cpu import (
    _GRADIENTS,
    _WORD,
    BLOCK,
    LANES,
    _accumulate_masks,
    _ask_for,
    _compiled,
    _constant,
    _emit,
    _everywhere,
    _folded,
    _vector,
    accumulate_select,
)

COUNT, TOTAL, SQUARES, MANTISSA, EXPONENT = range(5)
COLUMNS = 5
"""of what is known of a block"""

ROWS = BLOCK // LANES
GROUP = 16
"""lanes that are summed at a time: as many as there are registers for"""

_f4, _i4 = types.float32[::1], types.int32[::1]
_f8_rows = types.Array(types.float64, 2, "C")
_LONG, _FLOAT, _DOUBLE = ir.IntType(64), ir.FloatType(), ir.DoubleType()
_words, _longs, _floats, _doubles = (_vector(element, GROUP) for element in (_WORD, _LONG, _FLOAT, _DOUBLE))


def _exponent_of(builder, bits):
    """Of normal positive float64, one or many, given as their bits."""
    return builder.sub(builder.lshr(bits, _constant(bits.type, 52)), _constant(bits.type, 1023))


def _without_exponent(builder, bits):
    """The bits of what is left of them without their power of two: from 1 to 2."""
    fraction = builder.and_(bits, _constant(bits.type, (1 << 52) - 1))
    return builder.or_(fraction, _constant(bits.type, 1023 << 52))


def _sum_group(builder, data, low, ahead):
    """Of GROUP lanes of a block, from the address of the first on: sums, squares and products of what exceeds `low`,
    sums of exponents, and how many. What lies as far behind each of the addresses `ahead` is asked for."""
    start = [_constant(_doubles, number) for number in (0.0, 0.0, 1.0)] + [_constant(_words, 0)] * 2
    # The compiler keeps these in registers.
    places = [cgutils.alloca_once_value(builder, value) for value in start]
    with cgutils.for_range(builder, ir.Constant(_LONG, ROWS)) as row:
        total, squares, product, fields, count = map(builder.load, places)
        offset = builder.mul(row.index, ir.Constant(_LONG, LANES))
        for address in ahead:
            _ask_for(builder, builder.gep(address, [offset]))
        here = builder.bitcast(builder.gep(data, [offset]), _words.as_pointer())
        magnitude = builder.and_(builder.load(here, align=4), _constant(_words, MAGNITUDE_MASK))
        beyond = builder.fsub(builder.bitcast(magnitude, _floats), low)
        is_over = builder.fcmp_ordered(">", beyond, _constant(_floats, 0.0))
        excess = builder.select(is_over, beyond, _constant(_floats, 0.0))
        wide, bits = builder.fpext(excess, _doubles), builder.bitcast(excess, _words)
        # From 1 to 2; 1 of zero.
        mantissa = builder.or_(builder.and_(bits, _constant(_words, 0x7FFFFF)), _constant(_words, 0x3F800000))
        found = (
            builder.fadd(total, wide),
            builder.fadd(squares, builder.fmul(wide, wide)),
            builder.fmul(product, builder.fpext(builder.bitcast(mantissa, _floats), _doubles)),
            builder.add(fields, builder.lshr(bits, _constant(_words, 23))),
            builder.add(count, builder.zext(is_over, _words)),
        )
        for place, value in zip(places, found, strict=True):
            builder.store(value, place)
    return [builder.load(place) for place in places]


def _total(builder, operation, groups):
    """All lanes of all groups as one number."""
    while len(groups) > 1:
        half = len(groups) // 2
        groups = [operation(a, b) for a, b in zip(groups[:half], groups[half:], strict=True)]
    return _folded(builder, operation, groups[0])


@intrinsic
def _sum_block(typing_context, values, start, location, sums, block, gradient):
    """Fills the row of a block with what is known of the BLOCK values from the start on. Meanwhile the next block comes
    from memory, and that of the gradient if it is not None."""

    def generate(context, builder, signature, args):
        def data_of(i):
            return context.make_array(signature.args[i])(context, builder, args[i]).data

        arrays = [data_of(i) for i in ((0,) if gradient == types.none else (0, 5))]
        low, groups = _everywhere(builder, args[2], GROUP), []
        for first in range(0, LANES, GROUP):
            here, ahead = (builder.add(args[1], ir.Constant(_LONG, first + more)) for more in (0, BLOCK))
            coming = [builder.gep(array, [ahead]) for array in arrays]
            groups.append(_sum_group(builder, builder.gep(arrays[0], [here]), low, coming))
        total, squares, product, fields, count = zip(*groups, strict=True)
        bits = [builder.bitcast(group, _longs) for group in product]
        normal = [builder.bitcast(_without_exponent(builder, group), _doubles) for group in bits]
        exponents = _total(builder, builder.add, [_exponent_of(builder, group) for group in bits])
        fields, count = (builder.zext(_total(builder, builder.add, part), _LONG) for part in (fields, count))
        bias = builder.mul(ir.Constant(_LONG, 127), count)
        row = {
            COUNT: builder.sitofp(count, _DOUBLE),
            TOTAL: _total(builder, builder.fadd, total),
            SQUARES: _total(builder, builder.fadd, squares),
            MANTISSA: _total(builder, builder.fmul, normal),
            EXPONENT: builder.sitofp(builder.sub(builder.add(fields, exponents), bias), _DOUBLE),
        }
        first = builder.mul(args[4], ir.Constant(_LONG, COLUMNS))
        for column, value in row.items():
            at = builder.add(first, ir.Constant(_LONG, column))
            builder.store(value, builder.gep(data_of(3), [at]))
        return context.get_dummy_value()

    return types.void(values, types.int64, types.float32, sums, types.int64, gradient), generate


@intrinsic
def _exponent(typing_context, x):
    """Of a normal positive float64."""

    def generate(context, builder, signature, args):
        return _exponent_of(builder, builder.bitcast(args[0], _LONG))

    return types.int64(types.float64), generate


@intrinsic
def _normalized(typing_context, x):
    """A normal positive float64 without its power of two: from 1 to 2."""

    def generate(context, builder, signature, args):
        return builder.bitcast(_without_exponent(builder, builder.bitcast(args[0], _LONG)), _DOUBLE)

    return types.float64(types.float64), generate


with compile_lock():

    @njit(inline="always")
    def _sum_rest(values, location, sums):
        """The last row, of what is left of the values where it is no whole block."""
        whole = values.size // BLOCK
        if whole < sums.shape[0]:
            rest = np.zeros(BLOCK, np.float32)
            rest[: values.size - whole * BLOCK] = values[whole * BLOCK :]
            _sum_block(rest, 0, location, sums, whole, None)

    @_compiled(types.void(_f4, types.float32, _f8_rows))
    def block_exceedances(values, location, sums):
        """A row for each block of the values."""
        for block in range(values.size // BLOCK):
            _sum_block(values, block * BLOCK, location, sums, block, None)
        _sum_rest(values, location, sums)

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
        masks, starts = np.empty(BLOCK // LANES, np.uint64), np.empty(BLOCK // LANES, np.int64)
        found, blocks = np.int64(0), residual.size // BLOCK
        for block in range(blocks):
            start = block * BLOCK
            used = _accumulate_masks(residual, gradient, start, start + BLOCK, threshold, masks, starts)
            found = _emit(masks, starts, used, residual, first_index, found, index_out, value_out)
            _sum_block(residual, start, location, sums, block, gradient)
        rest, room = slice(blocks * BLOCK, residual.size), slice(min(found, index_out.size), index_out.size)
        found += accumulate_select(
            *(residual[rest], gradient[rest], threshold, np.int32(first_index + rest.start)),
            *(index_out[room], value_out[room]),
        )
        _sum_rest(residual, location, sums)
        return found
