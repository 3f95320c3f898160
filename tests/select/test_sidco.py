"""SIDCo holds its target whatever the law, by the law where it fits and by correction where it does not."""

import math

import numpy as np
import pytest

from okrt.kernels.host import Host
from okrt.select import SELECTORS
from okrt.select.sidco import ADAPT_EVERY, RIGHT, STAGES, Sidco
from tests.laws import top

SIDCO = [name for name in SELECTORS if name.startswith("sidco")]


def signs(rng, n):
    return rng.choice([-1.0, 1.0], n)


LAWS = {
    "laplace": lambda rng, n: rng.laplace(size=n),
    "normal": lambda rng, n: rng.standard_normal(n),
    "gamma 0.6": lambda rng, n: rng.gamma(0.6, size=n) * signs(rng, n),
    "generalized pareto 0.2": lambda rng, n: (rng.random(n) ** -0.2 - 1) / 0.2 * signs(rng, n),
    "student t 3": lambda rng, n: rng.standard_t(3, n),
    "normal times u**8": lambda rng, n: rng.standard_normal(n) * rng.random(n) ** 8,
    "90 % zeros": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.1),
}
HEAVY = ["gamma 0.6", "generalized pareto 0.2", "normal times u**8"]


class Counting(Host):
    """Counts passes over the whole array beside the fused one."""

    def __init__(self):
        super().__init__()
        self.passes = {"histogram": 0, "select": 0, "exceedances": 0}

    def histogram(self, *arguments):
        self.passes["histogram"] += 1
        super().histogram(*arguments)

    def select(self, *arguments):
        self.passes["select"] += 1
        return super().select(*arguments)

    def exceedances(self, *arguments):
        self.passes["exceedances"] += 1
        return super().exceedances(*arguments)


def steps_of(selector, law, n, k, steps, *, feedback, seed=0):
    """Each step's selection and what it was chosen from."""
    residual, rng = np.zeros(n, np.float32), np.random.default_rng(seed)
    for _ in range(steps):
        if not feedback:
            residual[:] = 0
        selection = selector.select(residual, LAWS[law](rng, n).astype(np.float32), k, k)
        rest = np.delete(residual, selection.index)
        assert np.abs(rest).max() <= np.abs(selection.value).min(initial=np.inf)
        yield selection, residual
        residual[selection.index] = 0


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SIDCO)
def test_achieved_over_target(name, law, feedback):
    for n, density in ((10_000, 0.1), (40_000, 0.01), (100_000, 0.001)):
        selector, k = SELECTORS[name](Host()), math.ceil(density * n)
        for selection, residual in steps_of(selector, law, n, k, 20, feedback=feedback):
            target = min(k, np.count_nonzero(residual))
            assert 0.95 * target <= selection.index.size <= 1.05 * k


@pytest.mark.parametrize("law", LAWS)
def test_most_steps_take_one_pass(law):
    """The law and the stages need some passes at first; then what the fused pass finds is enough."""
    kernels = Counting()
    selector, k = SELECTORS["sidco"](kernels), 2000
    for number, _ in enumerate(steps_of(selector, law, 200_000, k, 40, feedback=True)):
        if number == 24:
            before = dict(kernels.passes)
    assert sum(kernels.passes.values()) - sum(before.values()) <= 2
    assert kernels.passes["histogram"] <= 3


@pytest.mark.parametrize(
    ("name", "law"),
    [
        *(("sidco", law) for law in ("laplace", "gamma 0.6", "generalized pareto 0.2")),
        *(("sidco-exponential", "laplace"), ("sidco-gamma", "gamma 0.6"), ("sidco-pareto", "generalized pareto 0.2")),
    ],
)
def test_a_law_that_fits_needs_no_histogram_from_the_first_step_on(name, law):
    kernels = Counting()
    for _ in steps_of(SELECTORS[name](kernels), law, 300_000, 3000, 4, feedback=False):
        pass
    assert kernels.passes == {"histogram": 0, "select": 1, "exceedances": 0}


@pytest.mark.parametrize("factor", [100, 0.01])
@pytest.mark.parametrize("law", ["laplace", "student t 3", "90 % zeros"])
@pytest.mark.parametrize("name", SIDCO)
def test_a_jump_in_scale_costs_one_more_pass(name, law, factor):
    """The law knows the new scale, and what it was off by before it is off by again."""
    kernels, n, k = Counting(), 100_000, 1000
    selector = SELECTORS[name](kernels)
    for _ in steps_of(selector, law, n, k, 4, feedback=False):
        pass
    before = dict(kernels.passes)
    x = LAWS[law](np.random.default_rng(1), n).astype(np.float32) * np.float32(factor)
    selection = selector.select(np.zeros(n, np.float32), x, k, k)
    assert 0.95 * k <= selection.index.size <= k
    np.testing.assert_array_equal(selection.index, top(x, selection.index.size))
    assert kernels.passes["select"] - before["select"] == 1
    assert kernels.passes["histogram"] == before["histogram"]


@pytest.mark.parametrize("law", HEAVY)
def test_stages_adapt_until_the_law_alone_is_right(law):
    """The exponential law needs stages for heavy tails: it is never stuck where it finds several times the target."""
    selector, k = SELECTORS["sidco-exponential"](Host()), 2000
    first = math.nan
    for number, _ in enumerate(steps_of(selector, law, 200_000, k, ADAPT_EVERY * (STAGES + 2), feedback=False)):
        if number == 0:
            first = math.exp(selector._slope * selector._correction)
    alone = math.exp(selector._slope * selector._correction)
    assert not RIGHT[0] <= first <= RIGHT[1]
    assert selector._stages > 1
    assert abs(math.log(alone)) < 0.5 * abs(math.log(first))


def test_the_location_follows_the_scale():
    """It is not found anew, which takes passes, when gradients grow or fade."""
    n, k, rng = 100_000, 1000, np.random.default_rng(0)
    for growth in (1.03, 0.97):
        kernels = Counting()
        selector = SELECTORS["sidco-exponential"](kernels)
        for _ in steps_of(selector, "normal times u**8", n, k, ADAPT_EVERY * (STAGES + 2), feedback=False):
            pass
        assert selector._stages > 1 and selector._location > 0
        before, location = kernels.passes["exceedances"], selector._location
        for step in range(1, 61):
            x = LAWS["normal times u**8"](rng, n) * growth**step
            selector.select(np.zeros(n, np.float32), x.astype(np.float32), k, k)
        assert kernels.passes["exceedances"] == before
        assert selector._location / location == pytest.approx(growth**60, rel=0.3)


def test_stages_go_back_when_the_data_change():
    selector, k, n = SELECTORS["sidco-exponential"](Host()), 1000, 100_000
    for law in ("normal times u**8", "laplace"):
        for _ in steps_of(selector, law, n, k, ADAPT_EVERY * (STAGES + 3), feedback=False):
            pass
        alone = math.exp(selector._slope * selector._correction)
        assert 0.6 <= alone <= 1.6, law


def test_the_state_is_that_of_one_tensor():
    """Two selectors do not share what they learn."""
    one, two = Sidco(Host()), Sidco(Host())
    fresh = two.state_dict()
    for _ in steps_of(one, "normal times u**8", 20_000, 200, 6, feedback=True):
        pass
    assert two.state_dict() == fresh != one.state_dict()


@pytest.mark.parametrize("name", SIDCO)
@pytest.mark.parametrize("law", ["student t 3", "normal times u**8", "90 % zeros"])
def test_a_restart_goes_on_bit_for_bit(name, law):
    n, k, steps = 20_000, 200, 3 * ADAPT_EVERY
    gradients = [LAWS[law](np.random.default_rng(step), n).astype(np.float32) for step in range(steps)]
    whole, residual = SELECTORS[name](Host()), np.zeros(n, np.float32)
    for step, x in enumerate(gradients):
        if step == ADAPT_EVERY + 2:
            again, copy = SELECTORS[name](Host()), residual.copy()
            again.load_state_dict(whole.state_dict())
        residual[whole.select(residual, x, k, k).index] = 0
        if step >= ADAPT_EVERY + 2:
            copy[again.select(copy, x, k, k).index] = 0
            assert again.state_dict() == whole.state_dict()
            assert copy.tobytes() == residual.tobytes()


@pytest.mark.parametrize("name", SIDCO)
@pytest.mark.parametrize(("large", "small"), [(1.0, 1e-8), (1.0, 1e-38), (3.4e38, 1.0), (3.4e38, 3.3e38)])
def test_two_magnitudes_far_apart_are_no_law_at_all(name, large, small):
    """The law is off by more than any number can say; what is selected is right all the same."""
    n = 20_000
    rng, selector = np.random.default_rng(0), SELECTORS[name](Host())
    for step in range(4 * ADAPT_EVERY + 2):
        x = np.where(rng.random(n) < 0.5, large, small).astype(np.float32)
        k = n // 3 if step % 2 else int(0.45 * n)
        selection = selector.select(np.zeros(n, np.float32), x, k, k)
        assert 0.95 * k <= selection.index.size <= k
        assert (selection.value == np.float32(large)).all()
