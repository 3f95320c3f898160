"""The threshold of a normal distribution with the mean and deviation of the accumulator, corrected by counting."""

import statistics

import numpy as np

from okrt.kernels.bits import threshold_bits
from okrt.select.base import Selection, Selector

TRIES = 20
STEP = 0.02


class Gaussian(Selector):
    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        self._reserve(max(k, cap), residual.size)
        self._kernels.accumulate(residual, gradient)
        threshold = self._threshold(residual, k)
        if threshold is None:
            # Nothing like a normal distribution (all equal, a few outliers): the count would never come near k.
            return self._top(residual, k, self._histogram(residual))
        found = self._kernels.select(residual, threshold, 0, self._index, self._value)
        return self._trimmed(found, cap, threshold)

    def _threshold(self, values: np.ndarray, k: int) -> int | None:
        """A threshold that 3k/4 to 5k/4 entries reach; None if 20 corrections do not lead to one."""
        if k >= values.size:
            return 1
        total, squares = self._kernels.moments(values)
        mean = total / values.size
        deviation = max(0.0, squares / values.size - mean * mean) ** 0.5
        quantile = statistics.NormalDist().inv_cdf(1 - k / values.size / 2)
        threshold = abs(mean) + quantile * deviation
        for _ in range(TRIES):
            found = self._kernels.count(values, threshold_bits(threshold))
            if 0.75 * k <= found <= 1.25 * k:
                return threshold_bits(threshold)
            threshold *= 1 + STEP if found > k else 1 - STEP
        return None
