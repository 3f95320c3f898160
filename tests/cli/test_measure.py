"""What is measured of many ranks, and when it is enough: with ranks in one process and a clock of their own."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from okrt.cli import measure as measure_module
from okrt.cli.measure import measure, measure_in_turns, parsed
from okrt.reducers import Cost
from okrt.sweep.spec import Repeat
from tests.ranks import run_ranks

CLOCK = threading.local()


class Subject:
    """Rank r's step s takes durations[s][r] seconds; rank r receives 10 r + s words."""

    k, cost = 10, Cost(1, 1)

    def __init__(self, rank: int, durations: np.ndarray) -> None:
        self.rank, self.durations = rank, durations
        self.prepared: list[int] = []
        CLOCK.now = 0.0

    def prepare(self, step: int) -> None:
        self.prepared.append(step)
        CLOCK.now += 1000  # not to be measured

    def step(self) -> None:
        self.at = self.prepared[-1]
        CLOCK.now += self.durations[self.at % len(self.durations)][self.rank]

    def account(self, seconds: float) -> list[float]:
        return [10 * self.rank + self.at, 40 * self.rank, 0.25 * seconds, 0.75 * seconds]


def measured(monkeypatch: pytest.MonkeyPatch, durations: Any, **repeat: Any) -> np.ndarray:
    monkeypatch.setattr(measure_module, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    durations = np.array(durations, float)
    ranks = durations.shape[1]
    tables = run_ranks(
        ranks, lambda transport: measure(Subject(transport.rank, durations), transport, Repeat(**repeat))
    )
    for table in tables:
        np.testing.assert_array_equal(table, tables[0])
    return tables[0]


def test_the_slowest_rank_of_each_step_and_the_most_words(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [[9, 9, 9], [1, 2, 4], [8, 2, 4], [1, 16, 4]]
    rows = measured(monkeypatch, durations, warmup=1, at_least=3, at_most=3, within=0)
    np.testing.assert_array_equal(rows[:, 0], [4, 8, 16])
    np.testing.assert_array_equal(rows[:, 1], [21, 22, 23])
    np.testing.assert_array_equal(rows[:, 2], [80, 80, 80])
    # The phases are those of the rank that was slowest.
    np.testing.assert_array_equal(rows[:, 3:], [[1, 3], [2, 6], [4, 12]])


def test_it_goes_on_until_the_interval_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = measured(monkeypatch, [[1.0, 1.0]], warmup=0, at_least=2, at_most=50)
    assert len(steady) == 6, "with fewer there is no interval of 95 %"
    shaky = [[1.0 if step % 2 else 2.0] * 2 for step in range(100)]
    assert len(measured(monkeypatch, shaky, warmup=0, at_least=10, at_most=50, max_seconds=1e9)) == 50
    settling = [[2.0, 1.0]] * 2 + [[1.0, 1.0]] * 98
    # Two of twelve are outside of the third-smallest to third-largest, which enclose the median in 96 %.
    assert len(measured(monkeypatch, settling, warmup=0, at_least=2, at_most=50)) == 12


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shaky = [[1.0 if step % 2 else 2.0] * 2 for step in range(100)]
    # 1, 2, 1, 2, … s: eleven take 16 s, the twelfth is the first that is past them.
    assert len(measured(monkeypatch, shaky, warmup=3, at_least=5, at_most=50, max_seconds=16)) == 12
    assert len(measured(monkeypatch, shaky, warmup=3, at_least=5, at_most=50, max_seconds=0)) == 5
    assert len(measured(monkeypatch, shaky, warmup=3, at_least=1, at_most=1)) == 1
    # Within two thirds to either side of 1.5 is 1 and 2: a wide interval is enough if the user says so.
    assert len(measured(monkeypatch, shaky, warmup=0, at_least=8, at_most=50, within=0.34)) == 8


def test_subjects_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower is slower for all; whoever has enough steps leaves the rest to the others."""
    monkeypatch.setattr(measure_module, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    slower = np.repeat([2.0**step for step in range(8)], 2).reshape(8, 2)
    repeat = Repeat(warmup=1, at_least=2, at_most=4, within=0, max_seconds=40)

    def body(transport: Any) -> tuple[list[np.ndarray], list[int]]:
        order: list[int] = []
        subjects = [Subject(transport.rank, slower * factor) for factor in (1.0, 3.0)]
        return measure_in_turns(subjects, transport, repeat, order.append), order

    for (one, other), order in run_ranks(2, body):
        np.testing.assert_array_equal(one[:, 0], [2, 4, 8, 16])
        np.testing.assert_array_equal(other[:, 0], [6, 12, 24])
        assert order == [0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_options_of_a_reducer() -> None:
    assert parsed("oktopk") == ("oktopk", {})
    expected = {"codec": "coo", "complete": True, "dense_steps": 3}
    assert parsed("topka:codec=coo:complete=true:dense_steps=3") == ("topka", expected)
