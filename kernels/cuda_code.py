"""The device code of `cuda`: what a thread does.

Results do not depend on the order of threads. Kernels that choose elements go over tiles in one pass: a tile counts
what it has, learns from the tiles before it where its own begin, and writes them there, in order.
"""

from typing import Any

import numpy as np
from numba import cuda, types
from numba.core import config

from okrt.kernels.bits import COARSE_BINS, MAGNITUDE_MASK

# 256 threads of 8 elements: the tile of any kernel leaves room in the registers and the shared memory of a
# multiprocessor, from P100 to H100, for three blocks or more. In the simulator each is a thread of Python: few of them.
IS_SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS, ITEMS, BLOCKS_PER_MULTIPROCESSOR = (8, 4, 2) if IS_SIMULATED else (256, 8, 8)
TILE = THREADS * ITEMS
# A tile tells the tiles behind it: how many it has itself, or how many there are up to its end.
OWN, UP_TO_HERE = 1, 2
ALL_TIES = 2**31 - 1
PAIR_MASK = 2**62 - 1
PLACE_BITS = 5  # shared memory has 32 banks: a word of padding for each keeps the threads of a warp apart

STAGED = TILE + (TILE >> PLACE_BITS)

_f4, _i4, _i8 = types.float32[::1], types.int32[::1], types.int64[::1]
GRADIENTS = {"float32": types.float32[::1], "float16": types.uint16[::1], "bfloat16": types.int16[::1]}

if IS_SIMULATED:

    @cuda.jit(device=True)
    def bits_of(x):
        return np.float32(x).view(np.int32)

    @cuda.jit(device=True)
    def float_of(bits):
        return np.int32(bits).view(np.float32)

else:

    @cuda.jit(device=True)
    def bits_of(x):
        return cuda.libdevice.float_as_int(x)

    @cuda.jit(device=True)
    def float_of(bits):
        return cuda.libdevice.int_as_float(bits)


@cuda.jit(device=True)
def _magnitude(x):
    return bits_of(x) & np.int32(MAGNITUDE_MASK)


@cuda.jit(device=True)
def _widen_float32(x):
    return x


@cuda.jit(device=True)
def _widen_float16(x):
    wide = np.int32(x)
    # Half of float32's exponent bias is missing in fp16: a power of two makes up for it, subnormal numbers included.
    scaled = float_of((wide & np.int32(0x7FFF)) << np.int32(13)) * np.float32(2.0**112)
    return -scaled if wide & np.int32(0x8000) else scaled


@cuda.jit(device=True)
def _widen_bfloat16(x):
    # Only the lower half of the sign-extended word is left after the shift.
    return float_of(np.int32(x) << np.int32(16))


WIDEN = {"float32": _widen_float32, "float16": _widen_float16, "bfloat16": _widen_bfloat16}


@cuda.jit(device=True)
def _finite_float32(x):
    return _magnitude(x) < np.int32(0x7F800000)


@cuda.jit(device=True)
def _finite_float16(x):
    return np.int32(x) & np.int32(0x7C00) != np.int32(0x7C00)


@cuda.jit(device=True)
def _finite_bfloat16(x):
    return np.int32(x) & np.int32(0x7F80) != np.int32(0x7F80)


_FINITE = {"float32": _finite_float32, "float16": _finite_float16, "bfloat16": _finite_bfloat16}


@cuda.jit(device=True)
def _place(i):
    """Where element i of a tile lies in shared memory."""
    return i + (i >> PLACE_BITS)


@cuda.jit(device=True)
def tile_number(state):
    """The next tile in order: a block that waits for earlier tiles waits only for blocks that are running."""
    number = cuda.shared.array(1, types.int32)
    if cuda.threadIdx.x == 0:
        number[0] = np.int32(cuda.atomic.add(state, 0, np.int64(1)))
    cuda.syncthreads()
    return number[0]


@cuda.jit(device=True)
def _scan(own, sums):
    """The sum of the threads before this one; sums[THREADS - 1] is then that of all."""
    me = cuda.threadIdx.x
    sums[me] = own
    cuda.syncthreads()
    distance = 1
    while distance < THREADS:
        before = sums[me - distance] if me >= distance else np.int64(0)
        cuda.syncthreads()
        sums[me] += before
        cuda.syncthreads()
        distance *= 2
    return sums[me] - own


# Two counts below 2**31 travel as one number: entries above the threshold, and entries equal to it. In the state of a
# tile two more bits tell what the counts are of, so that both are always read together.


@cuda.jit(device=True)
def _pair(above, equal):
    return (np.int64(above) << np.int64(31)) + np.int64(equal)


@cuda.jit(device=True)
def before_tile(state, tile, own, base):
    """The sum of the pairs of all tiles before this one; what this tile knows is told to those behind it."""
    if cuda.threadIdx.x == 0:
        before = np.int64(0)
        if tile > 0:
            cuda.atomic.exch(state, 1 + tile, (own << np.int64(2)) | np.int64(OWN))
        look = tile - 1
        while look >= 0:
            word = cuda.atomic.add(state, 1 + look, np.int64(0))
            told = word & np.int64(3)
            if told:
                before += (word >> np.int64(2)) & np.int64(PAIR_MASK)
                look = look - 1 if told == OWN else -1
        cuda.atomic.exch(state, 1 + tile, ((before + own) << np.int64(2)) | np.int64(UP_TO_HERE))
        base[0] = before
    cuda.syncthreads()
    return base[0]


@cuda.jit(device=True)
def _own_pair(staged, here, threshold):
    """How many of this thread's elements of the tile are above the threshold, and equal to it."""
    above, equal = 0, 0
    for j in range(ITEMS):
        i = cuda.threadIdx.x * ITEMS + j
        if i < here:
            magnitude = _magnitude(staged[_place(i)])
            above += magnitude > threshold
            equal += magnitude == threshold
    return _pair(above, equal)


@cuda.jit(device=True)
def _write_out(staged, staged_index, first, here, threshold, ties, before, index_out, value_out):
    """Writes this thread's chosen elements in order; returns how many are chosen up to its end.

    The index of an element is its place after `first`, or what staged_index holds if there is one.
    """
    above, equal = before >> np.int64(31), before & np.int64(ALL_TIES)
    for j in range(ITEMS):
        i = cuda.threadIdx.x * ITEMS + j
        if i < here:
            value = staged[_place(i)]
            magnitude = _magnitude(value)
            is_tie = magnitude == threshold
            at = above + min(equal, np.int64(ties))
            if (magnitude > threshold or (is_tie and equal < ties)) and at < index_out.size:
                index_out[at] = staged_index[_place(i)] if staged_index.size > 1 else np.int32(first + i)
                value_out[at] = value
            above += magnitude > threshold
            equal += is_tie
    return above + min(equal, np.int64(ties))


@cuda.jit(device=True)
def _as_it_is(values, unused, i):
    return values[i]


def _adding(widen):
    @cuda.jit(device=True)
    def load(residual, gradient, i):
        total = residual[i] + widen(gradient[i])
        residual[i] = total
        return total

    return load


def _make_select(load):
    """Chooses the elements above the threshold and the first `ties` equal to it: one pass, in index order."""

    @cuda.jit
    def select(values, gradient, threshold, ties, first_index, index_out, value_out, state, found):
        staged = cuda.shared.array(STAGED, types.float32)
        no_index = cuda.shared.array(1, types.int32)
        sums = cuda.shared.array(THREADS, types.int64)
        base = cuda.shared.array(1, types.int64)
        tile = tile_number(state)
        start = np.int64(tile) * TILE
        here = min(np.int64(TILE), values.size - start)
        for j in range(ITEMS):
            i = j * THREADS + cuda.threadIdx.x
            if i < here:
                staged[_place(i)] = load(values, gradient, start + i)
        cuda.syncthreads()
        own = _own_pair(staged, here, threshold)
        before = _scan(own, sums) + before_tile(state, tile, sums[THREADS - 1], base)
        first = first_index + start
        upto = _write_out(staged, no_index, first, here, threshold, ties, before, index_out, value_out)
        if tile == cuda.gridDim.x - 1 and cuda.threadIdx.x == THREADS - 1:
            found[0] = upto

    return select


SELECT = _make_select(_as_it_is)
ACCUMULATE_SELECT = {kind: _make_select(_adding(widen)) for kind, widen in WIDEN.items()}


@cuda.jit
def keep(index, value, control, state, found):
    """Moves pairs to the front in place; control holds the threshold and how many equal to it stay."""
    staged = cuda.shared.array(STAGED, types.float32)
    staged_index = cuda.shared.array(STAGED, types.int32)
    sums = cuda.shared.array(THREADS, types.int64)
    base = cuda.shared.array(1, types.int64)
    threshold, ties = control[0], control[1]
    tile = tile_number(state)
    start = np.int64(tile) * TILE
    here = min(np.int64(TILE), value.size - start)
    for j in range(ITEMS):
        i = j * THREADS + cuda.threadIdx.x
        if i < here:
            staged[_place(i)] = value[start + i]
            staged_index[_place(i)] = index[start + i]
    # A tile writes once all tiles before it have told what they hold, so have read it: nothing is overwritten unread.
    cuda.syncthreads()
    own = _own_pair(staged, here, threshold)
    before = _scan(own, sums) + before_tile(state, tile, sums[THREADS - 1], base)
    upto = _write_out(staged, staged_index, 0, here, threshold, ties, before, index, value)
    if tile == cuda.gridDim.x - 1 and cuda.threadIdx.x == THREADS - 1:
        found[0] = upto


def _make_accumulate(widen):
    @cuda.jit
    def accumulate(residual, gradient):
        for i in range(cuda.grid(1), residual.size, cuda.gridsize(1)):
            residual[i] += widen(gradient[i])

    return accumulate


ACCUMULATE = {kind: _make_accumulate(widen) for kind, widen in WIDEN.items()}


def _make_find_not_finite(finite):
    @cuda.jit
    def find_not_finite(gradient, found):
        for i in range(cuda.grid(1), gradient.size, cuda.gridsize(1)):
            if not finite(gradient[i]):
                found[0] = 1

    return find_not_finite


FIND_NOT_FINITE = {kind: _make_find_not_finite(finite) for kind, finite in _FINITE.items()}


@cuda.jit
def clear(words):
    for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
        words[i] = 0


@cuda.jit
def count_above(values, limit, found):
    sums = cuda.shared.array(THREADS, types.int64)
    mine = np.int64(0)
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        mine += _magnitude(values[i]) > limit
    _scan(mine, sums)
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(found, 0, sums[THREADS - 1])


@cuda.jit
def histogram(values, low, shift, control, counts):
    """The bins begin at low + control[0]."""
    block_counts = cuda.shared.array(COARSE_BINS, types.int32)
    for j in range(cuda.threadIdx.x, counts.size, THREADS):
        block_counts[j] = 0
    cuda.syncthreads()
    begin = low + control[0]
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        offset = _magnitude(values[i]) - begin
        if offset >= 0 and offset >> shift < counts.size:
            cuda.atomic.add(block_counts, offset >> shift, 1)
    cuda.syncthreads()
    for j in range(cuda.threadIdx.x, counts.size, THREADS):
        if block_counts[j]:
            cuda.atomic.add(counts, j, np.int64(block_counts[j]))


@cuda.jit
def pick_bin(counts, bins, shift, control):
    """The bin with the control[1]-th element from above: control becomes where it begins, and how many of it count.

    One block; the counts are cleared for the next round.
    """
    sums = cuda.shared.array(THREADS, types.int64)
    width = (bins + THREADS - 1) // THREADS
    first = cuda.threadIdx.x * width
    own = np.int64(0)
    for j in range(first, min(first + width, bins)):
        own += counts[j]
    _scan(own, sums)
    wanted, total = np.int64(control[1]), sums[THREADS - 1]
    # All threads have read what they need before one of them writes.
    cuda.syncthreads()
    above = total - sums[cuda.threadIdx.x]
    if above < wanted <= above + own:
        j = min(first + width, bins) - 1
        while above + counts[j] < wanted:
            above += counts[j]
            j -= 1
        control[0] += np.int32(j << shift)
        control[1] = np.int32(wanted - above)
    cuda.syncthreads()
    for j in range(first, min(first + width, bins)):
        counts[j] = 0


@cuda.jit
def set_control(control, threshold, wanted, found):
    """What is wanted, less what has been found above."""
    control[0], control[1] = threshold, np.int32(max(np.int64(0), wanted - found[0]))


@cuda.jit
def scatter_add(dense, index, value):
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        dense[index[i]] += value[i]


@cuda.jit(device=True)
def place_of(index, wanted):
    """Where the sorted indexes reach this one."""
    low, high = np.int64(0), np.int64(index.size)
    while low < high:
        middle = (low + high) >> 1
        if index[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit
def clear_common(residual, index_a, index_b):
    for i in range(cuda.grid(1), index_a.size, cuda.gridsize(1)):
        place = place_of(index_b, index_a[i])
        if place < index_b.size and index_b[place] == index_a[i]:
            residual[index_a[i]] = 0


@cuda.jit(device=True)
def _from_a(index_a, size_a, index_b, size_b, place):
    """How many of the first `place` of the merged lists are of a, which comes first among equals."""
    low, high = max(np.int64(0), place - size_b), min(place, size_a)
    while low < high:
        middle = (low + high) >> 1
        if index_a[middle] <= index_b[place - 1 - middle]:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit
def merge_add(index_a, value_a, length_a, index_b, value_b, length_b, index_out, value_out, state, found):
    """A thread takes ITEMS places of the merged lists; of two equal indexes the one of b is not written.

    A list has as many entries as its length says, or as its arrays hold if there is no word of length.
    """
    sums = cuda.shared.array(THREADS, types.int64)
    base = cuda.shared.array(1, types.int64)
    tile = tile_number(state)
    size_a = length_a[0] if length_a.size else np.int64(index_a.size)
    size_b = length_b[0] if length_b.size else np.int64(index_b.size)
    total = size_a + size_b
    begin = min(total, np.int64(tile) * TILE + cuda.threadIdx.x * ITEMS)
    end = min(total, begin + ITEMS)
    first_a = _from_a(index_a, size_a, index_b, size_b, begin)
    at = np.int64(0)
    for is_writing in range(2):
        a, b, written = first_a, begin - first_a, np.int64(0)
        for _ in range(end - begin):
            if b >= size_b or (a < size_a and index_a[a] <= index_b[b]):
                if is_writing:
                    both = b < size_b and index_b[b] == index_a[a]
                    index_out[at + written] = index_a[a]
                    value_out[at + written] = value_a[a] + value_b[b] if both else value_a[a]
                written += 1
                a += 1
            else:
                if a == 0 or index_a[a - 1] != index_b[b]:
                    if is_writing:
                        index_out[at + written], value_out[at + written] = index_b[b], value_b[b]
                    written += 1
                b += 1
        if not is_writing:
            at = _scan(written, sums) + before_tile(state, tile, sums[THREADS - 1], base)
            if tile == cuda.gridDim.x - 1 and cuda.threadIdx.x == THREADS - 1:
                found[0] = at + written


_SELECT_REST = (types.int32, types.int32, types.int32, _i4, _f4, _i8, _i8)
# What the tests compile for every architecture: the kernels, and the types they are launched with.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "select": (SELECT, (_f4, _f4, *_SELECT_REST)),
    "keep": (keep, (_i4, _f4, _i4, _i8, _i8)),
    "clear": (clear, (_i8,)),
    "count_above": (count_above, (_f4, types.int32, _i8)),
    "histogram": (histogram, (_f4, types.int32, types.int32, _i4, _i8)),
    "pick_bin": (pick_bin, (_i8, types.int32, types.int32, _i4)),
    "set_control": (set_control, (_i4, types.int32, types.int64, _i8)),
    "scatter_add": (scatter_add, (_f4, _i4, _f4)),
    "clear_common": (clear_common, (_f4, _i4, _i4)),
    "merge_add": (merge_add, (_i4, _f4, _i8, _i4, _f4, _i8, _i4, _f4, _i8, _i8)),
}
for _kind, _gradient in GRADIENTS.items():
    SIGNATURES |= {
        f"accumulate_select {_kind}": (ACCUMULATE_SELECT[_kind], (_f4, _gradient, *_SELECT_REST)),
        f"accumulate {_kind}": (ACCUMULATE[_kind], (_f4, _gradient)),
        f"find_not_finite {_kind}": (FIND_NOT_FINITE[_kind], (_gradient, _i8)),
    }
