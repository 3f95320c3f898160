"""Medians with intervals, free of any assumption about the distribution."""

import numpy as np

TAIL = 0.025
FEWEST = 6
"""samples with which the smallest and the largest enclose the median in 95 % of all cases"""


def median_interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % confidence interval, from the order statistics."""
    ordered = np.sort(samples)
    n = ordered.size
    # Both tails of Binomial(n, 1/2) outside the interval have at most 2.5 %.
    log_factorial = np.append(0.0, np.cumsum(np.log(np.arange(1, n + 1))))
    below = np.arange(n // 2)
    chance = np.exp(log_factorial[n] - log_factorial[below] - log_factorial[n - below] - n * np.log(2))
    low = max(0, int(np.searchsorted(np.cumsum(chance), TAIL, side="right")) - 1)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[n - 1 - low])


def is_within(samples: np.ndarray, share: float) -> bool:
    """Whether the 95 % interval of the median ends within that share of it, to either side."""
    if len(samples) < FEWEST:
        return False
    median, low, high = median_interval(samples)
    return max(median - low, high - median) <= share * median
