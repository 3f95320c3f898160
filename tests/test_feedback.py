import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from okrt.feedback import Residual
from okrt.kernels.host import Host

indexes = st.sets(st.integers(0, 39)).map(lambda chosen: np.array(sorted(chosen), np.int32))


def test_made_at_the_first_step_and_kept():
    residual = Residual(Host())
    assert residual.array is None
    array = residual.of_length(5)
    assert array.dtype == np.float32 and array.tolist() == [0] * 5
    assert residual.of_length(5) is array


@given(indexes, indexes)
def test_only_what_was_sent_and_delivered_is_cleared(sent, delivered):
    residual = Residual(Host())
    residual.of_length(40)[:] = np.arange(1, 41)
    residual.clear_delivered(sent, delivered)
    both = set(sent.tolist()) & set(delivered.tolist())
    assert residual.array.tolist() == [0 if i in both else i + 1 for i in range(40)]


@given(indexes)
def test_keep_adds(index):
    residual = Residual(Host())
    residual.of_length(40)[:] = 1
    residual.keep(index, np.arange(index.size, dtype=np.float32))
    expected = np.ones(40, np.float32)
    expected[index] += np.arange(index.size)
    np.testing.assert_array_equal(residual.array, expected)


@given(indexes, indexes, indexes)
def test_what_was_lost_on_the_way_is_kept(met, kept, delivered):
    residual = Residual(Host())
    residual.of_length(40)[:] = 1
    residual.keep_lost(met, np.full(met.size, 2, np.float32), kept, delivered)
    lost = (set(met.tolist()) & set(delivered.tolist())) - set(kept.tolist())
    assert residual.array.tolist() == [3 if i in lost else 1 for i in range(40)]
