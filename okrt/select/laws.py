"""Distributions that are fitted to magnitudes above a location, and the quantiles of what exceeds it (SIDCo)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

EULER_GAMMA = 0.5772156649015329
NEAR_ZERO = 1e-6  # a shape this near to zero is that of the exponential law


@dataclass(frozen=True)
class Fit:
    """What is known of the numbers that magnitudes exceed a location by."""

    location: float
    count: int
    mean: float
    variance: float
    mean_log: float

    @staticmethod
    def of(location: float, count: int, total: float, squares: float, mantissa: float, exponent: int) -> "Fit":
        """From what the kernel `exceedances` gives."""
        mean = total / max(1, count)
        variance = max(0.0, squares / max(1, count) - mean * mean)
        mean_log = (math.log(mantissa) + exponent * math.log(2)) / max(1, count)
        return Fit(location, count, mean, variance, mean_log)

    @property
    def is_finite(self) -> bool:
        """Not where there are sums that no float32 can hold: no law knows those."""
        return math.isfinite(self.mean)

    @property
    def spread(self) -> float:
        """Variance over the square of the mean: 1 for the exponential law, 0 for numbers that are all equal."""
        return self.variance / self.mean**2 if self.mean > 0 else 0.0

    @property
    def log_gap(self) -> float:
        """Logarithm of the mean less mean of the logarithms: Euler's constant for the exponential law."""
        return max(0.0, math.log(self.mean) - self.mean_log) if self.mean > 0 else 0.0


Law = Callable[[Fit, float], float]
"""the number that a share (0 to 1) of the exceedances reaches"""


def exponential(fit: Fit, share: float) -> float:
    return -fit.mean * math.log(share)


def gamma(fit: Fit, share: float) -> float:
    from scipy.special import gammainccinv

    shape = gamma_shape(fit.log_gap)
    return fit.mean if math.isinf(shape) else float(gammainccinv(shape, share)) * fit.mean / shape


def gamma_shape(log_gap: float) -> float:
    """By maximum likelihood, in Minka's closed form; infinite for numbers that are all equal."""
    if log_gap < NEAR_ZERO:
        return math.inf
    return (3 - log_gap + math.sqrt((log_gap - 3) ** 2 + 24 * log_gap)) / (12 * log_gap)


def pareto(fit: Fit, share: float) -> float:
    """The generalized Pareto law by moments."""
    if fit.spread < NEAR_ZERO:
        return fit.mean
    shape, scale = pareto_shape(fit.spread), fit.mean * (1 / fit.spread + 1) / 2
    if abs(shape) < NEAR_ZERO:
        return -scale * math.log(share)
    return scale / shape * math.expm1(-shape * math.log(share))


def pareto_shape(spread: float) -> float:
    return (1 - 1 / spread) / 2


def fitting(fit: Fit) -> Law:
    """The law that the moments speak for: of gamma and generalized Pareto laws with the same mean and spread, the one
    whose logarithms are nearer to those seen. The exponential law is the one that both have in common."""
    from scipy.special import digamma

    if fit.spread < NEAR_ZERO or fit.log_gap < NEAR_ZERO:
        return pareto
    log_gap_of_gamma = math.log(1 / fit.spread) - float(digamma(1 / fit.spread))
    shape = pareto_shape(fit.spread)
    log_gap_of_pareto = EULER_GAMMA
    if abs(shape) > NEAR_ZERO:
        # A power of a beta or beta prime variable, of which the mean of the logarithms is known; with a mean of 1.
        rest = digamma(1 / shape) if shape > 0 else digamma(1 - 1 / shape)
        scale = (1 / fit.spread + 1) / 2
        log_gap_of_pareto = EULER_GAMMA + float(rest) - math.log(scale / abs(shape))
    is_gamma = abs(fit.log_gap - log_gap_of_gamma) < abs(fit.log_gap - log_gap_of_pareto)
    return gamma if is_gamma else pareto
