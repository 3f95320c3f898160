"""What all sparse reducers share: select from residual + gradient, exchange, and keep what was not delivered."""

import abc
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.buffers import View
from okrt.codec import CODECS, VALUES
from okrt.codec import codec as make_codec
from okrt.errors import UsageError
from okrt.feedback import Residual
from okrt.kernels.packed import fp16_exponent
from okrt.reducers.base import Reducer, check_choice
from okrt.reducers.merging import Lost, Words
from okrt.reducers.rank_sum import RankSum
from okrt.select import SELECTORS, Selection
from okrt.transport import Transport


@dataclass(frozen=True)
class Delivered:
    """The outcome of an exchange: sums over ranks in index order, which entries of this rank were sent, and what of the
    sums was lost on this rank."""

    index: Any
    total: Any
    sent_index: Any
    lost: tuple[Lost, ...] = ()
    is_share: bool = False
    """the total is only this rank's share of it: those of all ranks are still to be summed"""


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
        codec: str = "packed",
        values: str = "fp32",
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
        self.values = check_choice("kind of values", values, VALUES)
        if values != "fp32" and codec != "packed":
            raise UsageError(f'values="{values}" needs codec="packed": {codec} sends float32')
        super().__init__(nan=nan, transport=transport)
        self._selector = SELECTORS[self.selector](self._kernels)
        self._residual = Residual(self._kernels)
        self._make_state()

    def _make_state(self) -> None:
        """What an exchange leaves for the next one."""

    def _make_buffers(self) -> None:
        self._codec = make_codec(self.codec, self.values, self._kernels)
        self._dense_sum = RankSum(self.transport, self._kernels)
        self._mean_space, self._error_space = Words(self._kernels), Words(self._kernels)
        self._share_space, self._short_space = Words(self._kernels), Words(self._kernels)

    def _move_to(self, kernels: Any, place: str) -> None:
        super()._move_to(kernels, place)
        self._selector.move_to(kernels)
        self._residual.move_to(kernels)

    @property
    def residual(self) -> Any:
        return self._residual.array

    def _plan(self) -> dict[str, Any]:
        own = {"density": self.density, "selector": self.selector, "codec": self.codec, "values": self.values}
        return super()._plan() | own | {"dense_steps": self.dense_steps, "complete": self.complete}

    def _k(self, n: int) -> int:
        """k = max(1, ceil(density * n)), safe from the rounding of the product."""
        return min(n, max(1, math.ceil(self.density * n * (1 - 1e-12))))

    def allreduce_sparse(self, x: Any) -> tuple[Any, Any]:
        """As allreduce, as sorted indexes (int64) and their mean values; all other elements are zero."""
        with self._begun(x) as source:
            if self._stats.skipped:
                index, mean = self._kernels.empty(0, np.int32), self._kernels.empty(0, source.data.dtype)
            elif self._steps < self.dense_steps:
                index, mean = self._non_zeros(source)
            else:
                index, mean = self._sparse_mean(source)
            self._finish()
            return source.index(index), source.result(mean.copy())

    def _non_zeros(self, source: View) -> tuple[Any, Any]:
        """The mean of a dense step as entries."""
        n = source.size
        mean, wide = self._kernels.empty(n, source.data.dtype), self._kernels.empty(n, np.float32)
        self._mean(source, mean)
        self._kernels.clear(wide)
        self._kernels.accumulate(wide, mean)
        index, value = self._kernels.empty(n, np.int32), self._kernels.empty(n, np.float32)
        found = self._kernels.select(wide, 1, 0, index, value)
        self._kernels.mean(value[:found], 1, mean[:found])
        return index[:found], mean[:found]

    def _mean(self, source: View, target: Any) -> None:
        if self._steps < self.dense_steps:
            self._dense_mean(source, target)
            return
        index, mean = self._sparse_mean(source, target)
        with self.transport.ledger.phase("scatter"):
            for _ in self.transport.idle:
                pass
            self._kernels.put(target, 0, index, mean)

    def _dense_mean(self, source: View, target: Any) -> None:
        """Everything is delivered, the residual included; it keeps only what rounding takes away."""
        kernels, size = self._kernels, self.transport.size
        total = self._residual.of_length(source.size)
        kernels.accumulate(total, source.data)
        self._dense_sum(total)
        kernels.mean(total, size, target)
        self._stats.selected_local = self._stats.selected_global = total.size
        mine = self._errors_kept(source, source.size)
        kernels.rounding_error(total[mine], size, target[mine], total[mine])
        kernels.clear(total[: mine.start])
        kernels.clear(total[mine.stop :])

    def _sparse_mean(self, source: View, target: Any = None) -> tuple[Any, Any]:
        """Sorted indexes and mean values of the source's bits type; the residual is left as the step leaves it.

        A target is zeroed, as far as the time that the exchange waits allows; the rest is left in transport.idle.
        """
        residual = self._residual.of_length(source.size)
        if source.size == 0:
            self.transport.idle = iter(())
            return self._kernels.empty(0, np.int32), source.data
        with self.transport.ledger.phase("select"):
            k = self._stats.k
            selection = self._selector.select(residual, source.data, k, self._cap(k))
        self._stats.threshold = selection.threshold
        self.transport.idle = iter(()) if target is None else self._kernels.zeroing(target)
        if self.transport.size == 1:
            delivered = Delivered(selection.index, selection.value, selection.index)
        else:
            delivered = self._exchange(selection, source.size)
        self.delivered, self.sent = delivered.index, delivered.index if self.complete else delivered.sent_index
        self._stats.selected_local = delivered.sent_index.size
        self._stats.selected_global = delivered.index.size
        with self.transport.ledger.phase("residual"):
            self._residual.clear_delivered(delivered.sent_index, delivered.index)
            for lost in delivered.lost:
                self._residual.keep_lost(lost.index, lost.value, lost.kept, delivered.index)
            total = self._completed(delivered, residual) if self.complete else delivered.total
            mean = self._rounded_mean(delivered.index, total, source)
        return delivered.index, mean

    def _rounded_mean(self, index: Any, total: Any, source: View) -> Any:
        """The sums over P in the source's type; what rounding to 16 bits takes away from them is kept."""
        size = self.transport.size
        mean = self._mean_space(total.size).view(source.data.dtype)[: total.size]
        self._kernels.mean(total, size, mean)
        mine = self._errors_kept(source, total.size)
        error = self._error_space(mine.stop - mine.start).view(np.float32)
        self._kernels.rounding_error(total[mine], size, mean[mine], error)
        self._residual.keep(index[mine], error)
        return mean

    def _errors_kept(self, source: View, length: int) -> slice:
        """The share of that many sums whose rounding errors this rank is to keep, so that each is kept once."""
        size, rank = self.transport.size, self.transport.rank
        length = 0 if source.dtype == "float32" else length
        return slice(length * rank // size, length * (rank + 1) // size)

    def _completed(self, delivered: Delivered, residual: Any) -> Any:
        """The totals and all that any rank holds of their indexes, which no rank keeps."""
        if self.transport.size == 1:
            return delivered.total
        share = self._share_space(delivered.index.size).view(np.float32)
        self._kernels.take(residual, delivered.index, share)
        if delivered.is_share or self.transport.rank == 0:
            self._kernels.accumulate(share, delivered.total)
        if self._codec.is_lossy and share.size:
            self._sum_in_16_bits(share, delivered.index)
        else:
            self._dense_sum(share)
        return share

    def _sum_in_16_bits(self, share: Any, index: Any) -> None:
        """Overwrites the shares by their sums over the ranks; what rounding takes away, from them and from the sums, is
        kept. Those of fp16 are divided by a power of two that brings the sums near the top of its range."""
        kernels, scale, kind = self._kernels, 1.0, np.int16
        if self.values == "fp16":
            largest = np.array([kernels.kth_magnitude(share, 1)], np.int32)
            self.transport.allreduce(largest, "max")
            scale, kind = 2.0 ** fp16_exponent(int(largest[0]), self.transport.size), np.uint16
        short = self._short_space(share.size).view(kind)[: share.size]
        kernels.mean(share, scale, short)
        kernels.rounding_error(share, scale, short, share)
        self._residual.keep(index, share)
        own_parts = self._dense_sum.own_parts(share.size)

        def finish(total: Any, part: Any) -> None:
            kernels.mean(total, 1, part)
            kernels.rounding_error(total, 1, part, total)
            kernels.mean(total, 1 / scale, total)
            self._residual.keep(index[next(own_parts)], total)

        self._dense_sum(short, finish)
        kernels.clear(share)
        kernels.accumulate(share, short)
        kernels.mean(share, 1 / scale, share)

    def _cap(self, k: int) -> int:
        """The most entries a selection may have."""
        return k

    @abc.abstractmethod
    def _exchange(self, selection: Selection, n: int) -> Delivered:
        """Sums the selections of all ranks, or the part of the sums that the algorithm delivers."""

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"selector": self.selector}
        own |= {f"selector.{key}": value for key, value in self._selector.state_dict().items()}
        if self.residual is not None:
            with self._kernels.again():
                own["residual"] = self._kernels.to_host(self.residual)
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # What another selector has learned is of no use: without it, the next step finds its threshold anew.
        self._selector = SELECTORS[self.selector](self._kernels)
        if state.get("selector", self.selector) == self.selector:
            prefix = "selector."
            self._selector.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
        self._residual.array = None
        if "residual" in state:
            with self._kernels.again():
                self._residual.array = self._kernels.from_host(state["residual"].astype(np.float32))
