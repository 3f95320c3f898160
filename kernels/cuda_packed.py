"""More device code of `cuda`: the messages of `packed`.

A tile of gaps holds whole blocks of them, and the threads that share a block are its lanes.
"""

from typing import Any

import numpy as np
from numba import cuda, types

from okrt.kernels.bits import MAGNITUDE_MASK
from okrt.kernels.cuda_code import (
    ITEMS,
    STAGED,
    THREADS,
    TILE,
    WIDEN,
    _place,
    _scan,
    before_tile,
    bits_of,
    clear,
    float_of,
    tile_number,
)
from okrt.kernels.cuda_entries import _NARROW, _missing, _product
from okrt.kernels.packed import BITMAP, BLOCK, CHECKSUM, EXPONENT_BIAS, GAPS, HEADER, KINDS, MIX

NONE, FP32, FP16, BF16 = KINDS.values()
LANES = BLOCK // ITEMS
STAGED_ENTRIES = STAGED + 1  # one more than there are gaps between them
WORD_MASK = 2**32 - 1
FACTORS = tuple(np.uint64(factor) for factor in MIX)

_f4, _i4, _i8 = types.float32[::1], types.int32[::1], types.int64[::1]
_u1, _u2, _i2 = types.uint8[::1], types.uint16[::1], types.int16[::1]
_narrow_fp16, _narrow_bf16 = _NARROW["float16"], _NARROW["bfloat16"]
_widen_fp16, _widen_bf16 = WIDEN["float16"], WIDEN["bfloat16"]


@cuda.jit(device=True)
def _unsigned(word):
    return np.int64(word) & np.int64(WORD_MASK)


@cuda.jit(device=True)
def _signed(bits):
    """The word with these 32 bits."""
    return np.int32(bits - ((bits & np.int64(0x80000000)) << np.int64(1)))


# Checksums: the sum does not depend on the order of threads.


@cuda.jit(device=True)
def _mixed(word, place):
    """In 64 bits, where no product overflows."""
    mask = np.uint64(WORD_MASK)
    x = np.uint64(_unsigned(word)) ^ ((np.uint64(place) * FACTORS[0]) & mask)
    x = (x * FACTORS[1]) & mask
    x ^= x >> np.uint64(15)
    return np.int64((x * FACTORS[2]) & mask)


@cuda.jit(device=True)
def _add_up(message, place, found):
    """found[0] grows by the checksum of the words but the one at `place`, which counts as how many there are."""
    sums = cuda.shared.array(THREADS, types.int64)
    mine = np.int64(0)
    for i in range(cuda.grid(1), message.size, cuda.gridsize(1)):
        mine += _mixed(np.int32(message.size) if i == place else message[i], i)
    _scan(mine, sums)
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(found, 0, sums[THREADS - 1])


@cuda.jit
def checksum(message, place, found):
    _add_up(message, place, found)


@cuda.jit
def seal(message, place, mask, found):
    message[place] = _signed(found[0] & mask)


@cuda.jit
def inspect(message, found):
    """found becomes the right checksum (in more bits than count), the first word, the second, the checksum it has."""
    place = np.int64(message.size - 1 if message[0] >= 0 or message.size < HEADER else CHECKSUM)
    _add_up(message, place, found)
    if cuda.grid(1) == 0:
        found[1] = _unsigned(message[0])
        found[2] = _unsigned(message[1]) if message.size > 1 else np.int64(0)
        found[3] = _unsigned(message[place])


# Where the entries are


@cuda.jit(device=True)
def _stage(index, start, here, staged):
    """The entries on both sides of the `here` gaps of a tile; those of the tile before were last read before a barrier
    in `_width`."""
    for j in range(ITEMS):
        i = j * THREADS + cuda.threadIdx.x
        if i < here:
            staged[_place(i)] = index[start + i]
    if cuda.threadIdx.x == 0:
        staged[_place(here)] = index[start + here]
    cuda.syncthreads()


@cuda.jit(device=True)
def _gap(staged, i):
    return staged[_place(i + 1)] - staged[_place(i)] - np.int32(1)


@cuda.jit(device=True)
def _width(staged, here, bits):
    """In bits, of the gaps of the block that this thread shares; it looks at ITEMS of them itself."""
    own = np.int32(0)
    for j in range(ITEMS):
        i = cuda.threadIdx.x * ITEMS + j
        if i < here:
            own |= _gap(staged, i)
    bits[cuda.threadIdx.x] = own
    cuda.syncthreads()
    own = np.int32(0)
    first = cuda.threadIdx.x // LANES * LANES
    for lane in range(LANES):
        own |= bits[first + lane]
    return np.int64(32 - cuda.clz(np.int32(own)))


@cuda.jit(device=True)
def _length(here):
    """Of this thread's block, which may be cut off by the end of the gaps or lie behind it."""
    return max(np.int64(0), min(np.int64(BLOCK), here - cuda.threadIdx.x // LANES * BLOCK))


@cuda.jit(device=True)
def _words(length, width):
    """That a block takes."""
    return (length * width + 31) >> 5


@cuda.jit
def measure(index, found):
    """found[0] grows by the words of all blocks; found[1] and [2] become the first and the last index."""
    staged = cuda.shared.array(STAGED_ENTRIES, types.int32)
    bits = cuda.shared.array(THREADS, types.int32)
    sums = cuda.shared.array(THREADS, types.int64)
    count = np.int64(index.size - 1)
    mine = np.int64(0)
    for tile in range(cuda.blockIdx.x, (count + TILE - 1) // TILE, cuda.gridDim.x):
        start = np.int64(tile) * TILE
        here = min(np.int64(TILE), count - start)
        _stage(index, start, here, staged)
        width = _width(staged, here, bits)
        if cuda.threadIdx.x % LANES == 0:
            mine += _words(_length(here), width)
    _scan(mine, sums)
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(found, 0, sums[THREADS - 1])
    if cuda.grid(1) == 0:
        found[1], found[2] = index[0], index[count]


@cuda.jit
def write_gaps(index, widths, words, state):
    """The widths, which go on as zeros to the end of a word, and the blocks."""
    staged = cuda.shared.array(STAGED_ENTRIES, types.int32)
    bits = cuda.shared.array(THREADS, types.int32)
    sums = cuda.shared.array(THREADS, types.int64)
    base = cuda.shared.array(1, types.int64)
    count = np.int64(index.size - 1)
    tile = tile_number(state)
    start = np.int64(tile) * TILE
    here = min(np.int64(TILE), count - start)
    _stage(index, start, here, staged)
    width, length = _width(staged, here, bits), _length(here)
    used = _words(length, width)
    block, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
    # Of a block the first lane counts, so that to the others it lies before them.
    own = used if lane == 0 else np.int64(0)
    at = _scan(own, sums) + own - used + before_tile(state, tile, sums[THREADS - 1], base)
    if lane == 0 and length > 0:
        widths[start // BLOCK + block] = width
    # A word at a time, of all gaps that have bits in it: nobody else writes there.
    for word in range(lane, used, LANES):
        j = np.int64(word * 32 // width)
        shift, held = j * width - word * 32, np.int64(0)
        while shift < 32 and j < length:
            gap = np.int64(_gap(staged, block * BLOCK + j))
            held |= gap << shift if shift >= 0 else gap >> -shift
            shift += width
            j += 1
        words[at + word] = _signed(held & np.int64(WORD_MASK))
    if tile == cuda.gridDim.x - 1 and cuda.threadIdx.x == THREADS - 1:
        for place in range((count + BLOCK - 1) // BLOCK, widths.size):
            widths[place] = 0


@cuda.jit
def write_bitmap(index, words):
    """Into words that are zero."""
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        place = np.int64(index[i] - index[0])
        cuda.atomic.or_(words, place >> 5, _signed(np.int64(1) << (place & 31)))


@cuda.jit
def write_head(message, tag, entries, first):
    message[0], message[1], message[2] = tag, entries, first


# Values


@cuda.jit
def largest(value, found):
    """found[0] becomes the largest magnitude, or stays what it is if that is larger."""
    top = cuda.shared.array(1, types.int32)
    if cuda.threadIdx.x == 0:
        top[0] = 0
    cuda.syncthreads()
    mine = np.int32(0)
    for i in range(cuda.grid(1), value.size, cuda.gridsize(1)):
        mine = max(mine, bits_of(value[i]) & np.int32(MAGNITUDE_MASK))
    cuda.atomic.max(top, 0, np.int32(mine))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.max(found, 0, np.int64(top[0]))


@cuda.jit
def write_fp16(value, down, up, limit, halves, error):
    """The values times `down`, up to the limit; there is one half more than values if that fills a word."""
    for i in range(cuda.grid(1), value.size, cuda.gridsize(1)):
        half = np.int32(_narrow_fp16(_product(value[i], down)))
        half = (half & np.int32(0x8000)) | min(half & np.int32(0x7FFF), limit)
        seen = _product(_widen_fp16(half), up)
        halves[i], error[i], value[i] = half, _missing(value[i], seen), seen
    if cuda.grid(1) == 0 and halves.size > value.size:
        halves[value.size] = 0


@cuda.jit
def write_bf16(value, halves, error):
    for i in range(cuda.grid(1), value.size, cuda.gridsize(1)):
        half = _narrow_bf16(value[i])
        seen = _widen_bf16(half)
        halves[i], error[i], value[i] = half, _missing(value[i], seen), seen
    if cuda.grid(1) == 0 and halves.size > value.size:
        halves[value.size] = 0


# Reading: which kernel has something to do is told by the message itself.


@cuda.jit(device=True)
def _is_laid_out(message, layout):
    return message[0] < 0 and (message[0] >> np.int32(8)) & np.int32(15) == layout


@cuda.jit(device=True)
def _kind(message):
    return (message[0] >> np.int32(12)) & np.int32(15)


@cuda.jit(device=True)
def _values_begin(message, entries):
    kind = _kind(message)
    words = 0 if kind == NONE else entries if kind == FP32 else (entries + 1) // 2
    return np.int64(message.size - words)


@cuda.jit(device=True)
def _read_gap(message, begin, width, j):
    """The j-th of a block."""
    at, shift = begin + (j * width >> 5), j * width & 31
    held = _unsigned(message[at]) >> shift if width else np.int64(0)
    if shift + width > 32:
        held |= _unsigned(message[at + 1]) << (np.int64(32) - shift)
    return held & ((np.int64(1) << width) - np.int64(1))


@cuda.jit
def read_gaps(message, index_out, state, index_state):
    """Two sums over tiles, one after the other: the words of the blocks, and the gaps that are found there."""
    if not _is_laid_out(message, GAPS):
        return
    staged = cuda.shared.array(STAGED, types.int32)
    sums = cuda.shared.array(THREADS, types.int64)
    base = cuda.shared.array(1, types.int64)
    index_base = cuda.shared.array(1, types.int64)
    count = np.int64(index_out.size - 1)
    tile = tile_number(state)
    start = np.int64(tile) * TILE
    here = min(np.int64(TILE), count - start)
    length, blocks = _length(here), (count + BLOCK - 1) // BLOCK
    block, lane = start // BLOCK + cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
    width = np.int64(0)
    if length > 0:
        width = _unsigned(message[HEADER + (block >> 2)]) >> ((block & 3) << 3) & np.int64(255)
    used = _words(length, width)
    own = used if lane == 0 else np.int64(0)
    at = _scan(own, sums) + own - used + before_tile(state, tile, sums[THREADS - 1], base)
    at += HEADER + (blocks + 3) // 4
    distance = np.int64(0)
    for j in range(ITEMS):
        if lane * ITEMS + j < length:
            gap = _read_gap(message, at, width, np.int64(lane * ITEMS + j))
            staged[_place(cuda.threadIdx.x * ITEMS + j)] = gap
            distance += gap + 1
    index = _scan(distance, sums) + before_tile(index_state, tile, sums[THREADS - 1], index_base) + message[2]
    for j in range(ITEMS):
        i = cuda.threadIdx.x * ITEMS + j
        if i < here:
            index += staged[_place(i)] + 1
            index_out[start + i + 1] = index
    if tile == 0 and cuda.threadIdx.x == 0:
        index_out[0] = message[2]


@cuda.jit
def read_bitmap(message, index_out, state):
    if not _is_laid_out(message, BITMAP):
        return
    sums = cuda.shared.array(THREADS, types.int64)
    base = cuda.shared.array(1, types.int64)
    tile = tile_number(state)
    begin = np.int64(tile) * TILE + cuda.threadIdx.x * ITEMS
    end = min(begin + ITEMS, _values_begin(message, index_out.size) - HEADER)
    own = np.int64(0)
    for word in range(begin, end):
        own += cuda.popc(_unsigned(message[HEADER + word]))
    at = _scan(own, sums) + before_tile(state, tile, sums[THREADS - 1], base)
    for word in range(begin, end):
        bits, first = _unsigned(message[HEADER + word]), message[2] + np.int64(word) * 32
        while bits:
            index_out[at] = first + cuda.ffs(bits) - 1
            bits &= bits - np.int64(1)
            at += 1


@cuda.jit
def read_values(message, index_out, value_out):
    """And the indexes of a plain message."""
    entries, is_plain = index_out.size, message[0] >= 0
    kind, begin = np.int32(FP32), np.int64(entries)
    if not is_plain:
        kind, begin = _kind(message), _values_begin(message, entries)
    exponent = ((message[0] >> np.int32(16)) & np.int32(255)) - np.int32(EXPONENT_BIAS)
    up = float_of((exponent + np.int32(127)) << np.int32(23))
    for i in range(cuda.grid(1), entries, cuda.gridsize(1)):
        if is_plain:
            index_out[i] = message[i]
        if i < value_out.size:
            if kind == FP32:
                value_out[i] = float_of(message[begin + i])
            else:
                half = (message[begin + (i >> 1)] >> np.int32((i & 1) << 4)) & np.int32(0xFFFF)
                value_out[i] = _product(_widen_fp16(half), up) if kind == FP16 else _widen_bf16(half)


# As SIGNATURES of `cuda_code`.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "clear message": (clear, (_i4,)),
    "checksum": (checksum, (_i4, types.int64, _i8)),
    "seal": (seal, (_i4, types.int64, types.int64, _i8)),
    "inspect": (inspect, (_i4, _i8)),
    "measure": (measure, (_i4, _i8)),
    "write_gaps": (write_gaps, (_i4, _u1, _i4, _i8)),
    "write_bitmap": (write_bitmap, (_i4, _i4)),
    "write_head": (write_head, (_i4, types.int32, types.int32, types.int32)),
    "largest": (largest, (_f4, _i8)),
    "write_fp16": (write_fp16, (_f4, types.float32, types.float32, types.int32, _u2, _f4)),
    "write_bf16": (write_bf16, (_f4, _i2, _f4)),
    "read_gaps": (read_gaps, (_i4, _i4, _i8, _i8)),
    "read_bitmap": (read_bitmap, (_i4, _i4, _i8)),
    "read_values": (read_values, (_i4, _i4, _f4)),
}
