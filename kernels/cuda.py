"""The kernels for GPUs, compiled by Numba: see `reference` for what each one does. Nothing here has run on a GPU yet.

`Device` has the functions of `host.Host`, for device arrays (CuPy, or whatever has __cuda_array_interface__), with the
same results to the last bit. All goes to one stream, and the host waits for it only where a function returns numbers.
Working memory is made once and grows when it must.

A kernel that joins: write it in `cuda_code` or a file beside it with `cuda.jit` and integer or order-preserving
arithmetic, so that results do not depend on the order of threads (no product that may be fused with an addition), and
add its arguments to SIGNATURES, from which the tests compile it for every architecture; launch it here, from a method
of Device that is named as in `reference`. The tests of the simulator ask for its case then.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from okrt.kernels import cuda_code as code
from okrt.kernels import cuda_entries as entries
from okrt.kernels import cuda_exceedances as fits
from okrt.kernels import cuda_packed as packing
from okrt.kernels.bits import COARSE_BINS, COARSE_SHIFT
from okrt.kernels.cpu import BLOCK, CHUNK, LANES
from okrt.kernels.packed import (
    BITMAP,
    CHECKSUM,
    EXPONENT_BIAS,
    EXPONENT_LIMITS,
    FP16_LARGEST,
    FP16_LARGEST_IN_FLOAT32,
    GAPS,
    HEADER,
    KINDS,
    MAGIC,
    PLAIN_MASK,
    VERSION,
    fp16_exponent,
    plain_words,
    value_words,
)
from okrt.kernels.packed import BLOCK as PACKED_BLOCK
from okrt.kernels.pairs import Pairs
from okrt.kernels.staging import to_device, to_host

NONE, FP32, FP16, BF16 = KINDS.values()


def _kind_of(gradient: Any) -> str:
    return {"float32": "float32", "uint16": "float16", "int16": "bfloat16"}[str(gradient.dtype)]


def _argument(x: Any) -> Any:
    """What a launch takes; without waiting for the stream that the array's owner last used."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        return x
    if not code.IS_SIMULATED:
        return cuda.as_cuda_array(x, sync=False)
    memory = (ctypes.c_char * max(1, x.nbytes)).from_address(interface["data"][0]) if x.nbytes else None
    return cuda.device_array(x.size, x.dtype, buffer=memory)


class Device:
    """The kernels on one stream of one GPU, and the memory they work in."""

    memory = "cuda"

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._stream: Any = 0
        self._last_stream: int | None = None
        with self._current():
            limit = getattr(cuda.get_current_device(), "MULTIPROCESSOR_COUNT", 1)
            self._blocks_limit = code.BLOCKS_PER_MULTIPROCESSOR * limit
            self._state = cuda.device_array(0, np.int64)
            self._sums = cuda.device_array(0, np.float64)
            self._places = cuda.device_array(0, np.int64)
            self._found = cuda.device_array(2, np.int64)
            self._facts = cuda.device_array(4, np.int64)
            self._no_length = cuda.device_array(0, np.int64)
            self._counts = cuda.device_array(COARSE_BINS, np.int64)
            self._control = cuda.device_array(2, np.int32)
            self._zero_control = cuda.device_array(2, np.int32)
            for words in (self._counts, self._zero_control):
                self._launch(code.clear, words.size, words)
            cuda.synchronize()  # streams to come do not wait for this one

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this is the GPU that CuPy and Numba work on; there is only one in the simulator."""
        if code.IS_SIMULATED:
            return contextlib.nullcontext()
        import cupy

        return cupy.cuda.Device(self._number)

    @contextlib.contextmanager
    def on(self, stream: int | None) -> Iterator[None]:
        """Inside, all is done on this stream (its address); None: the array is not one for a device."""
        if stream is None:
            yield
            return
        import cupy

        with self._current(), cupy.cuda.ExternalStream(stream):
            if self._last_stream not in (None, stream):
                # The working memory may still be in use there.
                cupy.cuda.ExternalStream(self._last_stream).synchronize()
            self._stream = 0 if code.IS_SIMULATED else cuda.external_stream(stream)
            self._last_stream = stream
            yield

    def again(self) -> contextlib.AbstractContextManager[None]:
        """As the last `on`: what follows there comes after what was begun there."""
        return self.on(self._last_stream)

    def empty(self, length: int, dtype: Any) -> Any:
        import cupy

        return cupy.empty(length, dtype)

    def clear(self, array: Any) -> None:
        array[:] = 0

    def zeroing(self, array: Any) -> Iterator[None]:
        """Clears the array at once: the host does not wait for it."""
        self.clear(array)
        return iter(())

    def to_host(self, array: Any) -> np.ndarray:
        return to_host(array)

    def from_host(self, array: np.ndarray) -> Any:
        out = self.empty(array.size, array.dtype)
        to_device(array, out)
        return out

    def _launch(self, kernel: Any, length: int, *arguments: Any) -> None:
        """Over `length` elements, each thread taking several where there are many."""
        blocks = min(self._blocks_limit, -(-length // code.THREADS))
        kernel[blocks, code.THREADS, self._stream](*map(_argument, arguments))

    def _launch_tiles(self, kernel: Any, length: int, *arguments: Any, found: Any = None) -> None:
        """A block for each tile; kernels of this kind end in the state of the tiles and what was found."""
        self._launch_sums(kernel, length, 1, *arguments, found=self._found if found is None else found)

    def _launch_sums(self, kernel: Any, length: int, sums: int, *arguments: Any, found: Any = None) -> None:
        """As above, with a state for each of several sums over the tiles, and without `found` if there is none."""
        tiles = -(-length // code.TILE)
        words = 1 + tiles
        if self._state.size < sums * words:
            self._state = cuda.device_array(sums * words + sums * words // 8, np.int64)
        self._launch(code.clear, sums * words, self._state[: sums * words])
        states = [self._state[place * words :] for place in range(sums)]
        rest = states if found is None else [*states, found]
        kernel[tiles, code.THREADS, self._stream](*map(_argument, (*arguments, *rest)))

    def _read(self, words: Any) -> np.ndarray:
        """Numbers of our own; waits for the stream."""
        return words.copy_to_host(stream=self._stream)

    def all_finite(self, gradient: Any) -> bool:
        if gradient.size == 0:
            return True
        self._launch(code.clear, 1, self._found)
        self._launch(code.FIND_NOT_FINITE[_kind_of(gradient)], gradient.size, gradient, self._found)
        return not self._read(self._found)[0]

    def accumulate(self, residual: Any, gradient: Any) -> None:
        if residual.size:
            self._launch(code.ACCUMULATE[_kind_of(gradient)], residual.size, residual, gradient)

    def accumulate_select(self, residual, gradient, threshold: int, first_index: int, index_out, value_out) -> int:
        if residual.size == 0:
            return 0
        rest = (np.int32(threshold), np.int32(code.ALL_TIES), np.int32(first_index), index_out, value_out)
        self._launch_tiles(code.ACCUMULATE_SELECT[_kind_of(gradient)], residual.size, residual, gradient, *rest)
        return int(self._read(self._found)[0])

    def select(self, values, threshold: int, first_index: int, index_out, value_out) -> int:
        return self._select(values, threshold, code.ALL_TIES, first_index, index_out, value_out)

    def select_top(self, values, threshold: int, ties: int, index_out, value_out) -> int:
        return self._select(values, threshold, ties, 0, index_out, value_out)

    def _select(self, values, threshold: int, ties: int, first_index: int, index_out, value_out) -> int:
        if values.size == 0:
            return 0
        rest = (np.int32(threshold), np.int32(ties), np.int32(first_index), index_out, value_out)
        self._launch_tiles(code.SELECT, values.size, values, values, *rest)
        return int(self._read(self._found)[0])

    def count(self, values, threshold: int) -> int:
        return int(self.counts(values, [threshold])[0])

    def counts(self, values, thresholds: Sequence[int]) -> np.ndarray:
        """All read at once."""
        slots = self._scratch_places(len(thresholds))
        self._launch(code.clear, len(thresholds), slots)
        if values.size:
            for place, threshold in enumerate(thresholds):
                found = slots[place : place + 1]
                self._launch(code.count_above, values.size, values, np.int32(threshold - 1), found)
        return self._read(slots)

    def _scratch_places(self, length: int) -> Any:
        if self._places.size < length:
            self._places = cuda.device_array(length, np.int64)
        return self._places[:length]

    def _count_above(self, values, limit: int) -> None:
        self._launch(code.clear, 1, self._found)
        if values.size:
            self._launch(code.count_above, values.size, values, np.int32(limit), self._found)

    def histogram(self, values, low: int, shift: int, counts: np.ndarray) -> None:
        """At most COARSE_BINS bins; the counts are the host's."""
        if values.size and counts.size:
            table = self._counts[: counts.size]
            bins = (np.int32(low), np.int32(shift), self._zero_control, table)
            self._launch(code.histogram, values.size, values, *bins)
            counts += self._read(table)
            self._launch(code.clear, counts.size, table)

    def accumulate_histogram(self, residual, gradient, low: int, shift: int, counts: np.ndarray) -> None:
        self.accumulate(residual, gradient)
        self.histogram(residual, low, shift, counts)

    def moments(self, values) -> tuple[float, float]:
        blocks = -(-values.size // BLOCK)
        if blocks == 0:
            return 0.0, 0.0
        (sums, squares), (of_blocks, chunks, out) = self._lanes_and_blocks(blocks, 2)
        self._launch(entries.lane_moments, LANES * blocks, values, sums, squares)
        for number, of_lanes in enumerate((sums, squares)):
            self._add_up(of_lanes, of_blocks, chunks, out[number : number + 1])
        total, squared = self._read(out[:2])
        return float(total), float(squared)

    def exceedances(self, values, location: float) -> tuple[int, float, float, float, int]:
        blocks = -(-values.size // BLOCK)
        if blocks == 0:
            return 0, 0.0, 0.0, 1.0, 0
        (sums, squares, products), (of_blocks, chunks, out) = self._lanes_and_blocks(blocks, 3)
        self._launch(code.clear, 2, self._found)
        self._launch(
            fits.lane_exceedances, LANES * blocks, values, np.float32(location), sums, squares, products, self._found
        )
        for number, of_lanes in enumerate((sums, squares)):
            self._add_up(of_lanes, of_blocks, chunks, out[number : number + 1])
        self._launch(fits.multiply_halves, blocks, products, of_blocks)
        fits.multiply_blocks[1, 1, self._stream](*map(_argument, (of_blocks, self._found, out)))
        total, squared, count, mantissa, exponent = self._read(out)
        return int(count), float(total), float(squared), float(mantissa), int(exponent)

    def accumulate_select_exceedances(
        self, residual, gradient, threshold: int, first_index: int, index_out, value_out, location: float
    ) -> tuple[int, int, float, float, float, int]:
        found = self.accumulate_select(residual, gradient, threshold, first_index, index_out, value_out)
        return found, *self.exceedances(residual, location)

    def _lanes_and_blocks(self, blocks: int, number: int) -> tuple[list[Any], list[Any]]:
        """Working memory: so many arrays with a place for each lane, then for each block, each chunk, and results."""
        sizes = [LANES * blocks] * number + [blocks, -(-blocks // CHUNK), 5]
        if self._sums.size < sum(sizes):
            self._sums = cuda.device_array(sum(sizes), np.float64)
        parts = [self._sums[a:b] for a, b in pairwise(np.cumsum([0, *sizes]))]
        return parts[:number], parts[number:]

    def _add_up(self, of_lanes, of_blocks, chunks, out) -> None:
        """The sum of all lanes: of those of a block, then of chunks of blocks."""
        self._launch(entries.add_halves, of_blocks.size, of_lanes, of_blocks)
        length, source, target = of_blocks.size, of_blocks, chunks
        while length > 1:
            self._launch(entries.sum_chunks, -(-length // CHUNK), source, np.int64(length), target)
            length, source, target = -(-length // CHUNK), target, source
        self._launch(entries.sum_chunks, 1, source, np.int64(1), out)

    def _find_kth(self, values, k: int) -> None:
        """control becomes the k-th largest magnitude, and how many that are equal to it belong to the top k."""
        self._launch(code.clear, 1, self._found)
        code.set_control[1, 1, self._stream](self._control, np.int32(0), np.int64(k), self._found)
        shift, bins = COARSE_SHIFT, COARSE_BINS
        while True:
            counts = self._counts[:bins]
            self._launch(code.histogram, values.size, values, np.int32(0), np.int32(shift), self._control, counts)
            code.pick_bin[1, code.THREADS, self._stream](counts, np.int32(bins), np.int32(shift), self._control)
            if shift == 0:
                return
            bins = 1 << min(12, shift)
            shift = max(0, shift - 12)

    def kth_magnitude(self, values, k: int) -> int:
        self._find_kth(values, k)
        return max(1, int(self._read(self._control)[0]))

    def keep_reaching(self, index, value, threshold: int, k: int) -> int:
        if index.size == 0:
            return 0
        self._count_above(value, threshold)
        code.set_control[1, 1, self._stream](self._control, np.int32(threshold), np.int64(k), self._found)
        self._launch_tiles(code.keep, index.size, index, value, self._control)
        return int(self._read(self._found)[0])

    def cut_to_top(self, index, value, k: int, ratio: float) -> tuple[int, int]:
        """Both numbers are read at once, when all is done."""
        self._find_kth(value, k)
        self._launch_tiles(code.keep, index.size, index, value, self._control)
        self._launch(code.clear, 2, self._found)
        self._launch(entries.count_from, k, value[:k], self._control, np.float32(ratio), self._found)
        threshold, reached = self._read(self._found)
        return int(threshold), int(reached)

    def keep_top(self, index, value, k: int) -> int:
        """Nothing waits: how many are kept is known."""
        if k <= 0 or index.size <= k:
            return min(index.size, max(0, k))
        self._find_kth(value, k)
        self._launch_tiles(code.keep, index.size, index, value, self._control)
        return k

    def scatter_add(self, dense, index, value) -> None:
        if index.size:
            self._launch(code.scatter_add, index.size, dense, index, value)

    def clear_common(self, residual, index_a, index_b) -> None:
        if index_a.size and index_b.size:
            self._launch(code.clear_common, index_a.size, residual, index_a, index_b)

    def merge_add(self, index_a, value_a, index_b, value_b, index_out, value_out) -> int:
        out = Pairs(index_out, value_out, self._found)
        self.merge(Pairs(index_a, value_a), Pairs(index_b, value_b), out)
        return int(self._read(self._found)[0])

    def room(self, index, value) -> Pairs:
        """Memory for pairs that `merge` writes."""
        return Pairs(index, value, cuda.device_array(1, np.int64))

    def merge(self, a: Pairs, b: Pairs, out: Pairs) -> Pairs:
        """The sum of two lists, in the memory of `out`; as merge_add, but nothing waits to learn how long it is."""
        length = a.index.size + b.index.size
        if length == 0:
            self._launch(code.clear, 1, out.length)
            return out
        lists: list[Any] = []
        for pairs in (a, b):
            lists += [pairs.index, pairs.value, self._no_length if pairs.length is None else pairs.length]
        self._launch_tiles(code.merge_add, length, *lists, out.index, out.value, found=out.length)
        return out

    def settled(self, pairs: Pairs) -> tuple[Any, Any]:
        """Its indexes and values, as many as there are."""
        if pairs.length is None:
            return pairs.index, pairs.value
        length = int(self._read(pairs.length)[0])
        return pairs.index[:length], pairs.value[:length]

    def take(self, dense, index, out) -> None:
        if index.size:
            self._launch(entries.take, index.size, dense, index, out)

    def put(self, dense, first_index: int, index, value) -> None:
        if index.size:
            self._launch(entries.put, index.size, dense, np.int32(first_index), index, value)

    def cuts(self, index, bounds: np.ndarray) -> np.ndarray:
        places = self._scratch_places(2 * bounds.size)
        asked, found = places[: bounds.size], places[bounds.size :]
        asked.copy_to_device(np.ascontiguousarray(bounds, np.int64), stream=self._stream)
        self._launch(entries.cuts, bounds.size, index, asked, found)
        return self._read(found)

    def keep_lost(self, residual, index, value, kept, delivered) -> None:
        if index.size:
            self._launch(entries.keep_lost, index.size, residual, index, value, kept, delivered)

    def mean(self, total, size: float, out) -> None:
        if total.size:
            self._launch(entries.MEAN[_kind_of(out)], total.size, total, np.float32(size), out)

    def rounding_error(self, total, size: float, rounded, out) -> None:
        if total.size:
            kernel = entries.ROUNDING_ERROR[_kind_of(rounded)]
            self._launch(kernel, total.size, total, np.float32(size), rounded, out)

    def pack(self, index, value, kind: int, message, error) -> int:
        """Waits once, for how long the layouts would be; all that is left to do then is not waited for."""
        entries, with_values, plain = index.size, value_words(index.size, kind), plain_words(index.size, kind)
        if HEADER + 1 + with_values > plain:
            return self._pack_plain(index, value, kind, message, error)
        block_words, first, last, largest = self._measure(index, value[: entries if kind == FP16 else 0])
        blocks_begin = HEADER + -(-(entries - 1) // (4 * PACKED_BLOCK))
        gaps_end, bitmap_end = blocks_begin + block_words, HEADER + ((last - first) >> 5) + 1
        layout = BITMAP if bitmap_end < gaps_end else GAPS
        at = min(gaps_end, bitmap_end)
        end = at + with_values
        if end > plain:
            return self._pack_plain(index, value, kind, message, error)
        if layout == BITMAP:
            self._launch(code.clear, at - HEADER, message[HEADER:at])
            self._launch(packing.write_bitmap, entries, index, message[HEADER:at])
        else:
            widths = message[HEADER:blocks_begin].view(np.uint8)
            self._launch_sums(packing.write_gaps, entries - 1, 1, index, widths, message[blocks_begin:at])
        exponent = fp16_exponent(largest) if kind == FP16 else 0
        self._write_values(value, kind, exponent, message[at:end], error)
        tag = MAGIC << 24 | (exponent + EXPONENT_BIAS) << 16 | kind << 12 | layout << 8 | VERSION
        head = (np.int32(word) for word in (tag - 2**32, entries, first))
        packing.write_head[1, 1, self._stream](_argument(message), *head)
        self._seal(message[:end], CHECKSUM, packing.WORD_MASK)
        return end

    def _pack_plain(self, index, value, kind: int, message, error) -> int:
        end = plain_words(index.size, kind)
        error[:] = 0
        message[: index.size] = index
        if kind != NONE:
            message[index.size : end - 1] = value.view(np.int32)
        self._seal(message[:end], end - 1, PLAIN_MASK)
        return end

    def _measure(self, index, value) -> list[int]:
        """Words that the blocks of gaps take, first and last index, largest magnitude."""
        facts = self._facts
        self._launch(code.clear, facts.size, facts)
        self._launch(packing.measure, -(-index.size // code.ITEMS), index, facts)
        if value.size:
            self._launch(packing.largest, value.size, value, facts[3:])
        return self._read(facts).tolist()

    def _write_values(self, value, kind: int, exponent: int, words, error) -> None:
        if kind == FP32:
            words[:] = value.view(np.int32)
        elif kind == FP16:
            scales = np.float32(2.0**-exponent), np.float32(2.0**exponent)
            limit = FP16_LARGEST_IN_FLOAT32 if exponent == EXPONENT_LIMITS[1] else FP16_LARGEST
            halves = words.view(np.uint16)
            self._launch(packing.write_fp16, value.size, value, *scales, np.int32(limit), halves, error)
        elif kind == BF16:
            self._launch(packing.write_bf16, value.size, value, words.view(np.int16), error)

    def _seal(self, message, place: int, mask: int) -> None:
        self._launch(code.clear, 1, self._facts)
        self._launch(packing.checksum, message.size, message, np.int64(place), self._facts)
        packing.seal[1, 1, self._stream](*map(_argument, (message, np.int64(place), np.int64(mask), self._facts)))

    def inspect_packed(self, message) -> tuple[int, int, int, int]:
        """All read at once."""
        self._launch(code.clear, 1, self._facts)
        self._launch(packing.inspect, message.size, message, self._facts)
        right, first, second, has = self._read(self._facts).tolist()
        is_plain = first <= PLAIN_MASK or message.size < HEADER
        return first, second, has, right & (PLAIN_MASK if is_plain else packing.WORD_MASK)

    def unpack(self, message, index_out, value_out) -> None:
        """Nothing waits: only the device knows the layout, and a kernel for another one ends at once."""
        entries = index_out.size
        if entries == 0:
            return
        self._launch(packing.read_values, entries, message, index_out, value_out)
        most = message.size - HEADER - (value_words(entries, FP16) if value_out.size else 0)
        if most > 0 and entries > 1:  # or it is plain
            self._launch_sums(packing.read_gaps, entries - 1, 2, message, index_out)
            self._launch_sums(packing.read_bitmap, most, 1, message, index_out)
