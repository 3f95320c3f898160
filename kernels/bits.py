"""Magnitudes as integers: what all forms of the kernels share.

Numba does not see a change of these constants: after one, remove the compiled code (make clean).
"""

import numpy as np

MAGNITUDE_BITS = 31
MAGNITUDE_MASK = 0x7FFFFFFF
# The first histogram of an array: 8 exponent and 4 mantissa bits, so a bin is a sixteenth of an octave wide.
COARSE_BINS = 4096
COARSE_SHIFT = 19


def threshold_bits(threshold: float) -> int:
    """The integer form of a magnitude; 0 becomes 1, so that exact zeros stay below every threshold."""
    return max(1, int(np.float32(min(threshold, float(np.finfo(np.float32).max))).view(np.uint32)))


def threshold_value(bits: int) -> float:
    """The float32 magnitude of an integer threshold."""
    return float(np.uint32(bits).view(np.float32))


def widen(gradient: np.ndarray) -> np.ndarray:
    """The float32 values of a gradient (float32, or the bits of fp16 as uint16 or of bf16 as int16)."""
    if gradient.dtype == np.float32:
        return gradient
    if gradient.dtype == np.uint16:
        return gradient.view(np.float16).astype(np.float32)
    return (gradient.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def missing(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What those who see `seen` lack of the values; nothing where that is no number, since what is kept of a sum beyond
    the range of float32 would stay for ever."""
    with np.errstate(over="ignore", invalid="ignore"):
        lacking = values - seen
    lacking[~np.isfinite(lacking)] = 0
    return lacking


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 values rounded to the nearest of a gradient type; what overflows becomes the largest finite one."""
    if dtype == np.float32:
        return values
    if dtype == np.uint16:
        largest = np.float32(np.finfo(np.float16).max)
        return np.clip(values, -largest, largest).astype(np.float16).view(np.uint16)
    word = values.view(np.uint32)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    overflow = (rounded & 0x7FFF) == 0x7F80
    finite = np.where(overflow, (rounded & 0x8000) | 0x7F7F, rounded)
    return np.where(np.isnan(values), 0x7FC0, finite).astype(np.uint16).view(np.int16)
