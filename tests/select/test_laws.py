"""The quantiles of the laws against SciPy's distributions and against large samples."""

import math

import numpy as np
import pytest
from scipy import stats

from okrt.kernels.host import Host
from okrt.select.laws import Fit, exponential, fitting, gamma, gamma_shape, pareto, pareto_shape

SHARES = (0.5, 0.1, 0.01, 0.001)


def fit_of(distribution):
    """The exact moments of a distribution."""
    mean_log = distribution.expect(np.log, limit=500)
    return Fit(0.0, 10**6, distribution.mean(), distribution.var(), mean_log)


@pytest.mark.parametrize("share", SHARES)
def test_exponential(share):
    assert exponential(fit_of(stats.expon(scale=3)), share) == pytest.approx(stats.expon(scale=3).isf(share))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", [0.4, 0.6, 1, 3])
def test_gamma(shape, share):
    """The closed form of the shape is within 1.5 % of the maximum likelihood, and that moves quantiles little more."""
    law = stats.gamma(shape, scale=2)
    fit = fit_of(law)
    assert gamma_shape(fit.log_gap) == pytest.approx(shape, rel=0.015)
    assert gamma(fit, share) == pytest.approx(law.isf(share), rel=0.02)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", [-0.4, -1e-9, 0, 1e-9, 0.2, 0.4])
def test_pareto(shape, share):
    law = stats.genpareto(shape, scale=2)
    spread = law.var() / law.mean() ** 2
    assert pareto_shape(spread) == pytest.approx(shape, abs=1e-6)
    assert pareto(Fit(0, 10**6, law.mean(), law.var(), 0), share) == pytest.approx(law.isf(share), rel=1e-4)


def test_moments_of_a_sample():
    """From the sums of the kernel, above zero and above a location."""
    values = np.random.default_rng(0).gamma(0.6, size=50_000).astype(np.float32)
    values[::3] *= -1
    for location in (0.0, 0.5):
        excess = np.abs(values).astype(np.float64) - location
        excess = excess[excess > 0]
        fit = Fit.of(location, *Host().exceedances(values, location))
        assert (fit.location, fit.count) == (location, excess.size)
        assert fit.mean == pytest.approx(excess.mean(), rel=1e-5)
        assert fit.variance == pytest.approx(excess.var(), rel=1e-5)
        assert fit.mean_log == pytest.approx(np.log(excess).mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("distribution", "law"),
    [
        *((stats.gamma(shape), gamma) for shape in (0.4, 0.6, 3)),
        *((stats.genpareto(shape), pareto) for shape in (-0.4, 0.2, 0.3)),
    ],
)
def test_the_law_that_the_moments_speak_for(distribution, law):
    assert fitting(fit_of(distribution)) is law


@pytest.mark.parametrize("law", [exponential, gamma, pareto])
@pytest.mark.parametrize("values", [[2.0] * 9, [1e-38, 1e-38], [3e38] * 5, [1.0], [1e-45]])
def test_numbers_that_are_all_equal_have_a_finite_threshold(law, values):
    fit = Fit.of(0.0, *Host().exceedances(np.array(values, np.float32), 0.0))
    for share in (0.1, 0.9):
        assert 0 < law(fit, share) < math.inf
    assert fitting(fit)(fit, 0.1) == pytest.approx(values[0], rel=1e-6)


@pytest.mark.parametrize(("share", "achieved"), [(0.1, 1.000), (0.01, 0.998), (0.001, 0.999)])
def test_exponential_on_laplace_data(share, achieved):
    """The figures of the paper's method on 10M values, here on fewer."""
    values = np.random.default_rng(1).laplace(size=2_000_000).astype(np.float32)
    fit = Fit.of(0.0, *Host().exceedances(values, 0.0))
    found = np.count_nonzero(np.abs(values) >= exponential(fit, share))
    assert found / (share * values.size) == pytest.approx(achieved, abs=4 / math.sqrt(share * values.size))
