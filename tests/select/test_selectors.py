"""Selectors against a sort of the accumulator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from okrt.kernels.bits import narrow
from okrt.kernels.host import Host
from okrt.select import SELECTORS
from tests.laws import LAWS, STEADY, gradient, top

each_selector = pytest.mark.parametrize("name", SELECTORS)


def make(name, threads=1):
    return SELECTORS[name](Host(threads))


def deliver(residual, selection):
    """As if all that was selected had been sent."""
    residual[selection.index] = 0


def check(selection, accumulated, cap):
    """Sorted indexes, their values, no zeros, no more than the cap, nothing that is smaller than what stays."""
    index = selection.index
    assert index.dtype == np.int32 and selection.value.dtype == np.float32
    assert (np.diff(index) > 0).all()
    assert index.size <= cap
    np.testing.assert_array_equal(selection.value, accumulated[index])
    assert (selection.value != 0).all()
    rest = np.abs(np.delete(accumulated, index))
    if index.size:
        smallest = np.abs(selection.value).min()
        assert selection.threshold <= smallest
        assert (rest <= smallest).all()
    if index.size < cap:
        assert (rest < selection.threshold).all()


@each_selector
@pytest.mark.parametrize("law", LAWS)
def test_any_law(name, law):
    selector, n, k = make(name), 3000, 60
    residual = np.zeros(n, np.float32)
    for step in range(6):
        x = gradient(law, n, 1, 4, step)
        accumulated = residual + x
        selection = selector.select(residual, x, k, k)
        np.testing.assert_array_equal(residual, accumulated)
        check(selection, accumulated, k)
        assert selection.index.size >= min(0.75 * k, np.count_nonzero(accumulated))
        if name == "exact":
            np.testing.assert_array_equal(selection.index, top(accumulated, k))
        deliver(residual, selection)


@each_selector
@settings(max_examples=40)
@given(
    law=st.sampled_from(sorted(LAWS)),
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    bits_type=st.sampled_from([np.float32, np.uint16, np.int16]),
    seed=st.integers(0, 99),
)
def test_anything(name, law, n, share, bits_type, seed):
    k = max(1, int(share * n))
    selector, residual = make(name), np.zeros(n, np.float32)
    for step in range(3):
        x = narrow(gradient(law, n, 0, 2, step, seed), np.dtype(bits_type))
        selection = selector.select(residual, x, k, k)
        check(selection, residual.copy(), k)
        if name == "exact" or k == n:
            np.testing.assert_array_equal(selection.index, top(residual, k))
        deliver(residual, selection)


@each_selector
def test_ties_go_to_the_lowest_index(name):
    residual = np.zeros(2000, np.float32)
    selection = make(name).select(residual, np.full(2000, -2, np.float32), 7, 7)
    assert selection.index.tolist() == list(range(7))
    assert selection.threshold == 2


@each_selector
def test_many_ties_below_some_larger(name):
    x = np.ones(50_000, np.float32)
    x[[5, 40_000, 49_999]] = [3, -4, 5]
    residual = np.zeros_like(x)
    selection = make(name).select(residual, x, 10, 10)
    assert selection.index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 40_000, 49_999]


@each_selector
@pytest.mark.parametrize("values", [[0.0], [-0.0, 0.0], [0.0] * 9 + [1e-45], [1e-45] * 4, [3.4e38, -3.4e38, 0.0, 1.0]])
def test_tiny_arrays_and_extreme_values(name, values):
    x = np.array(values, np.float32)
    selector = make(name)
    for k in range(1, x.size + 1):
        residual = np.zeros_like(x)
        selection = selector.select(residual, x, k, k)
        np.testing.assert_array_equal(selection.index, top(x, k))


@each_selector
def test_sums_beyond_float32_are_sent_and_forgotten(name):
    """More of them than go in one step."""
    n, k, selector = 1000, 10, make(name)
    residual = np.zeros(n, np.float32)
    for step in range(8):
        x = gradient("normal", n, 0, 1, step)
        if step in (2, 3):
            x[:15] = 3e38
        with np.errstate(over="ignore"):
            selection = selector.select(residual, x, k, k)
        if step == 2:
            continue  # not delivered, so that they add up
        assert selection.index.size >= 0.75 * k
        np.testing.assert_array_equal(selection.index, top(residual, selection.index.size))
        deliver(residual, selection)
    assert np.isfinite(residual).all()
    assert all(np.isfinite(value) for value in selector.state_dict().values())


@pytest.mark.parametrize("law", STEADY)
def test_reuse_finds_the_exact_top_in_one_pass(law):
    """From the second step on hardly a step looks for its threshold anew, and counts are within 5 % of k."""
    n, k, passes = 50_000, 1000, []
    selector = make("reuse")
    histogram = selector._kernels.histogram
    selector._kernels.histogram = lambda *args: passes.append(1) or histogram(*args)
    residual = np.zeros(n, np.float32)
    exact = 0
    for step in range(20):
        x = gradient(law, n, 0, 1, step)
        selection = selector.select(residual, x, k, k)
        assert selection.index.size <= k
        expected = top(residual, selection.index.size)
        np.testing.assert_array_equal(selection.index, expected)
        exact += selection.index.size == k
        if step >= 3:
            assert selection.index.size >= 0.95 * k
        deliver(residual, selection)
    assert exact >= 15
    assert len(passes) <= 3


@pytest.mark.parametrize("scale", [100, 0.01, 1e6, 1e-6])
def test_reuse_recovers_in_the_same_step(scale):
    selector, n, k = make("reuse"), 20_000, 400
    for step in range(12):
        x = gradient("laplace", n, 0, 1, step) * np.float32(scale if step >= 6 else 1)
        residual = np.zeros(n, np.float32)
        selection = selector.select(residual, x, k, k)
        assert 0.95 * k <= selection.index.size <= k
        np.testing.assert_array_equal(selection.index, top(x, selection.index.size))


def test_reuse_after_nothing_and_after_few():
    selector, n, k = make("reuse"), 5000, 100
    for law in ("normal", "zero", "single", "normal", "equal", "normal"):
        x = gradient(law, n, 0, 1, 0)
        selection = selector.select(np.zeros(n, np.float32), x, k, k)
        assert selection.index.size >= min(0.95 * k, np.count_nonzero(x))


@pytest.mark.parametrize("k", [10, 200, 4000])
def test_gaussian_on_normal_data(k):
    n, selector = 40_000, make("gaussian")
    for step in range(4):
        x = gradient("normal", n, 0, 1, step)
        selection = selector.select(np.zeros(n, np.float32), x, k, k + k // 4)
        assert 0.75 * k <= selection.index.size <= 1.25 * k
        check(selection, x, k + k // 4)


@each_selector
@pytest.mark.parametrize("law", ["layers", "ties", "heavy"])
def test_two_threads_select_the_same(name, law):
    n, k = 2**18 + 4099, 900
    one, two = make(name, 1), make(name, 2)
    residuals = np.zeros((2, n), np.float32)
    for step in range(3):
        x = gradient(law, n, 0, 1, step)
        first, second = (s.select(r, x, k, k) for s, r in zip((one, two), residuals, strict=True))
        np.testing.assert_array_equal(first.index, second.index)
        assert first.value.tobytes() == second.value.tobytes()
        assert first.threshold == second.threshold
        assert residuals[0].tobytes() == residuals[1].tobytes()
        deliver(residuals[0], first)
        deliver(residuals[1], second)


@each_selector
def test_state_continues(name):
    n, k = 5000, 100
    whole, residual = make(name), np.zeros(n, np.float32)
    for step in range(6):
        if step == 3:
            resumed, copy = make(name), residual.copy()
            resumed.load_state_dict(whole.state_dict())
        x = gradient("layers", n, 0, 1, step)
        selection = whole.select(residual, x, k, k)
        if step >= 3:
            again = resumed.select(copy, x, k, k)
            np.testing.assert_array_equal(again.index, selection.index)
            deliver(copy, again)
        deliver(residual, selection)
    assert resumed.state_dict() == whole.state_dict()
