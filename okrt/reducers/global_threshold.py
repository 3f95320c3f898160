"""The magnitude that k of the summed entries of all ranks reach, found together by all ranks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from okrt.kernels.bits import MAGNITUDE_BITS, threshold_bits, threshold_value
from okrt.transport import Transport
from okrt.transport.ledger import log2_ceil

# Every step counts above a few thresholds around the predicted one: those expected to be reached by these shares of k.
FINE_GRID = (2.0, 1.5, 1.25, 1.1, 1.0, 0.85, 0.6)
COARSE_GRID = (1.5, 1.1, 0.75)
FINE_GRID_SHARE = 0.06  # of k: the words that the fine grid may cost
ACCEPT = (0.97, 1.15)  # shares of k that are near enough where the grid does not enclose k
DRIFT_DAMPING = 0.8  # thresholds under error feedback rise ever more slowly
# Bins and rounds of a search from scratch, to about a percent of magnitude; the first that can be afforded is used.
SEARCHES = ((128, 2), (32, 3), (16, 4), (8, 5), (8, 3))
RESOLUTION = 1 / 64


class GlobalThreshold:
    """Predicts the threshold from the last steps; when the prediction misses, searches with histograms."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._last = 0.0  # the threshold that k sums reached in the last step; 0 when not known
        self._drift = 0.0  # change of its logarithm in a step
        self._slope = 4.0  # - d log(count) / d log(threshold)

    def candidates(self, kernels: Any, total: Any, k: int, spare_words: Callable[[], int]) -> np.ndarray:
        """How many sums of each rank are to be looked at for the top-k: about k in all, or all if there are no more.

        `total` are this rank's sums, where the kernels work; spare_words() tells how many words every rank may still
        receive for a search.
        """
        predicted = self._last > 0
        thresholds = self._predicted(k) if predicted else self._searched(kernels, total, k, spare_words()) or [1]
        table = self._count(kernels, total, thresholds)
        if int(table[:, 0].sum()) <= k:
            self._last, self._drift = threshold_value(1), 0.0
            return table[:, 0]
        reached = table[:, 1:].sum(axis=0)
        if predicted and not (reached[0] >= ACCEPT[0] * k and reached[-1] <= ACCEPT[1] * k):
            found = self._searched(kernels, total, k, spare_words())
            if found:
                thresholds = found
                table = self._count(kernels, total, thresholds)
                reached = table[:, 1:].sum(axis=0)
        chosen = max(0, int(np.count_nonzero(reached >= k)) - 1)
        self._learn(thresholds, reached, chosen, k)
        return table[:, 1 + chosen]

    def _count(self, kernels: Any, total: Any, thresholds: list[int]) -> np.ndarray:
        """A row for each rank: all its sums but zeros, and those that reach each threshold."""
        counts = kernels.counts(total, (1, *thresholds))
        return self._transport.allgather(counts.astype(np.int32)).astype(np.int64)

    def _predicted(self, k: int) -> list[int]:
        """Ascending thresholds around the expected one."""
        fine = (len(FINE_GRID) + 1) * (self._transport.size - 1) <= FINE_GRID_SHARE * k
        centre = math.log(self._last) + DRIFT_DAMPING * self._drift
        shares = FINE_GRID if fine else COARSE_GRID
        return [threshold_bits(math.exp(centre - math.log(share) / self._slope)) for share in shares]

    def _searched(self, kernels: Any, total: Any, k: int, spare_words: int) -> list[int]:
        """A threshold that k sums reach, and one slightly above, from histograms each inside one bin of the last.

        Empty if there are too few words for it.
        """
        for bins, rounds in SEARCHES:
            if bins * rounds * log2_ceil(self._transport.size) <= spare_words:
                break
        else:
            return []
        low, shift, wanted = 0, MAGNITUDE_BITS, k
        for _ in range(rounds):
            shift -= bins.bit_length() - 1
            counts = np.zeros(bins, np.int64)
            kernels.histogram(total, low, shift, counts)
            summed = counts.astype(np.int32)
            self._transport.allreduce(summed, "sum")
            at_least = np.cumsum(summed[::-1], dtype=np.int64)[::-1]
            if at_least[0] < wanted:
                break
            chosen = int(np.count_nonzero(at_least >= wanted)) - 1
            wanted -= int(at_least[chosen] - summed[chosen])
            low += chosen << shift
        found = max(1, low)
        return [found, threshold_bits(threshold_value(found) * (1 + RESOLUTION))]

    def _learn(self, thresholds: list[int], reached: np.ndarray, chosen: int, k: int) -> None:
        """Interpolates the threshold that exactly k reach, and sees how it has moved."""
        log_threshold = math.log(threshold_value(thresholds[chosen]))
        step = math.inf
        if chosen + 1 < len(thresholds):
            step = math.log(threshold_value(thresholds[chosen + 1])) - log_threshold
            fall = math.log(max(1, int(reached[chosen])) / max(1, int(reached[chosen + 1])))
            if step > 0:
                self._slope = min(max(fall / step, 1.0), 40.0)
        now = log_threshold + min(step, math.log(max(1, int(reached[chosen])) / k) / self._slope)
        self._drift = min(max(now - math.log(self._last), -0.5), 0.5) if self._last else 0.0
        self._last = math.exp(now)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "drift": self._drift, "slope": self._slope}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._drift, self._slope = (float(state[key]) for key in ("last", "drift", "slope"))
