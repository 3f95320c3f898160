"""Medians with intervals, against binomial probabilities."""

import math

import numpy as np
import pytest

from okrt.report.statistics import median_interval


def coverage(n: int, low: int, high: int) -> float:
    """How likely the order statistics `low` to `high` (from 0) of n samples enclose the median."""
    return sum(math.comb(n, below) for below in range(low + 1, high + 1)) / 2**n


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([7.0], (7, 7, 7)),
        ([3.0, 1.0], (2, 1, 3)),
        ([5.0, 1.0, 2.0], (2, 1, 5)),
        ([1.0, 2.0, 3.0, 10.0], (2.5, 1, 10)),
        ([4.0] * 9, (4, 4, 4)),
    ],
)
def test_few_samples(samples: list[float], expected: tuple[float, float, float]) -> None:
    assert median_interval(np.array(samples)) == expected


@pytest.mark.parametrize("n", [*range(6, 60), 99, 100, 1000])
def test_interval_is_the_right_pair_of_order_statistics(n: int) -> None:
    ranks = np.random.default_rng(n).permutation(n).astype(float)
    median, low, high = median_interval(ranks)
    assert median == (n - 1) / 2
    assert low + high == n - 1, "as many samples above as below"
    assert coverage(n, int(low), int(high)) >= 0.95
    # One sample less on each side would be too few.
    assert coverage(n, int(low) + 1, int(high) - 1) < 0.95


def test_order_does_not_matter_and_input_is_kept() -> None:
    samples = np.array([3.0, 9.0, 1.0, 4.0, 7.0, 8.0, 2.0])
    before = samples.copy()
    assert median_interval(samples) == median_interval(samples[::-1]) == median_interval(np.sort(samples))
    np.testing.assert_array_equal(samples, before)


@pytest.mark.parametrize("n", [20, 50])
@pytest.mark.parametrize("distribution", ["exponential", "standard_cauchy"])
def test_coverage_on_simulated_data(distribution: str, n: int) -> None:
    true_median = {"exponential": math.log(2), "standard_cauchy": 0.0}[distribution]
    draws = getattr(np.random.default_rng(11), distribution)(size=(4000, n))
    intervals = np.array([median_interval(row) for row in draws])
    inside = np.mean((intervals[:, 1] <= true_median) & (true_median <= intervals[:, 2]))
    # 4000 repetitions: a standard error of 0.0034.
    assert 0.945 < inside < 0.98
