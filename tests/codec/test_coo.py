import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from okrt.codec import Coo, codec
from okrt.errors import MessageError
from okrt.kernels.host import Host


def no_space(length):
    raise AssertionError("coordinates are read where they are")


@given(
    hnp.arrays(np.int32, st.integers(0, 50), elements=st.integers(0, 2**31 - 1), unique=True),
    st.integers(0, 2**32 - 1),
    st.integers(0, 9),
)
def test_round_trip(index, seed, spare):
    value = np.random.default_rng(seed).integers(0, 2**32, index.size, dtype=np.uint32).view(np.float32)
    out = np.full(2 * index.size + spare, -7, np.int32)
    message = Coo().encode(index, value, out)
    assert message.size == Coo().room(index.size) == 2 * index.size
    assert (out[message.size :] == -7).all()
    assert Coo().entries(message, 0) == index.size
    index_back, value_back = Coo().decode(message, index.size, True, no_space)
    np.testing.assert_array_equal(index_back, index)
    assert value_back.tobytes() == value.tobytes()


def test_layout():
    """Indexes, then values, as little as two words an entry; decoding makes no copy."""
    message = Coo().encode(np.array([3, 2**24 + 1], np.int32), np.array([1.0, -2.0], np.float32), np.empty(4, np.int32))
    assert message.tolist() == [3, 2**24 + 1, 0x3F800000, 0xC0000000 - 2**32]
    index, value = Coo().decode(message, 2, True, no_space)
    assert np.shares_memory(index, message) and np.shares_memory(value, message)
    assert (index.dtype, value.dtype) == (np.int32, np.float32)


def test_indexes_alone():
    index = np.array([3, 8, 2**24 + 1], np.int32)
    message = Coo().encode(index, None, np.empty(9, np.int32))
    assert message.size == Coo().room(3, has_values=False) == Coo().entries(message, 0, has_values=False) == 3
    index_back, value_back = Coo().decode(message, 3, False, no_space)
    np.testing.assert_array_equal(index_back, index)
    assert value_back is None


def test_half_an_entry_is_refused():
    with pytest.raises(MessageError, match="5 words from rank 3"):
        Coo().entries(np.zeros(5, np.int32), 3)


def test_registered():
    assert isinstance(codec("coo", "fp32", Host()), Coo)
