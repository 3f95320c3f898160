"""The kernels of `packed` for CPUs, compiled by Numba as those of `cpu` are."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from okrt.kernels.bits import MAGNITUDE_MASK
from okrt.kernels.compile_lock import compile_lock
from okrt.kernels.cpu import _WORD, _compiled, _constant, _folded, _load_vector, _trailing_zeros, _widen
from okrt.kernels.packed import (
    BITMAP,
    BLOCK,
    CHECKSUM,
    EXPONENT_BIAS,
    EXPONENT_LIMITS,
    FP16_LARGEST,
    FP16_LARGEST_IN_FLOAT32,
    GAPS,
    HEADER,
    KINDS,
    MAGIC,
    MIX,
    PLAIN_MASK,
    TOP_EXPONENT,
    VERSION,
)

NONE, FP32, FP16, BF16 = KINDS.values()
LOWEST, HIGHEST = EXPONENT_LIMITS

_f4, _i4 = types.float32[::1], types.int32[::1]
_message = types.Array(types.int32, 1, "C", readonly=True)


@intrinsic
def _mixed(typing_context, total, word, place):
    """The total and what depends on all bits of a word and its place; in 32 bits throughout, so that it vectorizes."""

    def generate(context, builder, signature, args):
        first, second, third = (ir.Constant(_WORD, factor) for factor in MIX)
        x = builder.mul(builder.xor(args[1], builder.mul(args[2], first)), second)
        x = builder.mul(builder.xor(x, builder.lshr(x, ir.Constant(_WORD, 15))), third)
        return builder.add(args[0], x)

    return types.uint32(types.uint32, types.int32, types.int32), generate


@intrinsic
def _bits_of_gaps(typing_context, index, start):
    """All bits that any of the BLOCK gaps from the start on has."""

    def generate(context, builder, signature, args):
        behind = builder.add(args[1], ir.Constant(ir.IntType(64), 1))
        left, right = (_load_vector(context, builder, index, args[0], at, BLOCK)[0] for at in (args[1], behind))
        gaps = builder.sub(builder.sub(right, left), _constant(left.type, 1))
        return _folded(builder, builder.or_, gaps)

    return types.int32(index, types.int64), generate


def _at_most(builder, x, limit):
    bound = ir.Constant(_WORD, limit) if isinstance(limit, int) else limit
    return builder.select(builder.icmp_unsigned("<", x, bound), x, bound)


def _parts(builder, x):
    """The sign of a float32 where a 16-bit number has it, and its magnitude."""
    bits = builder.bitcast(x, _WORD)
    sign = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 0x8000))
    return sign, builder.and_(bits, ir.Constant(_WORD, MAGNITUDE_MASK))


def _to_even(builder, magnitude, dropped):
    """The magnitude so that cutting off `dropped` bits rounds to nearest even."""
    last = builder.and_(builder.lshr(magnitude, ir.Constant(_WORD, dropped)), ir.Constant(_WORD, 1))
    return builder.add(builder.add(magnitude, ir.Constant(_WORD, (1 << (dropped - 1)) - 1)), last)


@intrinsic
def _narrow_fp16(typing_context, x, largest):
    def generate(context, builder, signature, args):
        sign, magnitude = _parts(builder, args[0])
        magnitude = _at_most(builder, magnitude, 0x477FE000)
        # Adding a half puts the last bit of a subnormal number of fp16 where float32 rounds.
        moved = builder.fadd(builder.bitcast(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 0.5))
        subnormal = builder.sub(builder.bitcast(moved, _WORD), ir.Constant(_WORD, 0x3F000000))
        rebased = builder.sub(_to_even(builder, magnitude, 13), ir.Constant(_WORD, 0x38000000))
        normal = builder.lshr(rebased, ir.Constant(_WORD, 13))
        is_small = builder.icmp_unsigned("<", magnitude, ir.Constant(_WORD, 0x38800000))
        half = _at_most(builder, builder.select(is_small, subnormal, normal), args[1])
        return builder.trunc(builder.or_(sign, half), ir.IntType(16))

    return types.uint16(types.float32, types.int32), generate


@intrinsic
def _narrow_bf16(typing_context, x):
    def generate(context, builder, signature, args):
        sign, magnitude = _parts(builder, args[0])
        rounded = builder.lshr(_to_even(builder, magnitude, 16), ir.Constant(_WORD, 16))
        return builder.trunc(builder.or_(sign, _at_most(builder, rounded, 0x7F7F)), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def _missing(typing_context, x, seen):
    """x - seen, or 0 where that is no number."""

    def generate(context, builder, signature, args):
        lacking, exponent = builder.fsub(*args), ir.Constant(_WORD, 0x7F800000)
        is_number = builder.icmp_unsigned("!=", builder.and_(builder.bitcast(lacking, _WORD), exponent), exponent)
        return builder.select(is_number, lacking, ir.Constant(ir.FloatType(), 0.0))

    return types.float32(types.float32, types.float32), generate


@intrinsic
def _width(typing_context, x):
    """Bits that a non-negative number takes."""

    def generate(context, builder, signature, args):
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.int64(types.int64), generate


with compile_lock():

    @_compiled(types.int64(_message, types.int64))
    def checksum(message, place):
        total, itself = np.uint32(0), message[place]
        for i in range(message.size):
            total = _mixed(total, message[i], np.int32(i))
        others = np.int64(total) - np.int64(_mixed(np.uint32(0), itself, np.int32(place)))
        size = np.int64(_mixed(np.uint32(0), np.int32(message.size), np.int32(place)))
        return (others + size) & 0xFFFFFFFF

    @_compiled(types.UniTuple(types.int64, 4)(_message))
    def inspect(message):
        is_plain = message[0] >= 0 or message.size < HEADER
        place = message.size - 1 if is_plain else CHECKSUM
        right = checksum(message, place) & (PLAIN_MASK if is_plain else 0xFFFFFFFF)
        second = np.int64(np.uint32(message[1])) if message.size > 1 else np.int64(0)
        return np.int64(np.uint32(message[0])), second, np.int64(np.uint32(message[place])), right

    @njit(inline="always")
    def _pack_plain(index, value, kind, message, error):
        entries = index.size
        error[:] = 0
        message[:entries] = index
        end = entries
        if kind != NONE:
            message[entries : 2 * entries] = value.view(np.int32)
            end += entries
        message[end] = np.int32(checksum(message[: end + 1], end) & PLAIN_MASK)
        return end + 1

    @njit(inline="always")
    def _scale_exponent(value):
        largest = np.int64(0)
        bits = value.view(np.int32)
        for i in range(bits.size):
            largest = max(largest, np.int64(bits[i] & np.int32(MAGNITUDE_MASK)))
        return min(max((largest >> 23) - 127 - TOP_EXPONENT, LOWEST), HIGHEST)

    @_compiled(types.int64(_i4, _i4))
    def _measure_gaps(index, message):
        """Writes the width of each block; returns how many words widths and blocks take."""
        count = index.size - 1
        blocks = (count + BLOCK - 1) // BLOCK
        length = (blocks + 3) // 4
        message[HEADER : HEADER + length] = 0
        widths = message[HEADER : HEADER + length].view(np.uint8)
        for block in range(blocks):
            start = block * BLOCK
            here = min(BLOCK, count - start)
            if here == BLOCK:
                bits = _bits_of_gaps(index, start)
            else:
                bits = np.int32(0)
                for j in range(start, start + here):
                    bits |= index[j + 1] - index[j] - np.int32(1)
            width = _width(np.int64(bits))
            widths[block] = width
            length += (here * width + 31) >> 5
        return length

    @_compiled(types.void(_i4, _i4))
    def _write_gaps(index, message):
        count = index.size - 1
        blocks = (count + BLOCK - 1) // BLOCK
        at = HEADER + (blocks + 3) // 4
        widths = message[HEADER:at].view(np.uint8)
        for block in range(blocks):
            start = block * BLOCK
            end = min(start + BLOCK, count)
            width = np.int64(widths[block])
            waiting, filled = np.uint64(0), np.int64(0)
            for j in range(start, end):
                gap = np.uint64(index[j + 1] - index[j] - 1)
                waiting |= gap << np.uint64(filled)
                filled += width
                if filled >= 32:
                    message[at] = np.int32(waiting & np.uint64(0xFFFFFFFF))
                    at += 1
                    waiting >>= np.uint64(32)
                    filled -= 32
            if filled > 0:
                message[at] = np.int32(waiting & np.uint64(0xFFFFFFFF))
                at += 1

    @_compiled(types.int64(_i4, _f4, types.int64, _i4, _f4))
    def pack(index, value, kind, message, error):
        entries = index.size
        value_words = 0 if kind == NONE else entries if kind == FP32 else (entries + 1) // 2
        plain = (1 if kind == NONE else 2) * entries + 1
        if HEADER + 1 + value_words > plain:
            return _pack_plain(index, value, kind, message, error)
        exponent = _scale_exponent(value) if kind == FP16 else 0
        layout, length = GAPS, _measure_gaps(index, message)
        bitmap = ((np.int64(index[entries - 1]) - np.int64(index[0])) >> 5) + 1
        if HEADER + min(length, bitmap) + value_words > plain:
            return _pack_plain(index, value, kind, message, error)
        if bitmap < length:
            layout, length = BITMAP, bitmap
            words = message[HEADER : HEADER + length]
            words[:] = 0
            for i in range(entries):
                place = index[i] - index[0]
                words[place >> 5] |= np.int32(1) << np.int32(place & 31)
        else:
            _write_gaps(index, message)
        at = HEADER + length
        end = at + value_words
        if kind == FP32:
            message[at:end] = value.view(np.int32)
        elif kind != NONE:
            if entries % 2:
                message[end - 1] = 0
            if kind == FP16:
                down, up = np.float32(2.0**-exponent), np.float32(2.0**exponent)
                largest = np.int32(FP16_LARGEST_IN_FLOAT32 if exponent == HIGHEST else FP16_LARGEST)
                halves = message[at:end].view(np.uint16)
                for i in range(entries):
                    half = _narrow_fp16(value[i] * down, largest)
                    seen = _widen(half) * up
                    halves[i], error[i], value[i] = half, _missing(value[i], seen), seen
            else:
                shorts = message[at:end].view(np.int16)
                for i in range(entries):
                    short = _narrow_bf16(value[i])
                    seen = _widen(short)
                    shorts[i], error[i], value[i] = short, _missing(value[i], seen), seen
        message[0] = np.int32(MAGIC << 24 | (exponent + EXPONENT_BIAS) << 16 | kind << 12 | layout << 8 | VERSION)
        message[1], message[2] = entries, index[0]
        message[CHECKSUM] = np.int32(checksum(message[:end], CHECKSUM))
        return end

    @njit(inline="always")
    def _read_gaps(message, first, index_out):
        count = index_out.size - 1
        blocks = (count + BLOCK - 1) // BLOCK
        at = HEADER + (blocks + 3) // 4
        widths = message[HEADER:at].view(np.uint8)
        index = first
        index_out[0] = index
        for block in range(blocks):
            start = block * BLOCK
            end = min(start + BLOCK, count)
            width = np.int64(widths[block])
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
            waiting, filled = np.uint64(0), np.int64(0)
            for j in range(start, end):
                if filled < width:
                    waiting |= np.uint64(np.uint32(message[at])) << np.uint64(filled)
                    at += 1
                    filled += 32
                index += np.int64(waiting & mask) + 1
                waiting >>= np.uint64(width)
                filled -= width
                index_out[j + 1] = index

    @_compiled(types.void(_message, _i4, _f4))
    def unpack(message, index_out, value_out):
        entries = index_out.size
        if message[0] >= 0:
            index_out[:] = message[:entries]
            value_out[:] = message[entries : message.size - 1].view(np.float32)
            return
        tag = np.int64(np.uint32(message[0]))
        kind, layout, exponent = (tag >> 12) & 15, (tag >> 8) & 15, ((tag >> 16) & 255) - EXPONENT_BIAS
        value_words = 0 if kind == NONE else entries if kind == FP32 else (entries + 1) // 2
        end = message.size - value_words
        if layout == BITMAP:
            at = 0
            for word in range(HEADER, end):
                bits = np.uint64(np.uint32(message[word]))
                first = np.int64(message[2]) + 32 * (word - HEADER)
                while bits != 0:
                    index_out[at] = first + np.int64(_trailing_zeros(bits))
                    bits &= bits - np.uint64(1)
                    at += 1
        else:
            _read_gaps(message, np.int64(message[2]), index_out)
        if kind == FP32:
            value_out[:] = message[end:].view(np.float32)
        elif kind == FP16:
            up = np.float32(2.0**exponent)
            halves = message[end:].view(np.uint16)
            for i in range(entries):
                value_out[i] = _widen(halves[i]) * up
        elif kind == BF16:
            shorts = message[end:].view(np.int16)
            for i in range(entries):
                value_out[i] = _widen(shorts[i])
