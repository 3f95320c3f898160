"""The gradients of the benchmarks."""

import numpy as np
import pytest

from okrt.perf.synthetic import SyntheticGradient

N = 160_000


def test_reproducible_by_seed() -> None:
    first, again, other = (SyntheticGradient(1000, 1, seed) for seed in (7, 7, 8))
    for step in (0, 1, 5):
        np.testing.assert_array_equal(first(step), again(step))
        assert (first(step) != other(step)).all()


def test_a_step_does_not_depend_on_those_before() -> None:
    straight = SyntheticGradient(1000, 0, 7)
    straight(0)
    np.testing.assert_array_equal(straight(3), SyntheticGradient(1000, 0, 7)(3))


def test_the_same_step_again_is_as_before_whatever_became_of_the_buffer() -> None:
    gradient = SyntheticGradient(1000, 0, 7)
    first = gradient(2)
    kept = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(gradient(2), kept)


def test_new_at_each_step() -> None:
    gradient = SyntheticGradient(N, 0, 7)
    first = gradient(0).copy()
    assert abs(np.corrcoef(first, gradient(1))[0, 1]) < 0.02


@pytest.mark.parametrize("layer", [0, 8, 15])
def test_ranks_agree_by_half(layer: int) -> None:
    part = slice(N * layer // 16, N * (layer + 1) // 16)
    ranks = [SyntheticGradient(N, rank, 7)(3)[part].copy() for rank in range(3)]
    between = np.corrcoef(ranks)[np.triu_indices(3, 1)]
    # 10,000 samples a layer: a standard error of 0.0075.
    np.testing.assert_allclose(between, 0.5, atol=0.04)


def test_layer_scales_fall_from_1_to_a_hundredth() -> None:
    deviations = SyntheticGradient(N, 2, 7)(0).reshape(16, -1).std(axis=1)
    np.testing.assert_allclose(deviations, np.sqrt(2) * 100.0 ** -(np.arange(16) / 15), rtol=0.05)


@pytest.mark.parametrize("elements", [1, 5, 17, 1001])
def test_any_length(elements: int) -> None:
    gradient = SyntheticGradient(elements, 0, 7)(0)
    assert gradient.shape == (elements,)
    assert gradient.dtype == np.float32
    assert (gradient != 0).all()
    assert np.isfinite(gradient).all()
