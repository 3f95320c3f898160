"""The exact top-k, found anew at every step: one pass to add and count by magnitude, one to collect."""

import numpy as np

from okrt.select.base import Selection, Selector


class Exact(Selector):
    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        self._reserve(k, residual.size)
        return self._top(residual, k, self._accumulate_histogram(residual, gradient))
