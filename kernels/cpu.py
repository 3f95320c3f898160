"""The kernels for CPUs, compiled by Numba: see `reference` for what each one does.

All signatures are compiled at import, under a lock between processes: Numba's cache on disk is not safe when
many ranks compile at once. Kernels release the GIL; `host` runs them on several threads.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from okrt.kernels.bits import COARSE_BINS, COARSE_SHIFT, MAGNITUDE_MASK
from okrt.kernels.compile_lock import compile_lock

BLOCK = 2048  # elements; a block of residual and gradient stays in the first-level cache

PREFETCH = 24  # elements; how far ahead scattered memory is asked for

LANES = 64  # elements that one mask tells about

CHUNK = 64  # numbers added up one after the other in a sum of many

_WORD = ir.IntType(32)


def _vector(element, lanes=LANES):
    return ir.VectorType(element, lanes)


def _constant(like, value):
    """The value as a constant of that LLVM type, in every lane if it is a vector."""
    return ir.Constant(like, [value] * like.count if isinstance(like, ir.VectorType) else value)


def _everywhere(builder, value, lanes):
    """A vector with the value in every lane."""
    undefined = ir.Constant(_vector(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, undefined, _constant(_vector(_WORD, lanes), 0))


def _folded(builder, operation, vector):
    """All lanes as one number: the upper half of them is put on the lower half, again and again."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(_vector(_WORD, half), list(part)))
            for part in (range(half), range(half, 2 * half))
        )
        vector = operation(low, high)
    return builder.extract_element(vector, ir.Constant(_WORD, 0))


def _widened(builder, x, kind):
    """float32 of finite gradient elements, one or many: float32, or the bits of fp16 (uint16) or of bf16 (int16)."""
    if kind == types.float32:
        return x
    many = isinstance(x.type, ir.VectorType)
    word, single = (_vector(_WORD), _vector(ir.FloatType())) if many else (_WORD, ir.FloatType())
    wide = builder.zext(x, word)
    if kind == types.int16:
        return builder.bitcast(builder.shl(wide, _constant(word, 16)), single)
    # By hand: the conversion of LLVM needs a library call on processors without F16C.
    sign = builder.shl(builder.and_(wide, _constant(word, 0x8000)), _constant(word, 16))
    magnitude = builder.shl(builder.and_(wide, _constant(word, 0x7FFF)), _constant(word, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, single), _constant(single, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, word), sign), single)


def _load_vector(context, builder, array_type, array, start, lanes=LANES):
    """So many elements of the array from the one at start on, and where they are."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    where = builder.bitcast(builder.gep(data, [start]), _vector(element, lanes).as_pointer())
    return builder.load(where, align=array_type.dtype.bitwidth // 8), where


def _reaching_mask(builder, x, threshold):
    """A bit for each lane whose magnitude is at least the threshold."""
    magnitude = builder.and_(builder.bitcast(x, _vector(_WORD)), _constant(_vector(_WORD), MAGNITUDE_MASK))
    least = _everywhere(builder, threshold, LANES)
    return builder.bitcast(builder.icmp_signed(">=", magnitude, least), ir.IntType(LANES))


@intrinsic
def _mask_of_sum(typing_context, residual, gradient, start, threshold):
    """Adds LANES elements of the gradient to the residual; a bit for each whose sum reaches the threshold."""

    def generate(context, builder, signature, args):
        kept, where = _load_vector(context, builder, residual, args[0], args[2])
        added, _ = _load_vector(context, builder, gradient, args[1], args[2])
        total = builder.fadd(kept, _widened(builder, added, gradient.dtype))
        builder.store(total, where, align=4)
        return _reaching_mask(builder, total, args[3])

    return types.uint64(residual, gradient, types.int64, types.int32), generate


@intrinsic
def _mask(typing_context, values, start, threshold):
    """A bit for each of LANES elements that reaches the threshold."""

    def generate(context, builder, signature, args):
        here, _ = _load_vector(context, builder, values, args[0], args[1])
        return _reaching_mask(builder, here, args[2])

    return types.uint64(values, types.int64, types.int32), generate


@intrinsic
def _widen(typing_context, x):
    """float32 of a finite gradient element."""

    def generate(context, builder, signature, args):
        return _widened(builder, args[0], x)

    return types.float32(x), generate


@intrinsic
def _bits(typing_context, x):
    """The magnitude of a float32 as int32."""

    def generate(context, builder, signature, args):
        return builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, MAGNITUDE_MASK))

    return types.int32(types.float32), generate


@intrinsic
def _reaches(typing_context, x, threshold):
    """1 if the magnitude of a float32 is at least the threshold, else 0; kept to 32 bits, so that it vectorizes."""

    def generate(context, builder, signature, args):
        magnitude = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, MAGNITUDE_MASK))
        return builder.zext(builder.icmp_signed(">=", magnitude, args[1]), ir.IntType(8))

    return types.uint8(types.float32, types.int32), generate


@intrinsic
def _not_finite(typing_context, x):
    """1 if a gradient element is NaN or infinite, else 0."""
    width, exponent = {types.uint16: (16, 0x7C00), types.int16: (16, 0x7F80)}.get(x, (32, 0x7F800000))

    def generate(context, builder, signature, args):
        word = ir.IntType(width)
        exponent_bits = builder.and_(builder.bitcast(args[0], word), ir.Constant(word, exponent))
        return builder.zext(builder.icmp_unsigned("==", exponent_bits, ir.Constant(word, exponent)), _WORD)

    return types.uint32(x), generate


def _ask_for(builder, address):
    """The cache line there comes from memory, to be written, while other work goes on."""
    byte = builder.bitcast(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [byte.type, _WORD, _WORD, _WORD])
    call = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind)
    builder.call(call, [byte, *(ir.Constant(_WORD, flag) for flag in (1, 3, 1))])


@intrinsic
def _prefetch(typing_context, array, i):
    """Asks for the cache line of element i of the flat array."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        _ask_for(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def _trailing_zeros(typing_context, x):
    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


_f4, _i4, _i8 = types.float32[::1], types.int32[::1], types.int64[::1]
# A gradient is only read, so arrays that may not be written are taken too.
_GRADIENTS = tuple(types.Array(t, 1, "C", readonly=True) for t in (types.float32, types.uint16, types.int16))
_f4_rows = types.Array(types.float32, 2, "C")
_f8, _f8_rows = types.float64[::1], types.Array(types.float64, 2, "C")
_OPTIONS = {"nogil": True, "cache": True, "boundscheck": False}


def _compiled(*signatures, **options):
    return njit(list(signatures), **_OPTIONS, **options)


with compile_lock():

    @_compiled(*(types.boolean(g) for g in _GRADIENTS))
    def all_finite(gradient):
        # Two halves side by side: one stream of reads does not fill the memory channels.
        half = gradient.size // 2
        bad = types.uint32(0)
        for start in range(0, half, BLOCK):
            block = gradient[start : min(start + BLOCK, half)]
            other = gradient[half + start : half + start + block.size]
            for j in range(block.size):
                bad |= _not_finite(block[j]) | _not_finite(other[j])
            if bad:
                return False
        return not (gradient.size % 2 and _not_finite(gradient[gradient.size - 1]))

    @_compiled(*(types.void(_f4, g) for g in _GRADIENTS))
    def accumulate(residual, gradient):
        for i in range(residual.size):
            residual[i] += _widen(gradient[i])

    @njit(inline="always")
    def _emit(masks, starts, used, values, first_index, found, index_out, value_out):
        """Writes out the elements of `used` masks: a bit for each of the LANES elements of values from a start on."""
        for m in range(used):
            mask = masks[m]
            while mask != 0:
                j = starts[m] + np.int64(_trailing_zeros(mask))
                mask &= mask - np.uint64(1)
                if found < index_out.size:
                    index_out[found] = first_index + j
                    value_out[found] = values[j]
                found += 1
        return found

    # Masks without a bit are passed over by not counting them: a branch would be guessed wrong for most entries.

    @njit(inline="always")
    def _accumulate_masks(residual, gradient, first, end, threshold, masks, starts):
        """Adds the gradient to whole lanes of the residual from the first to the end; returns how many masks it has
        written of those that reach the threshold."""
        used = 0
        for start in range(first, end, LANES):
            masks[used], starts[used] = _mask_of_sum(residual, gradient, start, threshold), start
            used += masks[used] != 0
        return used

    @_compiled(*(types.int64(_f4, g, types.int32, types.int32, _i4, _f4) for g in _GRADIENTS))
    def accumulate_select(residual, gradient, threshold, first_index, index_out, value_out):
        masks, starts = np.empty(BLOCK // LANES, np.uint64), np.empty(BLOCK // LANES, np.int64)
        found = 0
        whole = residual.size // LANES * LANES
        for block in range(0, whole, BLOCK):
            end = min(block + BLOCK, whole)
            used = _accumulate_masks(residual, gradient, block, end, threshold, masks, starts)
            found = _emit(masks, starts, used, residual, first_index, found, index_out, value_out)
        masks[0], starts[0] = 0, whole
        for j in range(residual.size - whole):
            residual[whole + j] += _widen(gradient[whole + j])
            masks[0] |= np.uint64(_reaches(residual[whole + j], threshold)) << np.uint64(j)
        return _emit(masks, starts, 1, residual, first_index, found, index_out, value_out)

    @_compiled(types.int64(_f4, types.int32, types.int32, _i4, _f4))
    def select(values, threshold, first_index, index_out, value_out):
        masks, starts = np.empty(BLOCK // LANES, np.uint64), np.empty(BLOCK // LANES, np.int64)
        found = 0
        whole = values.size // LANES * LANES
        for block in range(0, whole, BLOCK):
            used = 0
            for start in range(block, min(block + BLOCK, whole), LANES):
                masks[used], starts[used] = _mask(values, start, threshold), start
                used += masks[used] != 0
            found = _emit(masks, starts, used, values, first_index, found, index_out, value_out)
        masks[0], starts[0] = 0, whole
        for j in range(values.size - whole):
            masks[0] |= np.uint64(_reaches(values[whole + j], threshold)) << np.uint64(j)
        return _emit(masks, starts, 1, values, first_index, found, index_out, value_out)

    @_compiled(types.int64(_f4, types.int32, types.int64, _i4, _f4))
    def select_top(values, threshold, ties, index_out, value_out):
        found = 0
        for i in range(values.size):
            magnitude = _bits(values[i])
            tie = magnitude == threshold and ties > 0
            if magnitude > threshold or tie:
                ties -= tie
                index_out[found] = i
                value_out[found] = values[i]
                found += 1
        return found

    @_compiled(types.int64(_f4, types.int32))
    def count(values, threshold):
        found = 0
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            in_block = types.uint32(0)
            for j in range(block.size):
                in_block += types.uint32(_reaches(block[j], threshold))
            found += in_block
        return found

    @_compiled(types.void(_f4, types.int32, types.int32, _i8))
    def histogram(values, low, shift, counts):
        for i in range(values.size):
            offset = np.int64(_bits(values[i])) - low
            j = offset >> shift
            if offset >= 0 and j < counts.size:
                counts[j] += 1

    @_compiled(*(types.void(_f4, g, types.int32, types.int32, _i8) for g in _GRADIENTS))
    def accumulate_histogram(residual, gradient, low, shift, counts):
        for start in range(0, residual.size, BLOCK):
            accumulate(residual[start : start + BLOCK], gradient[start : start + BLOCK])
            histogram(residual[start : start + BLOCK], low, shift, counts)

    @_compiled(types.void(_f4, _f8_rows))
    def block_moments(values, sums):
        # Lanes side by side, so that they vectorize without a change of the order in which numbers are added.
        total, squares = np.empty(LANES), np.empty(LANES)
        for block in range(sums.shape[0]):
            total[:], squares[:] = 0, 0
            for start in range(block * BLOCK, min((block + 1) * BLOCK, values.size), LANES):
                here = values[start : start + LANES]
                for j in range(here.size):
                    wide = np.float64(here[j])
                    total[j] += wide
                    squares[j] += wide * wide
            half = LANES // 2
            while half:
                for j in range(half):
                    total[j] += total[j + half]
                    squares[j] += squares[j + half]
                half //= 2
            sums[block, 0], sums[block, 1] = total[0], squares[0]

    @_compiled(types.float64(_f8))
    def chunked_sum(values):
        """Works in the memory of the values."""
        length = values.size
        while length > 1:
            chunks = (length + CHUNK - 1) // CHUNK
            for chunk in range(chunks):
                total = 0.0
                for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, length)):
                    total += values[i]
                values[chunk] = total
            length = chunks
        return values[0] if length else 0.0

    @_compiled(types.int64(_f4, types.int64))
    def _kth_bits(values, k):
        low, shift, wanted = 0, COARSE_SHIFT, k
        counts = np.zeros(COARSE_BINS, np.int64)
        while True:
            counts[:] = 0
            histogram(values, low, shift, counts)
            j = counts.size - 1
            while wanted > counts[j]:
                wanted -= counts[j]
                j -= 1
            low += j << shift
            if shift == 0:
                return low
            # The bin found is split into as many as the table holds, until a bin is one magnitude.
            counts = counts[: 1 << min(12, shift)]
            shift = max(0, shift - 12)

    @_compiled(types.int64(_f4, types.int64))
    def kth_magnitude(values, k):
        return max(1, _kth_bits(values, k))

    @_compiled(types.int64(_i4, _f4, types.int32, types.int64))
    def keep_reaching(index, value, threshold, k):
        ties = k - count(value, threshold + 1)
        kept = 0
        for i in range(index.size):
            magnitude = _bits(value[i])
            index[kept] = index[i]
            value[kept] = value[i]
            tie = magnitude == threshold and ties > 0
            ties -= tie
            kept += magnitude > threshold or tie
        return kept

    @_compiled(types.int64(_i4, _f4, types.int64))
    def keep_top(index, value, k):
        if index.size <= k:
            return index.size
        return keep_reaching(index, value, _kth_bits(value, k), k) if k > 0 else 0

    @_compiled(types.void(_f4, _i4, _f4))
    def scatter_add(dense, index, value):
        for i in range(index.size):
            dense[index[i]] += value[i]

    @_compiled(types.int64(_i4, _f4, _i4, _f4, _i4, _f4))
    def merge_add(index_a, value_a, index_b, value_b, index_out, value_out):
        a, b, length = 0, 0, 0
        while a < index_a.size and b < index_b.size:
            here_a, here_b = index_a[a], index_b[b]
            # Written without branches: which list comes next is a coin toss to the branch predictor.
            # Adding -0.0 leaves any number as it is.
            take_a = here_a <= here_b
            take_b = here_b <= here_a
            part_a = value_a[a] if take_a else np.float32(-0.0)
            part_b = value_b[b] if take_b else np.float32(-0.0)
            index_out[length] = here_a if take_a else here_b
            value_out[length] = part_a + part_b
            a += take_a
            b += take_b
            length += 1
        while a < index_a.size:
            index_out[length], value_out[length] = index_a[a], value_a[a]
            a += 1
            length += 1
        while b < index_b.size:
            index_out[length], value_out[length] = index_b[b], value_b[b]
            b += 1
            length += 1
        return length

    @_compiled(types.void(_f4, _i4, _i4))
    def clear_common(residual, index_a, index_b):
        a, b = 0, 0
        while a < index_a.size and b < index_b.size:
            here_a, here_b = index_a[a], index_b[b]
            if here_a == here_b:
                residual[here_a] = 0
            a += here_a <= here_b
            b += here_b <= here_a

    @_compiled(types.void(_f4, _i4, _f4, _i4, _i4))
    def keep_lost(residual, index, value, kept, delivered):
        in_kept, in_delivered = 0, 0
        for i in range(index.size):
            _prefetch(residual, np.int64(index[min(i + PREFETCH, index.size - 1)]))
            here = index[i]
            while in_kept < kept.size and kept[in_kept] < here:
                in_kept += 1
            while in_delivered < delivered.size and delivered[in_delivered] < here:
                in_delivered += 1
            was_kept = in_kept < kept.size and kept[in_kept] == here
            was_delivered = in_delivered < delivered.size and delivered[in_delivered] == here
            if was_delivered and not was_kept:
                residual[here] += value[i]

    @_compiled(types.float64(_f4, _f4, _f4_rows, _i4, _f4_rows, *[types.int64] + 5 * [types.float32]))
    def lag_adamw(weight, gradient, moments, index, table, step, lr, bias1, bias2, eps, cap):
        longest = np.float32(table.shape[1] - 1)
        now = np.float32(step)
        rows = moments.reshape(moments.size)
        v_change = 0.0
        for j in range(index.size):
            # Every element is a cache miss or three: they are asked for ahead, so that they do not add up.
            ahead = np.int64(index[min(j + PREFETCH, index.size - 1)])
            _prefetch(rows, 3 * ahead)
            _prefetch(weight, ahead)
            _prefetch(gradient, ahead)
            i = index[j]
            lag = now - moments[i, 2]
            column = np.int64(min(lag, longest))
            mean = gradient[i] / lag
            m = table[0, column] * moments[i, 0] + table[1, column] * mean
            v = table[2, column] * moments[i, 1] + table[3, column] * (mean * mean)
            stride = lr * min(lag, cap)
            change = stride * (m / bias1) / (np.sqrt(v / bias2) + eps)
            weight[i] = table[4, column] * weight[i] - change
            v_change += np.float64(v) - np.float64(moments[i, 1])
            moments[i, 0], moments[i, 1], moments[i, 2] = m, v, now
        return v_change

    @_compiled(types.void(_f4, _f4, _f4_rows, _i4, types.float32, types.float32))
    def balance(residual, weights, moments, index, floor, power):
        rows = moments.reshape(moments.size)
        for j in range(index.size):
            ahead = np.int64(index[min(j + PREFETCH, index.size - 1)])
            _prefetch(rows, 3 * ahead)
            _prefetch(residual, ahead)
            _prefetch(weights, ahead)
            i = index[j]
            scale = np.float64(np.sqrt(moments[i, 1]) + floor)
            # The usual power takes a tenth of the time of any other.
            new = np.float32(1 / np.sqrt(scale) if power == 0.5 else scale ** -np.float64(power))
            residual[i] *= new / weights[i]
            weights[i] = new
