"""Medians with intervals, free of any assumption about the distribution."""

import math

import numpy as np


def median_interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % confidence interval, from the order statistics."""
    ordered = np.sort(samples)
    n = ordered.size
    # Both tails of Binomial(n, 1/2) outside the interval have at most 2.5 %.
    below, low = 0, -1
    while low + 1 < n // 2 and 40 * (below + math.comb(n, low + 1)) <= 2**n:
        low += 1
        below += math.comb(n, low)
    low = max(0, low)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[n - 1 - low])


FEWEST = 6
"""samples with which the smallest and the largest enclose the median in 95 % of all cases"""


def is_within(samples: np.ndarray, share: float) -> bool:
    """Whether the 95 % interval of the median ends within that share of it, to either side."""
    if len(samples) < FEWEST:
        return False
    median, low, high = median_interval(samples)
    return max(median - low, high - median) <= share * median
