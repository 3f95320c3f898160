"""Several threads over one array: each takes a contiguous part, so results do not depend on how many there are."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from okrt.kernels import cpu

T = TypeVar("T")

_PART_MIN = 1 << 17  # elements; below that a thread costs more than it brings


class Lanes:
    """Runs the kernels that pass over a whole array on up to `threads` threads."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "okrt-lane") if threads > 1 else None

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

    def all_finite(self, gradient: np.ndarray) -> bool:
        return all(self.map(lambda _, at: cpu.all_finite(gradient[at]), gradient.size))

    def accumulate(self, residual: np.ndarray, gradient: np.ndarray) -> None:
        self.map(lambda _, at: cpu.accumulate(residual[at], gradient[at]), residual.size)

    def moments(self, values: np.ndarray) -> tuple[float, float]:
        parts = self.map(lambda _, at: cpu.moments(values[at]), values.size)
        return sum(total for total, _ in parts), sum(squares for _, squares in parts)

    def count(self, values: np.ndarray, threshold: int) -> int:
        return sum(self.map(lambda _, at: cpu.count(values[at], threshold), values.size))

    def histogram(self, values: np.ndarray, low: int, shift: int, bins: int) -> np.ndarray:
        def part(_: int, at: slice) -> np.ndarray:
            counts = np.zeros(bins, np.int64)
            cpu.histogram(values[at], low, shift, counts)
            return counts

        return sum(self.map(part, values.size), start=np.zeros(bins, np.int64))

    def accumulate_histogram(
        self, residual: np.ndarray, gradient: np.ndarray, low: int, shift: int, bins: int
    ) -> np.ndarray:
        def part(_: int, at: slice) -> np.ndarray:
            counts = np.zeros(bins, np.int64)
            cpu.accumulate_histogram(residual[at], gradient[at], low, shift, counts)
            return counts

        return sum(self.map(part, residual.size), start=np.zeros(bins, np.int64))

    def select(self, values: np.ndarray, threshold: int, index_out: np.ndarray, value_out: np.ndarray) -> int:
        """As cpu.select; the outputs are (threads, capacity), the first row takes the result."""

        def part(lane: int, at: slice) -> int:
            return cpu.select(values[at], threshold, at.start, index_out[lane], value_out[lane])

        return self._join(self.map(part, values.size), index_out, value_out)

    def accumulate_select(
        self,
        residual: np.ndarray,
        gradient: np.ndarray,
        threshold: int,
        index_out: np.ndarray,
        value_out: np.ndarray,
    ) -> int:
        """As cpu.accumulate_select; outputs as for `select`."""

        def part(lane: int, at: slice) -> int:
            return cpu.accumulate_select(
                residual[at], gradient[at], threshold, at.start, index_out[lane], value_out[lane]
            )

        return self._join(self.map(part, residual.size), index_out, value_out)

    @staticmethod
    def _join(found: list[int], index_out: np.ndarray, value_out: np.ndarray) -> int:
        capacity = index_out.shape[1]
        total = sum(found)
        at = min(found[0], capacity)
        for lane, here in enumerate(found[1:], 1):
            take = min(here, capacity - at)
            index_out[0, at : at + take] = index_out[lane, :take]
            value_out[0, at : at + take] = value_out[lane, :take]
            at += take
        return total
