"""What all reducers share: the checks, the agreement of the ranks, and the account of a step."""

import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from okrt.buffers import View, view
from okrt.errors import NonFiniteGradient, UsageError
from okrt.kernels.lanes import Lanes
from okrt.transport import Transport
from okrt.world import agree, init

NAN_POLICIES = ("raise", "skip")


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
    """magnitude that every entry selected on this rank reaches"""
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
        self.delivered: np.ndarray | None = None
        """sorted indexes of the last result, good until the next call; None if all were delivered"""
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
            self.delivered = np.empty(0, np.int32)
        else:
            self.delivered = None
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
        self.transport.idle = iter(())
        refusal, source, finite = None, None, True
        plan = self._plan()
        with ledger.phase("check"):
            try:
                source = view(x)
                self._check_expected(source)
                if out is not None:
                    check_out(out, source)
                plan |= {"length": source.size, "dtype": source.dtype}
                finite = self._lanes.all_finite(source.data)
            except UsageError as error:
                refusal = error
        with ledger.phase("agree"):
            any_not_finite = agree(self.transport, plan, refusal, flag=not finite)
        assert source is not None
        if any_not_finite and self.nan == "raise":
            ranks = np.flatnonzero(self.transport.allgather(np.array([not finite])))
            raise NonFiniteGradient(
                f"NaN or Inf in the gradient of rank {', '.join(map(str, ranks))}; residuals are untouched "
                '(nan="skip" passes over such steps)'
            )
        self._expected = (source.size, source.dtype)
        self._stats = StepStats(k=self._k(source.size), skipped=any_not_finite)
        self.skipped_steps += any_not_finite
        return source

    def _check_expected(self, source: View) -> None:
        if self._expected not in (None, (source.size, source.dtype)):
            length, dtype = self._expected
            raise UsageError(
                f"this reducer serves a tensor of {length} {dtype}, it was given {source.size} {source.dtype}: "
                "make one reducer for each tensor"
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
        counts = {"steps": self._steps, "skipped_steps": self.skipped_steps}
        return {"reducer": self.name, "length": length, "dtype": dtype} | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where state_dict was taken."""
        if state["reducer"] != self.name:
            raise UsageError(f"this is the state of a {state['reducer']} reducer, it cannot be loaded into {self.name}")
        self._steps = int(state["steps"])
        self.skipped_steps = int(state["skipped_steps"])
        self._expected = None if state["length"] < 0 else (int(state["length"]), str(state["dtype"]))
