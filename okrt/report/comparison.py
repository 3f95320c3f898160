"""What the points of a sweep say about each other: efficiency, speed-ups, losses to dense, bounds exceeded."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from okrt.report.grid import EXACT, Grid
from okrt.report.sweep_file import BASELINE


@dataclass(frozen=True)
class Loss:
    """A point that takes longer than dense would."""

    number: int
    times_as_long: float
    is_certain: bool
    """the 95 % intervals are apart"""


class Comparison:
    """All arrays have one entry per point; NaN where there is nothing to compare."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.columns = grid.sweep.points

    @cached_property
    def base_ranks(self) -> int | None:
        """The fewest ranks, but two for allreduces: with one nothing is sent."""
        least = 1 if self.grid.is_job else 2
        return min((p["ranks"] for p in map(self._point, self.grid.done) if p["ranks"] >= least), default=None)

    @cached_property
    def efficiency(self) -> np.ndarray:
        """Work per second and rank, relative to that of the same settings on the base's ranks.

        The work of an allreduce is its elements on each rank, that of a training step its samples.
        """
        ranks = self.columns["ranks"].astype(float)
        if self.grid.is_job:
            work = ranks if self.grid.weak else np.ones(len(ranks))
        else:
            work = self.columns["elements"] * ranks
        rate = work / (ranks * self.columns["median_s"])
        bases = {self._all_but(n, "ranks"): rate[n] for n in self.grid.done if ranks[n] == self.base_ranks}
        base = np.array([bases.get(self._all_but(n, "ranks"), np.nan) for n in range(len(ranks))])
        return np.where(ranks >= (self.base_ranks or np.inf), rate / base, np.nan)

    @cached_property
    def best_other(self) -> np.ndarray:
        """The fastest point of any other reducer with the same settings; -1 if there is none."""
        best = np.full(len(self.grid.points), -1)
        for number in self.grid.done:
            own = self._point(number)
            alike = {name: value for name, value in own.items() if name != "reducer"}
            if own["reducer"] in EXACT:
                del alike["density"]
            others = [n for n in self.grid.select(**alike) if self._point(n)["reducer"] != own["reducer"]]
            if others:
                best[number] = min(others, key=lambda n: self.columns["median_s"][n])
        return best

    @cached_property
    def speedup_over_best_other(self) -> np.ndarray:
        return (
            np.where(self.best_other >= 0, self.columns["median_s"][self.best_other], np.nan) / self.columns["median_s"]
        )

    @cached_property
    def losses(self) -> list[Loss]:
        """Sparse schemes that take longer than dense, the worst first."""
        found = []
        for number in self.grid.done:
            alike = {k: v for k, v in self._point(number).items() if k not in ("reducer", "density")}
            dense = self.grid.select(**alike, reducer=BASELINE)
            if self._point(number)["reducer"] in EXACT or not dense:
                continue
            longer = 1 / self.columns["speedup_over_dense"][number]
            if longer > 1:
                apart = self.columns["ci95_low_s"][number] > self.columns["ci95_high_s"][dense[0]]
                found.append(Loss(number, float(longer), bool(apart)))
        return sorted(found, key=lambda loss: -loss.times_as_long)

    @cached_property
    def over_bound(self) -> list[int]:
        """Sparse points that received more than their bound at some step, control words aside."""
        control_words = 8 * self.columns["ranks"] + 64
        allowed = self.columns["bound_words_over_k"] + control_words / np.maximum(1, self.columns["k"])
        over = self.columns["words_over_k_max"] > allowed
        return [number for number in self.grid.done if over[number] and self._point(number)["reducer"] not in EXACT]

    def _point(self, number: int) -> dict:
        return self.grid.points[number]

    def _all_but(self, number: int, *names: str) -> tuple:
        return tuple(value for name, value in self._point(number).items() if name not in names)
