"""The threshold of the last step, steered to the target in a closed loop: one pass over memory.

The pass runs with a threshold predicted to find a little more than k; the k largest of what it found are then exactly
the top-k, and their smallest magnitude is where the next prediction starts. When the prediction misses (first step, a
jump in scale), the exact threshold is found from a histogram in the same step, so no step is far from its target.
"""

import math
from typing import Any

import numpy as np

from okrt.kernels import cpu
from okrt.kernels.bits import threshold_bits, threshold_value
from okrt.select.base import Selection, Selector

AIM = 0.08  # candidates wanted beyond k, as a share of k
TOO_FEW = 0.97  # of k: below that the threshold is found anew


class Reuse(Selector):
    def __init__(self, lanes: Any) -> None:
        super().__init__(lanes)
        self._predicted = 0.0  # threshold for the next step; 0 when there is none

    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        self._reserve(k, residual.size)
        everything = k >= residual.size
        if self._predicted == 0 and not everything:
            selection = self._top(residual, k, self._accumulate_histogram(residual, gradient))
        else:
            threshold = 1 if everything else threshold_bits(self._predicted)
            found = self._lanes.accumulate_select(residual, gradient, threshold, self._index, self._value)
            if found > self._capacity or (found < TOO_FEW * k and threshold > 1):
                selection = self._top(residual, k, self._histogram(residual))
            else:
                selection = self._trimmed(found, k, threshold)
        self._predict(selection, k)
        return selection

    def _predict(self, selection: Selection, k: int) -> None:
        """The threshold that would have found (1 + AIM)k, from the slope of log count over log threshold."""
        size = selection.index.size
        if size < k or size < 2:
            # Few enough non-zeros for all to go: no threshold holds any back.
            self._predicted = 0.0 if size < TOO_FEW * k else selection.threshold * (1 - AIM / 4)
            return
        half = threshold_value(cpu.kth_magnitude(selection.value, -(-size // 2)))
        spread = math.log(half / selection.threshold) if half > selection.threshold else 0.0
        per_log_count = spread / math.log(2)  # how far log threshold moves as the count doubles
        aim = AIM + 2 / math.sqrt(k)
        self._predicted = selection.threshold * math.exp(-per_log_count * math.log1p(aim))

    def state_dict(self) -> dict[str, Any]:
        return {"predicted": self._predicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._predicted = float(state["predicted"])
