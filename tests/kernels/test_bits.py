"""Conversions between float32, 16-bit gradients and integer magnitudes, against torch's."""

import numpy as np
import pytest
import torch

from okrt.kernels.bits import (
    COARSE_BINS,
    COARSE_SHIFT,
    MAGNITUDE_BITS,
    narrow,
    threshold_bits,
    threshold_value,
    widen,
)

# Of each 16-bit type: torch's type, the bits of infinity.
TYPES = {np.uint16: (torch.float16, 0x7C00), np.int16: (torch.bfloat16, 0x7F80)}
each_type = pytest.mark.parametrize("dtype", TYPES, ids=["fp16", "bf16"])


def finite_patterns(dtype) -> np.ndarray:
    """Every finite value of a 16-bit type, as its bits."""
    magnitudes = np.arange(TYPES[dtype][1])
    return np.concatenate([magnitudes, magnitudes | 0x8000]).astype(np.uint16).view(dtype)


def torch_widen(gradient: np.ndarray) -> np.ndarray:
    kind, _ = TYPES[gradient.dtype.type]
    return torch.from_numpy(gradient.view(np.int16)).view(kind).float().numpy()


def torch_narrow(values: np.ndarray, dtype) -> np.ndarray:
    return torch.from_numpy(values).to(TYPES[dtype][0]).view(torch.int16).numpy().view(dtype)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


@each_type
def test_widen_and_back_on_every_value(dtype):
    gradient = finite_patterns(dtype)
    wide = widen(gradient)
    assert_same_bits(wide, torch_widen(gradient))
    assert_same_bits(narrow(wide, np.dtype(dtype)), gradient)


@each_type
def test_narrow_rounds_to_nearest_even(dtype):
    magnitudes = np.arange(TYPES[dtype][1] - 1).astype(np.uint16)
    lower, upper = (torch_widen((magnitudes + step).view(dtype)) for step in np.uint16([0, 1]))
    middle = lower + (upper - lower) / 2  # exact: one bit more than a 16-bit float has
    candidates = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    values = np.concatenate(candidates + [-c for c in candidates])
    narrowed = narrow(values, np.dtype(dtype))
    assert_same_bits(narrowed, torch_narrow(values, dtype))
    # The tie goes to the even pattern, whatever torch does.
    assert_same_bits(narrowed[: middle.size], (magnitudes + (magnitudes & 1)).astype(np.uint16).view(dtype))


@each_type
def test_narrow_rounds_like_torch_and_clamps_overflow(dtype):
    _, infinity = TYPES[dtype]
    words = np.random.default_rng(3).integers(0, 2**32, 100_000, dtype=np.uint32)
    words = words[(words & 0x7F800000) != 0x7F800000]
    edges = np.float32([0.0, -0.0, 65519, 65520, -65536, 3.4028235e38, -3.4028235e38])
    values = np.concatenate([words.view(np.float32), edges])
    expected = torch_narrow(values, dtype).view(np.uint16)
    overflow = (expected & 0x7FFF) == infinity
    assert overflow.any()
    expected[overflow] -= 1  # the largest finite value is the pattern before infinity
    assert_same_bits(narrow(values, np.dtype(dtype)), expected.view(dtype))


@each_type
def test_narrow_clamps_infinity(dtype):
    wide = widen(narrow(np.float32([np.inf, -np.inf]), np.dtype(dtype)))
    largest = torch.finfo(TYPES[dtype][0]).max
    np.testing.assert_array_equal(wide, np.float32([largest, -largest]))


def test_float32_stays_as_it_is():
    values = np.float32([1.5, -0.0, 3e38, 1e-45])
    assert_same_bits(narrow(values, np.dtype(np.float32)), values)
    assert_same_bits(widen(values), values)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int16])
def test_empty(dtype):
    narrowed = narrow(np.zeros(0, np.float32), np.dtype(dtype))
    assert narrowed.size == 0 and narrowed.dtype == dtype
    assert widen(narrowed).size == 0 and widen(narrowed).dtype == np.float32


def test_thresholds_order_as_magnitudes_do():
    values = np.float32([1e-45, 1e-40, 1.1754944e-38, 1e-3, 1, 1.0000001, 65504, 3.4028235e38])
    bits = [threshold_bits(v) for v in values]
    assert bits == sorted(set(bits))
    assert [threshold_value(b) for b in bits] == values.tolist()
    assert bits[0] == 1 == threshold_bits(0.0)
    assert bits[-1] == threshold_bits(1e39) == threshold_bits(float("inf"))
    assert bits[-1] >> COARSE_SHIFT < COARSE_BINS == 1 << (MAGNITUDE_BITS - COARSE_SHIFT)
