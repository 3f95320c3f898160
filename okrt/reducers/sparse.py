"""What all sparse reducers share: select from residual + gradient, exchange, and keep what was not delivered."""

import abc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.buffers import View
from okrt.codec import CODECS
from okrt.errors import UsageError
from okrt.feedback import Residual
from okrt.kernels.bits import widen
from okrt.reducers.base import Reducer, check_choice
from okrt.reducers.rank_sum import RankSum
from okrt.select import SELECTORS, Selection
from okrt.transport import Transport


@dataclass(frozen=True)
class Delivered:
    """The outcome of an exchange: sums over ranks in index order, which entries of this rank were sent, and the partial
    sums of delivered indexes that did not get through, for this rank to keep."""

    index: np.ndarray
    total: np.ndarray
    sent_index: np.ndarray
    put_back: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    is_share: bool = False
    """the total is only this rank's share of it: those of all ranks are still to be summed"""


def zeroing(target: np.ndarray, stride: int = 1 << 16) -> Iterator[None]:
    """Sets the target to zero, a piece at each turn."""
    for start in range(0, target.size, stride):
        target[start : start + stride] = 0
        yield


class SparseReducer(Reducer):
    """Sends a selection of residual + gradient and keeps the rest: what a subclass adds is the exchange.

    What is delivered of an index is the sum over the ranks that selected it. With `complete` the other ranks add what
    they hold of it, for 2k(P-1)/P more words: no rank keeps a part that belongs to the time before a delivery.
    """

    default_selector = "exact"

    def __init__(
        self,
        *,
        density: float = 0.01,
        selector: str | None = None,
        codec: str = "coo",
        dense_steps: int = 0,
        complete: bool = False,
        nan: str = "raise",
        transport: Transport | None = None,
    ) -> None:
        if not (isinstance(density, (int, float, np.floating)) and 0 < density <= 1):
            raise UsageError(f"density is {density}: it must be above 0 and at most 1")
        if not (isinstance(dense_steps, int) and dense_steps >= 0):
            raise UsageError(f"dense_steps is {dense_steps}: it must be a whole number of at least 0")
        if not isinstance(complete, bool):
            raise UsageError(f"complete is {complete!r}: it must be True or False")
        self.density = float(density)
        self.complete = complete
        self.dense_steps = dense_steps
        self.selector = check_choice("selector", self.default_selector if selector is None else selector, SELECTORS)
        self.codec = check_choice("codec", codec, CODECS)
        super().__init__(nan=nan, transport=transport)
        self._selector = SELECTORS[self.selector](self._lanes)
        self._codec = CODECS[self.codec]()
        self._residual = Residual()
        self._dense_sum = RankSum(self.transport)
        self._make_buffers()

    def _make_buffers(self) -> None:
        """Called once: what the exchange works in."""

    @property
    def residual(self) -> np.ndarray | None:
        return self._residual.array

    def _plan(self) -> dict[str, Any]:
        own = {"density": self.density, "selector": self.selector, "codec": self.codec}
        return super()._plan() | own | {"dense_steps": self.dense_steps, "complete": self.complete}

    def _k(self, n: int) -> int:
        """k = max(1, ceil(density * n)), safe from the rounding of the product."""
        return min(n, max(1, math.ceil(self.density * n * (1 - 1e-12))))

    def allreduce_sparse(self, x: Any) -> tuple[Any, Any]:
        """As allreduce, as sorted indexes (int64) and their mean values; all other elements are zero."""
        source = self._begin(x)
        if self._stats.skipped:
            index, mean = np.empty(0, np.int32), np.empty(0, source.data.dtype)
        elif self._steps < self.dense_steps:
            mean = np.empty_like(source.data)
            self._mean(source, mean)
            index = np.flatnonzero(mean).astype(np.int32)
            mean = mean[index]
        else:
            index, mean = self._sparse_mean(source)
        self._finish()
        wide_index = index.astype(np.int64)
        if source.is_torch:
            import torch

            return torch.from_numpy(wide_index), source.result(mean.copy())
        return wide_index, source.result(mean.copy())

    def _mean(self, source: View, target: np.ndarray) -> None:
        if self._steps < self.dense_steps:
            residual = self._residual.of_length(source.size)
            total = residual + widen(source.data)
            self._dense_sum(total, lambda part: part)
            self._stats.selected_local = self._stats.selected_global = total.size
            residual[:] = 0
            mean, mine, error = self._rounded_mean(total, source)
            residual[mine] = error
            target[:] = mean
            return
        index, mean = self._sparse_mean(source, target)
        with self.transport.ledger.phase("scatter"):
            for _ in self.transport.idle:
                pass
            target[index] = mean
        self.delivered = index

    def _sparse_mean(self, source: View, target: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sorted indexes and mean values of the source's bits type; the residual is left as the step leaves it.

        A target is zeroed, as far as the time that the exchange waits allows; the rest is left in transport.idle.
        """
        residual = self._residual.of_length(source.size)
        if source.size == 0:
            self.transport.idle = iter(())
            return np.empty(0, np.int32), source.data
        with self.transport.ledger.phase("select"):
            k = self._stats.k
            selection = self._selector.select(residual, source.data, k, self._cap(k))
        self._stats.threshold = selection.threshold
        self.transport.idle = iter(()) if target is None else zeroing(target)
        if self.transport.size == 1:
            delivered = Delivered(selection.index, selection.value, selection.index)
        else:
            delivered = self._exchange(selection, source.size)
        self._stats.selected_local = delivered.sent_index.size
        self._stats.selected_global = delivered.index.size
        with self.transport.ledger.phase("residual"):
            self._residual.clear_delivered(delivered.sent_index, delivered.index)
            for lost_index, lost_total in delivered.put_back:
                self._residual.keep(lost_index, lost_total)
            total = self._completed(delivered, residual) if self.complete else delivered.total
            mean, mine, error = self._rounded_mean(total, source)
            self._residual.keep(delivered.index[mine], error)
        return delivered.index, mean

    def _completed(self, delivered: Delivered, residual: np.ndarray) -> np.ndarray:
        """The totals and all that any rank holds of their indexes, which no rank keeps."""
        if self.transport.size == 1:
            return delivered.total
        share = residual[delivered.index]
        residual[delivered.index] = 0
        if delivered.is_share or self.transport.rank == 0:
            share += delivered.total
        self._dense_sum(share, lambda part: part)
        return share

    def _cap(self, k: int) -> int:
        """The most entries a selection may have."""
        return k

    @abc.abstractmethod
    def _exchange(self, selection: Selection, n: int) -> Delivered:
        """Sums the selections of all ranks, or the part of the sums that the algorithm delivers."""

    def _rounded_mean(self, total: np.ndarray, source: View) -> tuple[np.ndarray, slice, np.ndarray]:
        """The sums over P in the source's type, and what the rounding to 16 bits takes away from them: for the share of
        the sums whose errors this rank is to keep, so that each is kept once."""
        size, rank = self.transport.size, self.transport.rank
        exact = total / np.float32(size)
        mean = source.narrowed(exact)
        mine = slice(0, 0) if mean is exact else slice(mean.size * rank // size, mean.size * (rank + 1) // size)
        return mean, mine, total[mine] - widen(mean[mine]) * np.float32(size)

    def state_dict(self) -> dict[str, Any]:
        own = {f"selector.{key}": value for key, value in self._selector.state_dict().items()}
        if self.residual is not None:
            own["residual"] = self.residual.copy()
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        prefix = "selector."
        self._selector.load_state_dict(
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        )
        self._residual.array = state["residual"].astype(np.float32) if "residual" in state else None
