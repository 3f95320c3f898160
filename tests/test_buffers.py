"""Views of NumPy and torch arrays. What is refused is in reducers/test_bad_input."""

import numpy as np
import pytest
import torch

from okrt import buffers
from okrt.buffers import view
from okrt.errors import UsageError
from okrt.kernels.bits import narrow
from tests.laws import DTYPES, wide

BITS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
@pytest.mark.parametrize("n", [0, 1, 9])
def test_view_shares_memory_and_gives_back_the_same_kind(dtype, n):
    x = DTYPES[dtype](np.arange(n, dtype=np.float32))
    seen = view(x)
    kind, library = dtype.removeprefix("torch."), "torch" if dtype.startswith("torch") else "numpy"
    assert (seen.size, seen.dtype, seen.library, seen.place) == (n, kind, library, "host")
    assert seen.data.dtype == BITS[kind]
    seen.data[:] = narrow(np.full(n, -2.5, np.float32), seen.data.dtype)
    assert wide(x).tolist() == [-2.5] * n
    back = seen.result(seen.data.copy())
    assert (type(back), back.dtype) == (type(x), x.dtype)
    np.testing.assert_array_equal(wide(back), wide(x))


@each_dtype
def test_results_share_memory(dtype):
    seen = view(DTYPES[dtype](np.ones(3, np.float32)))
    data = seen.data.copy()
    result = seen.result(data)
    data[:] = 0
    assert wide(result).tolist() == [0, 0, 0]


@each_dtype
def test_rounds_to_nearest_even(dtype):
    """As NumPy and torch round: halfway cases to even, what overflows to the largest finite number."""
    seen = view(DTYPES[dtype](np.ones(1, np.float32)))
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-7, -65519], np.float32)
    rounded = wide(seen.result(narrow(values, seen.data.dtype)))
    expected = wide(DTYPES[dtype](values))
    np.testing.assert_array_equal(rounded, expected)
    largest = np.finfo(np.float32).max
    top = wide(seen.result(narrow(np.array([largest, -largest], np.float32), seen.data.dtype)))
    assert np.isfinite(top).all() and top[0] == -top[1] > 65000


def test_read_only_arrays_and_gradients_of_torch_are_seen():
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    assert view(x).size == 4
    assert view(torch.ones(4, requires_grad=True)).size == 4


def test_views_of_a_larger_array():
    whole = np.arange(10, dtype=np.float32)
    view(whole[3:7]).data[:] = -1
    assert whole.tolist() == [0, 1, 2, -1, -1, -1, -1, 7, 8, 9]
    tensor = torch.arange(10).bfloat16()
    view(tensor[3:7]).data[:] = 0
    assert tensor.tolist() == [0, 1, 2, 0, 0, 0, 0, 7, 8, 9]


def test_more_elements_than_an_index_can_tell(monkeypatch):
    assert buffers.INDEX_LIMIT == 2**31 - 1
    monkeypatch.setattr(buffers, "INDEX_LIMIT", 5)
    assert view(np.ones(5, np.float32)).size == 5
    with pytest.raises(UsageError, match="6 elements at once: at most 5, split"):
        view(np.ones(6, np.float32))


def test_a_lazily_negated_tensor_is_refused_or_seen_right():
    """Any error but a UsageError on one rank would leave the others waiting."""
    x = torch._neg_view(torch.ones(3))
    try:
        seen = view(x)
    except UsageError:
        return
    assert wide(seen.result(seen.data)).tolist() == [-1, -1, -1]
