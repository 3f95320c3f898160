"""SIDCo (MLSys'21): the threshold of a distribution that is fitted to the magnitudes, corrected in log space.

The pass that adds and selects also takes the moments of what the magnitudes exceed a location by. The law says where
the threshold for k lies; the exact one of each step says how far the law is off, and the next thresholds are corrected
by as much. The law is right about scale: when a jump makes the prediction miss, its threshold for the new moments is a
good one, corrected or not, and costs one more pass. Where it misses too, a histogram finds the exact one, so no step is
far from its target, whatever the data.

The location is zero with one stage. With more it is where the stages before the last have led: the threshold for the
share FIRST_SHARE of all elements, then for shares that fall in equal steps to that of k. It is moved at each step to
where the last one saw it, so that a stage costs no pass of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from okrt.kernels.bits import threshold_bits
from okrt.select.base import Selection
from okrt.select.laws import Fit, Law, exponential, fitting, gamma, pareto
from okrt.select.reuse import Reuse

FIRST_SHARE = 0.25
STAGES = 4  # at most
ADAPT_EVERY = 5  # steps
RIGHT = (0.8, 1.2)  # found by the law alone, over target: outside of it another number of stages is tried
MISPLACED = 3.0  # times as many or as few elements above the location as intended: it is found anew
NOTHING = 2**31 - 1  # a threshold that no number reaches


UNKNOWN = -1.0


class Sidco(Reuse):
    """Takes the law that the moments speak for; subclasses have one for the first stage and one for those after it."""

    laws: Sequence[Law] = ()

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self._correction = 0.0  # logarithm of the right threshold over that of the law
        self._stages = 1
        self._location = 0.0
        self._planned = 0.0  # elements that are to be above the location
        self._misfits = [UNKNOWN] * STAGES  # by number of stages: how far off the law alone was when it was last tried
        self._steps = 0

    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        self._reserve(k, residual.size)
        everything, is_new = k >= residual.size, self._predicted == 0
        threshold = 1 if everything else NOTHING if is_new else threshold_bits(self._predicted)
        found, *sums = self._kernels.accumulate_select_exceedances(
            residual, gradient, threshold, 0, self._index, self._value, self._location
        )
        if everything:
            return self._selection(found, threshold)
        fit = self._placed(residual, Fit.of(self._location, *sums), k)
        if (is_new or self._has_missed(found, threshold, k)) and fit.is_finite:
            threshold = threshold_bits(self._level(fit, self._aim(k) * k) * math.exp(self._correction))
            found = self._kernels.select(residual, threshold, 0, self._index, self._value)
        if self._has_missed(found, threshold, k):
            selection = self._top(residual, k, self._histogram(residual))
        else:
            selection = self._trimmed(found, k, threshold)
        self._predict(selection, k)
        if self._predicted and fit.is_finite:
            self._learn(selection.threshold, fit, k)
        return selection

    def _law(self, fit: Fit) -> Law:
        return self.laws[fit.location > 0] if self.laws else fitting(fit)

    def _level(self, fit: Fit, wanted: float) -> float:
        """The magnitude that as many as wanted reach by the law."""
        share = wanted / max(1, fit.count)
        return fit.location + (self._law(fit)(fit, share) if share < 1 else 0.0)

    def _placed(self, residual: np.ndarray, fit: Fit, k: int) -> Fit:
        """The fit, if its location is about where it is to be; else one for which it has been found anew, in stages."""
        off = fit.count / self._planned if self._planned and fit.count else math.inf
        if not fit.is_finite or (1 / MISPLACED < off < MISPLACED and (fit.location == 0 or fit.count > 2 * k)):
            return fit
        if fit.location > 0:
            fit = self._fit_above(residual, 0.0)
        self._planned = float(fit.count)
        falling = (k / max(1.0, FIRST_SHARE * fit.count)) ** (1 / max(1, self._stages - 1))
        plans = [FIRST_SHARE * fit.count * falling**stage for stage in range(self._stages - 1)]
        for planned in plans if falling < 1 else ():
            above = self._fit_above(residual, self._level(fit, planned))
            if above.count <= 2 * k:
                break
            fit, self._planned = above, planned
        self._location = fit.location
        return fit

    def _fit_above(self, residual: np.ndarray, location: float) -> Fit:
        location = as_float32(location)
        return Fit.of(location, *self._kernels.exceedances(residual, location))

    def _learn(self, threshold: float, fit: Fit, k: int) -> None:
        """How far the law is off, where the location moves to, and whether other stages may do better."""
        level = self._level(fit, k)
        self._correction = math.log(threshold / level) if level > 0 else 0.0
        if self._location > 0:
            # Behind the location magnitudes thin out about as those of an exponential law with the mean seen there.
            moved = self._location + fit.mean * math.log(fit.count / self._planned)
            self._location = as_float32(min(max(moved, self._location / 2), self._location * 2))
        self._steps += 1
        if self._steps % ADAPT_EVERY == 0:
            self._adapt(self._slope * self._correction)

    def _adapt(self, log_found_over_target: float) -> None:
        """Tries all numbers of stages while the law alone is not right with any, and stays with the best of them."""
        self._misfits[self._stages - 1] = abs(log_found_over_target)
        if math.log(RIGHT[0]) <= log_found_over_target <= math.log(RIGHT[1]):
            return
        if UNKNOWN in self._misfits:
            best = self._misfits.index(UNKNOWN) + 1
        else:
            best = self._misfits.index(min(self._misfits)) + 1
        if best != self._stages:
            self._stages, self._planned = best, 0.0

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, f"_{name}") for name in ("correction", "stages", "location", "planned", "steps")}
        return super().state_dict() | own | {f"misfit_{stage}": misfit for stage, misfit in enumerate(self._misfits, 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._correction, self._location = float(state["correction"]), float(state["location"])
        self._planned = float(state["planned"])
        self._stages, self._steps = int(state["stages"]), int(state["steps"])
        self._misfits = [float(state[f"misfit_{stage}"]) for stage in range(1, STAGES + 1)]


def as_float32(number: float) -> float:
    """The nearest that is not infinite."""
    return float(np.float32(min(number, float(np.finfo(np.float32).max))))


class SidcoExponential(Sidco):
    laws = (exponential, exponential)


class SidcoGamma(Sidco):
    """What exceeds a high threshold of a gamma law follows a generalized Pareto law about."""

    laws = (gamma, pareto)


class SidcoPareto(Sidco):
    laws = (pareto, pareto)
