"""What all reducers share: the checks, the agreement of the ranks, and the account of a step."""

import abc
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from okrt.buffers import HOST, View, device_kernels, gpu_name, view
from okrt.errors import NonFiniteGradient, UsageError
from okrt.transport import Transport
from okrt.world import agree, init, note_gpu

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
    if (target.size, target.dtype, target.library, target.memory) != (
        *(source.size, source.dtype, source.library, source.memory),
    ):
        raise UsageError(
            f"out holds {target.size} {target.dtype}: it must be of the kind, type and length of the input"
        )
    if not target.is_writeable:
        raise UsageError("out cannot be written")


def check_choice(what: str, value: str, choices: Any) -> str:
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"unknown {what} {value!r}: choose one of {', '.join(sorted(choices))}")
    return value


class Reducer(abc.ABC):
    """Averages arrays over the ranks. One reducer serves one tensor: its length and type are set by the first call."""

    name: str

    def __init__(self, *, nan: str = "raise", transport: Transport | None = None) -> None:
        # Not before there is something to reduce: compiled code takes a second to load.
        from okrt.kernels.host import Host

        self.nan = check_choice("nan policy", nan, NAN_POLICIES)
        self.transport: Transport = init().transport if transport is None else transport
        self.skipped_steps = 0
        self.last: StepStats | None = None
        self.delivered: Any = None
        """sorted indexes of the last result, good until the next call; None if all were delivered"""
        self.sent: Any = None
        """likewise: those of which this rank has given its part away, to the result where they are delivered (of gtopk,
        to the residual of a rank that dropped a sum on its way); None if of all"""
        self._kernels: Any = Host(init().threads)
        self._steps = 0
        self._expected: tuple[int, str] | None = None
        self._place: str | None = None  # where the arrays are, once there has been one
        self._make_buffers()

    @property
    def residual(self) -> Any:
        """What is kept back for the next steps; None for exact reducers and before the first step."""
        return None

    def allreduce(self, x: Any, out: Any = None) -> Any:
        """The mean of x over the ranks, as an array of the same kind; x is left as it was.

        Given `out`, an array like x (or x itself, for a reduction in place), the result is written there and no memory
        of full length is needed.
        """
        with self._begun(x, out) as source:
            target = self._kernels.empty(source.size, source.data.dtype) if out is None else view(out).data
            if self._stats.skipped:
                self._kernels.clear(target)
            else:
                self._mean(source, target)
            self._finish()
            return source.result(target) if out is None else out

    @staticmethod
    @abc.abstractmethod
    def cost(n: int, k: int, size: int) -> Cost:
        """The bound for n elements of which k are sent, on `size` ranks."""

    @abc.abstractmethod
    def _mean(self, source: View, target: Any) -> None:
        """Writes the mean over ranks, as the source's bits type; target may be the source's own memory."""

    def _plan(self) -> dict[str, Any]:
        """All that the ranks must have in common, apart from the array."""
        return {"reducer": self.name, "nan": self.nan, "step": self._steps}

    def _k(self, n: int) -> int:
        return n

    @abc.abstractmethod
    def _make_buffers(self) -> None:
        """What a reduction works in, in the memory of the kernels."""

    def _move_to(self, kernels: Any, place: str) -> None:
        """From host memory, before the first reduction."""
        self._kernels, self._place = kernels, place
        self._make_buffers()

    @contextlib.contextmanager
    def _begun(self, x: Any, out: Any = None) -> Iterator[View]:
        """The view of x, checked on all ranks at once; on a GPU all inside goes to the stream the caller works on."""
        source, refusal, kernels = None, None, self._kernels
        try:
            source = view(x)
            self._check_expected(source)
            if out is not None:
                check_out(out, source)
            if self._place is None and source.place != HOST:
                kernels = device_kernels(source)
        except UsageError as error:
            refusal = error
        with kernels.on(None if source is None else source.stream):
            if kernels is not self._kernels:
                assert source is not None
                self._move_to(kernels, source.place)
            self._begin(source, refusal)
            assert source is not None
            yield source

    def _begin(self, source: View | None, refusal: UsageError | None) -> None:
        """Agrees on the array; whatever is wrong on one rank is an error on every rank."""
        ledger = self.transport.ledger
        ledger.begin()
        self.transport.idle = iter(())
        finite = True
        plan = self._plan()
        with ledger.phase("check"):
            if source is not None and refusal is None:
                plan |= {"length": source.size, "dtype": source.dtype, "memory": source.memory}
                finite = self._kernels.all_finite(source.data)
        with ledger.phase("agree"):
            any_not_finite = agree(self.transport, plan, refusal, flag=not finite)
        assert source is not None
        if source.memory != HOST and self._steps == 0:
            note_gpu(gpu_name(source))
        if any_not_finite and self.nan == "raise":
            ranks = np.flatnonzero(self.transport.allgather(np.array([not finite])))
            raise NonFiniteGradient(
                f"NaN or Inf in the gradient of rank {', '.join(map(str, ranks))}; residuals are untouched "
                '(nan="skip" passes over such steps)'
            )
        self._expected, self._place = (source.size, source.dtype), source.place
        self._stats = StepStats(k=self._k(source.size), skipped=any_not_finite)
        self.delivered, self.sent = self._kernels.empty(0, np.int32) if any_not_finite else None, None
        self.skipped_steps += any_not_finite

    def _check_expected(self, source: View) -> None:
        if self._expected not in (None, (source.size, source.dtype)):
            length, dtype = self._expected
            raise UsageError(
                f"this reducer serves a tensor of {length} {dtype}, it was given {source.size} {source.dtype}: "
                "make one reducer for each tensor"
            )
        if self._place not in (None, source.place):
            raise UsageError(
                f"this reducer serves a tensor on {self._place}, it was given one on {source.place}: "
                "make one reducer for each"
            )

    def _finish(self) -> None:
        ledger, stats = self.transport.ledger, self._stats
        stats.words_received = ledger.words_received
        stats.bytes_sent, stats.bytes_received = ledger.bytes_sent, ledger.bytes_received
        stats.messages = ledger.messages
        stats.seconds = ledger.seconds
        self.last = stats
        self._steps += 1

    def cuts(self, index: Any, bounds: np.ndarray) -> np.ndarray:
        """Where sorted indexes, such as those delivered, reach each of the bounds."""
        with self._kernels.again():
            return self._kernels.cuts(index, bounds)

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
