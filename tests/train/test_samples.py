"""Every sample once an epoch, whoever asks for which part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from okrt.train.samples import SampleOrder

COUNTS = st.one_of(st.integers(1, 70), st.integers(1, 5000))
SEEDS = st.integers(0, 2**40)


@given(COUNTS, SEEDS, st.integers(0, 1000))
def test_every_number_once_an_epoch(samples: int, seed: int, epoch: int) -> None:
    numbers = SampleOrder(samples, seed)(epoch * samples, samples)
    np.testing.assert_array_equal(np.sort(numbers), np.arange(samples))
    assert numbers.dtype == np.int64


@given(COUNTS, SEEDS, st.data())
def test_any_slice_is_that_of_the_whole(samples: int, seed: int, data: st.DataObject) -> None:
    order = SampleOrder(samples, seed)
    whole = order(0, 3 * samples)
    first = data.draw(st.integers(0, 3 * samples))
    count = data.draw(st.integers(0, 3 * samples - first))
    np.testing.assert_array_equal(order(first, count), whole[first : first + count])


@given(st.integers(50, 5000), SEEDS, st.integers(0, 1000))
def test_another_order_in_every_epoch_and_with_every_seed(samples: int, seed: int, epoch: int) -> None:
    """Of a random permutation hardly a number stays where it was: the mean is one."""
    order = SampleOrder(samples, seed)
    this = order(epoch * samples, samples)
    for other in (
        order((epoch + 1) * samples, samples),
        SampleOrder(samples, seed + 1)(epoch * samples, samples),
        np.arange(samples),
    ):
        assert np.count_nonzero(this == other) < 20


def test_neighbours_do_not_stay_together() -> None:
    numbers = SampleOrder(10_000, 3)(0, 10_000)
    assert np.count_nonzero(np.abs(np.diff(numbers)) < 100) < 400, "some 200 in a random order"
    assert abs(np.corrcoef(np.arange(10_000), numbers)[0, 1]) < 0.05


@pytest.mark.parametrize("first", [0, 10**15])
def test_a_part_of_a_large_set_costs_its_own_length(first: int) -> None:
    numbers = SampleOrder(10**12, 0)(first, 1000)
    assert np.unique(numbers).size == 1000
    assert numbers.min() >= 0
    assert numbers.max() < 10**12
