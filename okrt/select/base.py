"""What every selector shares: the buffers of candidates and the exact top-k of an accumulator."""

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.kernels.bits import COARSE_BINS, COARSE_SHIFT, threshold_value

PROBE = 1.0625  # the count above the threshold times this tells the slope of the distribution there


@dataclass(frozen=True)
class Selection:
    """Chosen entries in index order: views into the selector's buffers, good until its next call."""

    index: Any
    value: Any
    threshold: float
    probed: int | None = None
    """how many reach PROBE times the threshold, if that was counted"""


class Selector(abc.ABC):
    """Adds a gradient to the residual and chooses what to send of the sum."""

    def __init__(self, kernels: Any) -> None:
        self.move_to(kernels)

    def move_to(self, kernels: Any) -> None:
        """Works with these kernels (Host or Device) and their arrays from now on."""
        self._kernels = kernels
        self._index = kernels.empty(0, np.int32)
        self._value = kernels.empty(0, np.float32)

    @abc.abstractmethod
    def select(self, residual: np.ndarray, gradient: np.ndarray, k: int, cap: int) -> Selection:
        """residual += gradient; about k (never more than cap) of its entries, the largest, zeros never."""

    def state_dict(self) -> dict[str, Any]:
        """What the next call depends on; most selectors start anew at every step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"{type(self).__name__} has no state"

    def _reserve(self, k: int, n: int) -> None:
        capacity = min(n, k + k // 2 + 1024)
        if self._index.size != capacity:
            self._index = self._kernels.empty(capacity, np.int32)
            self._value = self._kernels.empty(capacity, np.float32)

    def _selection(self, found: int, threshold: int, probed: int | None = None) -> Selection:
        return Selection(self._index[:found], self._value[:found], threshold_value(threshold), probed)

    def _trimmed(self, found: int, k: int, threshold: int) -> Selection:
        """The k largest of the found candidates; of equals those of lowest index."""
        if found <= k:
            return self._selection(found, threshold)
        threshold, probed = self._kernels.cut_to_top(self._index[:found], self._value[:found], k, PROBE)
        return self._selection(k, threshold, probed)

    def _top(self, values: np.ndarray, k: int, counts: np.ndarray) -> Selection:
        """The exact top-k of `values`, given their coarse histogram."""
        at_least = np.cumsum(counts[::-1])[::-1]
        # Bin 0 holds the zeros: whatever reaches no other bin is smaller than any number worth sending.
        edge = int(np.count_nonzero(at_least[1:] >= k)) << COARSE_SHIFT
        threshold = max(1, edge)
        found = self._kernels.select(values, threshold, 0, self._index, self._value)
        if found > self._index.size:
            threshold = self._kernels.kth_magnitude(values, k)
            ties = k - self._kernels.count(values, threshold + 1)
            found = self._kernels.select_top(values, threshold, ties, self._index, self._value)
            return self._selection(found, threshold)
        return self._trimmed(found, k, threshold)

    def _accumulate_histogram(self, residual: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        counts = np.zeros(COARSE_BINS, np.int64)
        self._kernels.accumulate_histogram(residual, gradient, 0, COARSE_SHIFT, counts)
        return counts

    def _histogram(self, residual: np.ndarray) -> np.ndarray:
        counts = np.zeros(COARSE_BINS, np.int64)
        self._kernels.histogram(residual, 0, COARSE_SHIFT, counts)
        return counts
