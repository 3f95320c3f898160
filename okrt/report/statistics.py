"""Medians with intervals, free of any assumption about the distribution."""

import math

import numpy as np


def median_interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % confidence interval, from the order statistics (binomial, normal approximation)."""
    ordered = np.sort(samples)
    n = ordered.size
    half_width = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half_width))
    high = min(n - 1, math.ceil(n / 2 + half_width) - 1)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[max(low, high)])
