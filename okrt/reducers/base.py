"""What all reducers share: the checks, the agreement of the ranks, error feedback, and the account of a step."""

import abc
import inspect
import math
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from okrt.buffers import View, view
from okrt.codec import CODECS
from okrt.errors import NonFiniteGradient, PeerError, PlanMismatch, UsageError
from okrt.feedback import Residual
from okrt.kernels.bits import widen
from okrt.kernels.lanes import Lanes
from okrt.select import SELECTORS, Selection
from okrt.transport import Transport
from okrt.world import init

NAN_POLICIES = ("raise", "skip")
_FINE, _NOT_FINITE, _REFUSED = 0, 1, 2


@dataclass
class StepStats:
    """One call on this rank."""

    k: int
    """entries the density stands for"""
    selected_local: int = 0
    """entries of this rank that took part in the exchange"""
    selected_global: int = 0
    """entries of the result"""
    threshold: float = 0.0
    """smallest magnitude selected on this rank"""
    skipped: bool = False
    """a rank had NaN or Inf, and the policy is "skip" """
    words_received: int = 0
    """4-byte words, payload and control"""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    """messages received"""
    seconds: dict[str, float] = field(default_factory=dict)
    """by phase"""


@dataclass(frozen=True)
class Delivered:
    """The outcome of an exchange: sums over ranks in index order, and which entries of this rank were sent."""

    index: np.ndarray
    total: np.ndarray
    sent_index: np.ndarray


@dataclass(frozen=True)
class Cost:
    """What a step of an algorithm takes at most: messages one after the other, and words received by a rank."""

    messages: float
    words: float


def check_out(out: Any, source: View) -> None:
    target = view(out)
    if (target.size, target.dtype, target.is_torch) != (source.size, source.dtype, source.is_torch):
        raise UsageError(
            f"out holds {target.size} {target.dtype}: it must be of the kind, type and length of the input"
        )
    if not target.data.flags.writeable:
        raise UsageError("out cannot be written")


def zeroing(target: np.ndarray, stride: int = 1 << 16) -> Iterator[None]:
    """Sets the target to zero, a piece at each turn."""
    for start in range(0, target.size, stride):
        target[start : start + stride] = 0
        yield


def check_choice(what: str, value: str, choices: Any) -> str:
    if value not in choices:
        raise UsageError(f"unknown {what} {value!r}: choose one of {', '.join(sorted(choices))}")
    return value


class Reducer(abc.ABC):
    """Averages arrays over the ranks. One reducer serves one tensor: its length and type are set by the first call."""

    name: str

    def __init__(self, *, nan: str = "raise", transport: Transport | None = None) -> None:
        self.nan = check_choice("nan policy", nan, NAN_POLICIES)
        self.transport: Transport = init().transport if transport is None else transport
        self.skipped_steps = 0
        self.last: StepStats | None = None
        self._lanes = Lanes(init().threads)
        self._steps = 0
        self._expected: tuple[int, str] | None = None

    @property
    def residual(self) -> np.ndarray | None:
        """What is kept back for the next steps; None for exact reducers and before the first step."""
        return None

    def allreduce(self, x: Any, out: Any = None) -> Any:
        """The mean of x over the ranks, as an array of the same kind; x is left as it was.

        Given `out`, an array like x (or x itself, for a reduction in place), the result is written there and no memory
        of full length is needed.
        """
        source = self._begin(x, out)
        target = np.empty_like(source.data) if out is None else view(out).data
        if self._stats.skipped:
            target[:] = 0
        else:
            self._mean(source, target)
        self._finish()
        return source.result(target) if out is None else out

    @staticmethod
    @abc.abstractmethod
    def cost(n: int, k: int, size: int) -> Cost:
        """The bound for n elements of which k are sent, on `size` ranks."""

    @abc.abstractmethod
    def _mean(self, source: View, target: np.ndarray) -> None:
        """Writes the mean over ranks, as the source's bits type; target may be the source's own memory."""

    def _plan(self) -> dict[str, Any]:
        """All that the ranks must have in common, apart from the array."""
        return {"reducer": self.name, "nan": self.nan, "step": self._steps}

    def _k(self, n: int) -> int:
        return n

    def _begin(self, x: Any, out: Any = None) -> View:
        """Checks the array on all ranks at once; whatever is wrong on one is an error on every rank."""
        ledger = self.transport.ledger
        ledger.begin()
        refusal: UsageError | None = None
        source = None
        finite = True
        with ledger.phase("check"):
            try:
                source = view(x)
                self._check_expected(source)
                if out is not None:
                    check_out(out, source)
                finite = self._lanes.all_finite(source.data)
            except UsageError as error:
                refusal = error
        with ledger.phase("agree"):
            status = _REFUSED if refusal else _FINE if finite else _NOT_FINITE
            worst = self._agree(source, status, refusal)
        if refusal:
            raise refusal
        assert source is not None
        if worst == _NOT_FINITE and self.nan == "raise":
            self._raise_not_finite(finite)
        self._expected = (source.size, source.dtype)
        self._stats = StepStats(k=self._k(source.size), skipped=worst == _NOT_FINITE)
        self.skipped_steps += self._stats.skipped
        return source

    def _check_expected(self, source: View) -> None:
        if self._expected not in (None, (source.size, source.dtype)):
            length, dtype = self._expected
            raise UsageError(
                f"this reducer serves a tensor of {length} {dtype}, it was given {source.size} {source.dtype}: "
                "make one reducer for each tensor"
            )

    def _agree(self, source: View | None, status: int, refusal: UsageError | None) -> int:
        """The worst status of all ranks, after making sure that all are about to do the same."""
        plan = self._plan()
        if source is not None:
            plan |= {"length": source.size, "dtype": source.dtype}
        if self.transport.size == 1:
            return status
        signature = zlib.crc32(repr(sorted(plan.items())).encode()) >> 1
        # The maximum of a number and of its negative are opposite only if all ranks gave the same.
        words = np.array([signature, -signature, status], np.int32)
        self.transport.allreduce(words, "max")
        if words[2] == _REFUSED:
            texts = self.transport.gather_texts(str(refusal) if refusal else "")
            if not refusal:
                complaints = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
                raise PeerError(f"another rank refused its input: {'; '.join(complaints)}")
        elif words[0] != -words[1]:
            raise PlanMismatch(self._differences(plan))
        return int(words[2])

    def _differences(self, plan: dict[str, Any]) -> str:
        texts = self.transport.gather_texts("\n".join(f"{key}={value}" for key, value in plan.items()))
        plans = [dict(line.split("=", 1) for line in text.split("\n")) for text in texts]
        differing = []
        for key in dict.fromkeys(key for other in plans for key in other):
            ranks: dict[str, list[int]] = {}
            for rank, other in enumerate(plans):
                ranks.setdefault(other.get(key, "(not set)"), []).append(rank)
            if len(ranks) > 1:
                said = ", ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items())
                differing.append(f"{key} is {said}")
        return f"the ranks disagree: {'; '.join(differing)}"

    def _raise_not_finite(self, finite: bool) -> None:
        where = self.transport.gather_texts("" if finite else "x") if self.transport.size > 1 else ["x"]
        ranks = ", ".join(str(rank) for rank, text in enumerate(where) if text)
        raise NonFiniteGradient(
            f'NaN or Inf in the gradient of rank {ranks}; residuals are untouched (nan="skip" passes over such steps)'
        )

    def _finish(self) -> None:
        ledger, stats = self.transport.ledger, self._stats
        stats.words_received = ledger.words_received
        stats.bytes_sent, stats.bytes_received = ledger.bytes_sent, ledger.bytes_received
        stats.messages = ledger.messages
        stats.seconds = ledger.seconds
        self.last = stats
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """All that a restart needs: NumPy arrays and plain scalars only."""
        length, dtype = self._expected or (-1, "")
        return {"steps": self._steps, "skipped_steps": self.skipped_steps, "length": length, "dtype": dtype}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        self.skipped_steps = int(state["skipped_steps"])
        self._expected = None if state["length"] < 0 else (int(state["length"]), str(state["dtype"]))

    def _sum_over_ranks(self, total: np.ndarray) -> np.ndarray:
        """float32 `total`, overwritten by its sum over the ranks."""
        if self.transport.size > 1 and total.size:
            with self.transport.ledger.phase("exchange"):
                self.transport.allreduce(total, "sum", long=True)
        self._stats.selected_local = self._stats.selected_global = total.size
        return total


class SparseReducer(Reducer):
    """Sends a selection of residual + gradient and keeps the rest: what a subclass adds is the exchange."""

    default_selector = "exact"

    def __init__(
        self,
        *,
        density: float = 0.01,
        selector: str | None = None,
        codec: str = "coo",
        dense_steps: int = 0,
        nan: str = "raise",
        transport: Transport | None = None,
    ) -> None:
        if not (isinstance(density, (int, float)) and 0 < density <= 1):
            raise UsageError(f"density is {density}: it must be above 0 and at most 1")
        if not (isinstance(dense_steps, int) and dense_steps >= 0):
            raise UsageError(f"dense_steps is {dense_steps}: it must be a whole number of at least 0")
        self.density = float(density)
        self.dense_steps = dense_steps
        self.selector = check_choice("selector", selector or self.default_selector, SELECTORS)
        self.codec = check_choice("codec", codec, CODECS)
        super().__init__(nan=nan, transport=transport)
        self._selector = SELECTORS[self.selector](self._lanes)
        self._codec = CODECS[self.codec]()
        self._residual = Residual()
        self._make_buffers()

    def _make_buffers(self) -> None:
        """Called once: what the exchange works in."""

    @property
    def residual(self) -> np.ndarray | None:
        return self._residual.array

    def _plan(self) -> dict[str, Any]:
        own = {"density": self.density, "selector": self.selector, "codec": self.codec}
        return super()._plan() | own | {"dense_steps": self.dense_steps}

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
            total = self._sum_over_ranks(residual + widen(source.data))
            residual[:] = 0
            target[:] = self._rounded_mean(np.arange(source.size, dtype=np.int32), total, source)
            return
        index, mean = self._sparse_mean(source, target)
        with self.transport.ledger.phase("scatter"):
            for _ in self.transport.idle:
                pass
            target[index] = mean

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
            mean = self._rounded_mean(delivered.index, delivered.total, source)
        return delivered.index, mean

    def _cap(self, k: int) -> int:
        """The most entries a selection may have."""
        return k

    @abc.abstractmethod
    def _exchange(self, selection: Selection, n: int) -> Delivered:
        """Sums the selections of all ranks, or the part of the sums that the algorithm delivers."""

    def _rounded_mean(self, index: np.ndarray, total: np.ndarray, source: View) -> np.ndarray:
        """The sums over P in the source's type; what the rounding to 16 bits takes away goes into a residual."""
        size, rank = self.transport.size, self.transport.rank
        exact = total / np.float32(size)
        mean = source.narrowed(exact)
        if mean is not exact:
            # Each rank keeps the errors of its share of the result, so that each is kept once.
            mine = slice(mean.size * rank // size, mean.size * (rank + 1) // size)
            error = total[mine] - widen(mean[mine]) * np.float32(size)
            self._residual.keep(index[mine], error)
        return mean

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


def checked_options(kind: type[Reducer], options: dict[str, Any]) -> dict[str, Any]:
    """The options of `kind`; one that no reducer has is an error, one that only sparse reducers have a warning."""
    known, sparse = (list(inspect.signature(init).parameters)[1:] for init in (kind.__init__, SparseReducer.__init__))
    taken = {}
    for name, value in options.items():
        if name in known:
            taken[name] = value
        elif name in sparse:
            warnings.warn(f"{name}={value!r} has no effect on {kind.name}, which sends every entry", stacklevel=3)
        else:
            raise UsageError(f"unknown option {name!r} of {kind.name}: it takes {', '.join(known)}")
    return taken


__all__ = ["Cost", "Delivered", "Reducer", "SparseReducer", "StepStats", "checked_options"]
