"""The step of lag-aware AdamW: the CPU kernel is bit for bit the reference, and the reference the formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from okrt.kernels import cpu, reference

SETTINGS = (1e-2, 0.3, 0.2, 1e-8, 5.0)  # lr, bias1, bias2, eps, cap
B1, B2, DECAY = 0.9, 0.95, 0.99


def table(longest: int) -> np.ndarray:
    lags = np.arange(longest + 1)
    rows = [B1**lags, 1 - B1**lags, B2**lags, 1 - B2**lags, DECAY**lags]
    return np.stack(rows).astype(np.float32)


def case(n: int, share: float, step: int, seed: int):
    rng = np.random.default_rng(seed)
    weight, gradient = rng.standard_normal((2, n)).astype(np.float32)
    moments = np.abs(rng.standard_normal((n, 3))).astype(np.float32)
    moments[:, 2] = rng.integers(0, step, n)
    index = np.flatnonzero(rng.random(n) < share).astype(np.int32)
    return weight, gradient, moments, index


@given(st.integers(0, 300), st.sampled_from([0, 0.02, 0.5, 1]), st.integers(1, 200), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cpu_equals_reference(n, share, step, seed):
    after = []
    for kernels in (cpu, reference):
        weight, gradient, moments, index = case(n, share, step, seed)
        before = weight.copy(), moments.copy()
        v_change = kernels.lag_adamw(weight, gradient, moments, index, table(64), step, *SETTINGS)
        assert v_change == pytest.approx((moments[:, 1].astype(float) - before[1][:, 1]).sum(), abs=1e-9)
        rest = np.setdiff1d(np.arange(n), index)
        assert (weight[rest] == before[0][rest]).all()
        assert (moments[rest] == before[1][rest]).all()
        after.append((weight.tobytes(), moments.tobytes()))
    assert after[0] == after[1]


@given(st.integers(0, 300), st.sampled_from([0, 0.5, 1]), st.sampled_from([0.25, 0.5, 1]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_balance(n, share, power, seed):
    after = []
    for kernels in (cpu, reference):
        weights, residual, moments, index = case(n, share, 5, seed)
        weights = np.abs(weights) + np.float32(0.1)
        gradient = residual.astype(np.float64) / weights
        before = weights.copy()
        kernels.balance(residual, weights, moments, index, 0.01, power)
        expected = (np.sqrt(moments[index, 1].astype(np.float64)) + 0.01) ** -power
        np.testing.assert_allclose(weights[index], expected, rtol=1e-5)
        np.testing.assert_array_equal(np.delete(weights, index), np.delete(before, index))
        np.testing.assert_allclose(residual / weights.astype(np.float64), gradient, rtol=1e-5)
        after.append((weights, residual))
    for ours, theirs in zip(*after, strict=True):
        np.testing.assert_array_max_ulp(ours, theirs, 2)  # powers of NumPy and of the compiler differ in the last bit


@pytest.mark.parametrize("step", [1, 4, 40, 90])
def test_reference_is_the_formula(step):
    weight, gradient, moments, index = case(200, 0.3, step, 5)
    old_weight, old = weight.astype(np.float64), moments.astype(np.float64)
    reference.lag_adamw(weight, gradient, moments, index, table(64), step, *SETTINGS)
    lr, bias1, bias2, eps, cap = SETTINGS
    for i in index:
        lag = step - old[i, 2]
        in_table = min(lag, 64)
        g = gradient[i] / lag
        m = B1**in_table * old[i, 0] + (1 - B1**in_table) * g
        v = B2**in_table * old[i, 1] + (1 - B2**in_table) * g * g
        w = DECAY**in_table * old_weight[i] - lr * min(lag, cap) * (m / bias1) / (np.sqrt(v / bias2) + eps)
        np.testing.assert_allclose([weight[i], *moments[i]], [w, m, v, step], rtol=1e-5, atol=1e-6)
