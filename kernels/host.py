"""The kernels on host memory, on several threads: each takes a contiguous part, so results do not depend on how many
there are. `cuda.Device` is its like for the memory of a GPU: what works on one works on the other."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from okrt.kernels import cpu, reference
from okrt.kernels.bits import threshold_bits, threshold_value
from okrt.kernels.pairs import Pairs

T = TypeVar("T")

_PART_MIN = 1 << 17  # elements; below that a thread costs more than it brings


def _packed() -> Any:
    """Loaded when something is packed: compiled code takes its time to load."""
    from okrt.kernels import cpu_packed

    return cpu_packed


def _exceedances() -> Any:
    from okrt.kernels import cpu_exceedances

    return cpu_exceedances


def _blocks(sums: np.ndarray, at: slice) -> np.ndarray:
    """The rows of the blocks of a part."""
    return sums[at.start // cpu.BLOCK : -(-at.stop // cpu.BLOCK)]


def _fit(sums: np.ndarray) -> tuple[int, float, float, float, int]:
    """Of all blocks what `exceedances` tells."""
    kernels = _exceedances()
    count = int(sums[:, kernels.COUNT].sum())
    total, squares = (cpu.chunked_sum(sums[:, column].copy()) for column in (kernels.TOTAL, kernels.SQUARES))
    return count, total, squares, *kernels.product_of_blocks(sums)


class Host:
    """The functions of `reference` on up to `threads` threads, and the handling of arrays that they need."""

    memory = "host"

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "okrt-lane") if threads > 1 else None
        self._sums = np.empty((0, 5))
        # What the threads beside the first find, before it is put behind what that one found.
        self._found = [(np.empty(0, np.int32), np.empty(0, np.float32)) for _ in range(1, threads)]

    def map(self, part: Callable[[int, slice], T], length: int) -> list[T]:
        """part(lane, slice) for each part of range(length), in order; the caller's thread is the first lane."""
        lanes = max(1, min(self.threads, length // _PART_MIN))
        ends = [length * lane // lanes // cpu.BLOCK * cpu.BLOCK for lane in range(lanes)] + [length]
        parts = [slice(ends[lane], ends[lane + 1]) for lane in range(lanes)]
        if self._pool is None or lanes == 1:
            return [part(lane, where) for lane, where in enumerate(parts)]
        others = [self._pool.submit(part, lane, where) for lane, where in enumerate(parts[1:], 1)]
        return [part(0, parts[0])] + [other.result() for other in others]

    def each(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """work(item) for every item, each on one thread."""
        rest = iter(list(items))  # threads may share the iterator of a list

        def take() -> None:
            for item in rest:
                work(item)

        others = [self._pool.submit(take) for _ in range(self.threads - 1)] if self._pool else []
        take()
        for other in others:
            other.result()

    # Arrays

    def on(self, stream: None) -> contextlib.AbstractContextManager[None]:
        """There are no streams here."""
        return contextlib.nullcontext()

    def again(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def empty(self, length: int, dtype: Any) -> np.ndarray:
        return np.empty(length, dtype)

    def clear(self, array: np.ndarray) -> None:
        array[:] = 0

    def zeroing(self, array: np.ndarray, stride: int = 1 << 16) -> Iterator[None]:
        """Clears the array, a piece at each turn."""
        for start in range(0, array.size, stride):
            array[start : start + stride] = 0
            yield

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """A copy in host memory."""
        return array.copy()

    def from_host(self, array: np.ndarray) -> np.ndarray:
        """A host array in this memory."""
        return array

    # Whole arrays

    def all_finite(self, gradient: np.ndarray) -> bool:
        return all(self.map(lambda _, at: cpu.all_finite(gradient[at]), gradient.size))

    def accumulate(self, residual: np.ndarray, gradient: np.ndarray) -> None:
        self.map(lambda _, at: cpu.accumulate(residual[at], gradient[at]), residual.size)

    def moments(self, values: np.ndarray) -> tuple[float, float]:
        sums = np.empty((-(-values.size // cpu.BLOCK), 2))
        self.map(lambda _, at: cpu.block_moments(values[at], _blocks(sums, at)), values.size)
        return cpu.chunked_sum(sums[:, 0].copy()), cpu.chunked_sum(sums[:, 1].copy())

    def exceedances(self, values: np.ndarray, location: float) -> tuple[int, float, float, float, int]:
        sums = self._block_sums(values.size)
        kernel = _exceedances().block_exceedances
        self.map(lambda _, at: kernel(values[at], np.float32(location), _blocks(sums, at)), values.size)
        return _fit(sums)

    def accumulate_select_exceedances(
        self,
        residual: np.ndarray,
        gradient: np.ndarray,
        threshold: int,
        first_index: int,
        index_out: np.ndarray,
        value_out: np.ndarray,
        location: float,
    ) -> tuple[int, int, float, float, float, int]:
        sums = self._block_sums(residual.size)
        kernel = _exceedances().accumulate_select_exceedances

        def part(at: slice, index: np.ndarray, value: np.ndarray) -> int:
            rest = (threshold, first_index + at.start, index, value, np.float32(location), _blocks(sums, at))
            return kernel(residual[at], gradient[at], *rest)

        return self._gathered(part, residual.size, index_out, value_out), *_fit(sums)

    def _block_sums(self, length: int) -> np.ndarray:
        """A row for each block."""
        blocks = -(-length // cpu.BLOCK)
        if len(self._sums) < blocks:
            self._sums = np.empty((blocks, _exceedances().COLUMNS))
        return self._sums[:blocks]

    def count(self, values: np.ndarray, threshold: int) -> int:
        return sum(self.map(lambda _, at: cpu.count(values[at], threshold), values.size))

    def counts(self, values: np.ndarray, thresholds: Sequence[int]) -> np.ndarray:
        return np.array([self.count(values, threshold) for threshold in thresholds], np.int64)

    def histogram(self, values: np.ndarray, low: int, shift: int, counts: np.ndarray) -> None:
        def part(_: int, at: slice) -> np.ndarray:
            own = np.zeros_like(counts)
            cpu.histogram(values[at], low, shift, own)
            return own

        for own in self.map(part, values.size):
            counts += own

    def accumulate_histogram(
        self, residual: np.ndarray, gradient: np.ndarray, low: int, shift: int, counts: np.ndarray
    ) -> None:
        def part(_: int, at: slice) -> np.ndarray:
            own = np.zeros_like(counts)
            cpu.accumulate_histogram(residual[at], gradient[at], low, shift, own)
            return own

        for own in self.map(part, residual.size):
            counts += own

    def select(
        self, values: np.ndarray, threshold: int, first_index: int, index_out: np.ndarray, value_out: np.ndarray
    ) -> int:
        def part(at: slice, index: np.ndarray, value: np.ndarray) -> int:
            return cpu.select(values[at], threshold, first_index + at.start, index, value)

        return self._gathered(part, values.size, index_out, value_out)

    def accumulate_select(
        self,
        residual: np.ndarray,
        gradient: np.ndarray,
        threshold: int,
        first_index: int,
        index_out: np.ndarray,
        value_out: np.ndarray,
    ) -> int:
        def part(at: slice, index: np.ndarray, value: np.ndarray) -> int:
            return cpu.accumulate_select(residual[at], gradient[at], threshold, first_index + at.start, index, value)

        return self._gathered(part, residual.size, index_out, value_out)

    def _gathered(
        self,
        part: Callable[[slice, np.ndarray, np.ndarray], int],
        length: int,
        index_out: np.ndarray,
        value_out: np.ndarray,
    ) -> int:
        """What all threads found, in order; those that find no room are counted."""
        capacity = index_out.size
        for lane, (index, _) in enumerate(self._found):
            if index.size < capacity:
                self._found[lane] = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
        places = [(index_out, value_out), *((index[:capacity], value[:capacity]) for index, value in self._found)]
        found = self.map(lambda lane, at: part(at, *places[lane]), length)
        at = min(found[0], capacity)
        for (index, value), here in zip(places[1:], found[1:], strict=False):
            take = min(here, capacity - at)
            index_out[at : at + take] = index[:take]
            value_out[at : at + take] = value[:take]
            at += take
        return sum(found)

    select_top = staticmethod(cpu.select_top)
    kth_magnitude = staticmethod(cpu.kth_magnitude)

    # Entries

    keep_reaching = staticmethod(cpu.keep_reaching)
    keep_top = staticmethod(cpu.keep_top)
    scatter_add = staticmethod(cpu.scatter_add)
    clear_common = staticmethod(cpu.clear_common)
    keep_lost = staticmethod(cpu.keep_lost)
    merge_add = staticmethod(cpu.merge_add)
    take = staticmethod(reference.take)
    put = staticmethod(reference.put)
    cuts = staticmethod(reference.cuts)
    mean = staticmethod(reference.mean)
    rounding_error = staticmethod(reference.rounding_error)

    def cut_to_top(self, index: np.ndarray, value: np.ndarray, k: int, ratio: float) -> tuple[int, int]:
        threshold = cpu.kth_magnitude(value, k)
        cpu.keep_reaching(index, value, threshold, k)
        return threshold, cpu.count(value[:k], threshold_bits(threshold_value(threshold) * ratio))

    def pack(self, index: np.ndarray, value: np.ndarray, kind: int, message: np.ndarray, error: np.ndarray) -> int:
        return int(_packed().pack(index, value, kind, message, error))

    def inspect_packed(self, message: np.ndarray) -> tuple[int, int, int, int]:
        return _packed().inspect(message)

    def unpack(self, message: np.ndarray, index_out: np.ndarray, value_out: np.ndarray) -> None:
        _packed().unpack(message, index_out, value_out)

    def room(self, index: np.ndarray, value: np.ndarray) -> Pairs:
        """Memory for pairs that `merge` writes."""
        return Pairs(index, value)

    def merge(self, a: Pairs, b: Pairs, out: Pairs) -> Pairs:
        """The sum of two lists, in the memory of `out`; as merge_add."""
        length = cpu.merge_add(a.index, a.value, b.index, b.value, out.index, out.value)
        return Pairs(out.index[:length], out.value[:length])

    def settled(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Its indexes and values, as many as there are."""
        return pairs.index, pairs.value
