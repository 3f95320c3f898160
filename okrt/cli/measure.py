"""Measuring step after step on all ranks, the same for benchmarks and sweeps: allreduces, or the steps of a job."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from okrt.cli.gloo import Gloo
from okrt.errors import UsageError
from okrt.perf.synthetic import SyntheticGradient
from okrt.reducers import REDUCERS, Cost, reducer
from okrt.report.statistics import is_within
from okrt.sweep.spec import GLOO, Repeat
from okrt.transport import Transport
from okrt.world import World

PING_WORDS = 1 << 18
SECONDS, WORDS, BYTES, PHASES = 0, 1, 2, 3
"""columns of what is measured; from PHASES on seconds by phase"""
PHASES_OF_A_REDUCER = {
    "select": ("check", "select"),
    "exchange": ("agree", "partition", "split", "threshold", "reduce", "gather"),
    "scatter": ("residual", "scatter"),
}


class Subject(Protocol):
    """What is measured, on this rank."""

    k: int
    cost: Cost

    def prepare(self, step: int) -> None:
        """What a step needs and is not measured."""

    def step(self) -> None: ...

    def account(self, seconds: float) -> list[float]:
        """Words and bytes received in the last step, which took that long, and its seconds by phase."""


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a reducer, as oktopk:codec=packed:values=fp16."""
    name, *settings = text.split(":")
    options: dict[str, Any] = {}
    for setting in settings:
        key, is_set, value = setting.partition("=")
        if not is_set:
            raise UsageError(f"{text}: {setting!r} is not an option, write NAME:OPTION=VALUE")
        words = {"true": True, "false": False}
        options[key] = words[value] if value in words else int(value) if value.isdecimal() else value
    return name, options


class Allreduce:
    """A reducer, with options or without, or gloo, on gradients that are new at each step, in place."""

    def __init__(self, world: World, text: str, gradient: SyntheticGradient, density: float) -> None:
        name, options = parsed(text)
        self._gradient = gradient
        self.k = max(1, int(np.ceil(density * gradient.elements)))
        self.cost = REDUCERS["dense" if name == GLOO else name].cost(gradient.elements, self.k, world.size)
        self._peer: Any
        if name == GLOO:
            self._peer = Gloo(world)
        else:
            self._peer = reducer(name, **({} if name == "dense" else {"density": density}), **options)

    def prepare(self, step: int) -> None:
        self._x = self._gradient(step)

    def step(self) -> None:
        self._peer.allreduce(self._x, out=self._x)

    def account(self, seconds: float) -> list[float]:
        if isinstance(self._peer, Gloo):  # it does not tell, and gets what its ring takes at best
            return [self.cost.words, 4 * self.cost.words, 0.0, seconds, 0.0, 0.0]
        last = self._peer.last
        phases = [sum(last.seconds.get(part, 0.0) for part in parts) for parts in PHASES_OF_A_REDUCER.values()]
        return [last.words_received, last.bytes_received, *phases, seconds - sum(phases)]

    def close(self) -> None:
        if isinstance(self._peer, Gloo):
            self._peer.close()


def measure(subject: Subject, transport: Transport, repeat: Repeat) -> np.ndarray:
    """A row a measured step: seconds and phases of the slowest rank, words and bytes of the one that received most."""
    return measure_in_turns([subject], transport, repeat)[0]


def measure_in_turns(
    subjects: Sequence[Subject],
    transport: Transport,
    repeat: Repeat,
    advance: Callable[[int], None] = lambda subject: None,
) -> list[np.ndarray]:
    """As `measure`, of each subject: one step of each after the other, so that a machine that changes speed changes it
    for all of them. advance(i) is called after each step of subject i."""
    rows: list[list[np.ndarray]] = [[] for _ in subjects]
    turns = {i: steps(subject, transport, repeat, rows[i]) for i, subject in enumerate(subjects)}
    while turns:
        for i, turn in list(turns.items()):
            has_ended = next(turn, True)
            if has_ended:
                del turns[i]
            else:
                advance(i)
    return [np.array(own) for own in rows]


def steps(subject: Subject, transport: Transport, repeat: Repeat, rows: list[np.ndarray]) -> Iterator[None]:
    """Takes a step at each turn until those that count are enough, and appends their rows.

    All ranks see the rows of all, so that they stop at the same step.
    """
    mine = np.zeros(0)
    step = 0
    while True:
        subject.prepare(step)
        # Also the start signal: no rank begins before all are ready.
        table = transport.allgather(mine)
        if step > repeat.warmup:
            rows.append(merged(table))
        if is_enough(rows, repeat):
            return
        start = time.perf_counter()
        subject.step()
        seconds = time.perf_counter() - start
        mine = np.array([seconds, *subject.account(seconds)])
        step += 1
        yield


def merged(table: np.ndarray) -> np.ndarray:
    """The rows of all ranks as one."""
    row: np.ndarray = table[table[:, SECONDS].argmax()].copy()
    row[[WORDS, BYTES]] = table[:, [WORDS, BYTES]].max(axis=0)
    return row


def is_enough(rows: list[np.ndarray], repeat: Repeat) -> bool:
    if len(rows) < repeat.at_least:
        return False
    seconds = np.array([row[SECONDS] for row in rows])
    return len(rows) >= repeat.at_most or seconds.sum() > repeat.max_seconds or is_within(seconds, repeat.within)


def ping(transport: Transport, tries: int = 5) -> tuple[float, float]:
    """Latency in seconds and seconds per word between ranks 0 and 1; zeros for one rank."""
    if transport.size == 1:
        return 0.0, 0.0
    best = []
    for words in (1, PING_WORDS):
        message = np.zeros(words, np.int32)
        times = []
        for _ in range(tries):
            start = time.perf_counter()
            if transport.rank == 0:
                transport.send(1, message)
                transport.receive(1, message)
            elif transport.rank == 1:
                transport.receive(0, message)
                transport.send(0, message)
            times.append((time.perf_counter() - start) / 2)
        best.append(min(times))
    measured = transport.allgather(np.array(best))[0]
    return float(measured[0]), float(max(0.0, measured[1] - measured[0]) / PING_WORDS)


def alpha_beta_s(cost: Cost, alpha_s: float, beta_s: float) -> float:
    """What a network of that latency and rate allows the algorithm."""
    return cost.messages * alpha_s + cost.words * beta_s
