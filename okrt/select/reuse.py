"""The threshold of the last step, steered to the target in a closed loop: one pass over memory.

The pass runs with a threshold predicted to find a little more than k; the k largest of what it found are then exactly
the top-k, and their smallest magnitude is where the next prediction starts. When the prediction misses (first step, a
jump in scale), the exact threshold is found from a histogram in the same step, so no step is far from its target.
"""

import math
from typing import Any

import numpy as np

from okrt.kernels.bits import threshold_bits
from okrt.select.base import PROBE, Selection, Selector

AIM = 0.08  # candidates wanted beyond k, as a share of k
TOO_FEW = 0.97  # of k: below that the threshold is found anew
DRIFT_DAMPING = 0.8  # thresholds under error feedback rise ever more slowly


class Reuse(Selector):
    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self._last = 0.0  # threshold of the last step; 0 when there is none
        self._predicted = 0.0  # threshold to try in the next step
        self._slope = 1.0  # - d log(count) / d log(threshold)

    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        self._reserve(k, residual.size)
        everything = k >= residual.size
        if self._predicted == 0 and not everything:
            selection = self._top(residual, k, self._accumulate_histogram(residual, gradient))
        else:
            threshold = 1 if everything else threshold_bits(self._predicted)
            found = self._kernels.accumulate_select(residual, gradient, threshold, 0, self._index, self._value)
            if self._has_missed(found, threshold, k):
                selection = self._top(residual, k, self._histogram(residual))
            else:
                selection = self._trimmed(found, k, threshold)
        self._predict(selection, k)
        return selection

    def _has_missed(self, found: int, threshold: int, k: int) -> bool:
        """Whether that many candidates for the top-k are too many or too few."""
        return found > self._index.size or (found < TOO_FEW * k and threshold > 1)

    def _aim(self, k: int) -> float:
        """Candidates wanted, as a share of k: so many that chance leaves at least k of them."""
        return 1 + AIM + 2 / math.sqrt(k)

    def _predict(self, selection: Selection, k: int) -> None:
        """The threshold at which as many as wanted would be found next, from the slope of log count over log
        threshold."""
        size, now = selection.index.size, selection.threshold
        if size < TOO_FEW * k or math.isinf(now):
            # Few enough non-zeros for all to go, or too many sums that no float32 can hold: no threshold to go on from.
            self._last = self._predicted = 0.0
            return
        probed = selection.probed
        if probed is None:
            probed = self._kernels.count(selection.value, threshold_bits(now * PROBE))
        self._slope = max(1.0, math.log(size / max(1, probed)) / math.log(PROBE))
        drift = min(max(math.log(now / self._last), -0.5), 0.5) if self._last else 0.0
        self._last = now
        self._predicted = now * math.exp(DRIFT_DAMPING * drift - math.log(self._aim(k)) / self._slope)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "predicted": self._predicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._predicted = float(state["last"]), float(state["predicted"])
