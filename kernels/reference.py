"""The kernels in NumPy: slow, plain, and the oracle for every other form."""

import numpy as np

from okrt.kernels.bits import MAGNITUDE_MASK, widen


def magnitude_bits(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & MAGNITUDE_MASK).astype(np.int64)


def all_finite(gradient: np.ndarray) -> bool:
    """True if no element is NaN or infinite."""
    return bool(np.isfinite(widen(gradient)).all())


def accumulate(residual: np.ndarray, gradient: np.ndarray) -> None:
    """residual += gradient."""
    residual += widen(gradient)


def accumulate_select(residual, gradient, threshold, first_index, index_out, value_out) -> int:
    """residual += gradient, and `select` from it, in one pass."""
    accumulate(residual, gradient)
    return select(residual, threshold, first_index, index_out, value_out)


def select(values, threshold, first_index, index_out, value_out) -> int:
    """Index (plus first_index) and value of each element of at least the threshold, in index order.

    Returns how many there are; those past the length of the outputs are counted, not written.
    """
    found = np.flatnonzero(magnitude_bits(values) >= threshold)
    kept = found[: index_out.size]
    index_out[: kept.size] = kept + first_index
    value_out[: kept.size] = values[kept]
    return found.size


def select_top(values, threshold, ties, index_out, value_out) -> int:
    """Index and value of each element above the threshold and of the first `ties` equal to it, in index order."""
    magnitude = magnitude_bits(values)
    equal = np.flatnonzero(magnitude == threshold)[:ties]
    found = np.sort(np.concatenate([np.flatnonzero(magnitude > threshold), equal]))
    index_out[: found.size] = found
    value_out[: found.size] = values[found]
    return found.size


def count(values: np.ndarray, threshold: int) -> int:
    """How many elements are of at least the threshold."""
    return int(np.count_nonzero(magnitude_bits(values) >= threshold))


def histogram(values: np.ndarray, low: int, shift: int, counts: np.ndarray) -> None:
    """Adds to counts[j] how many magnitudes have (bits - low) >> shift equal to j; others are passed over."""
    offset = magnitude_bits(values) - low
    bins = offset[offset >= 0] >> shift
    counts += np.bincount(bins[bins < counts.size], minlength=counts.size)


def accumulate_histogram(residual, gradient, low, shift, counts) -> None:
    """residual += gradient, and `histogram` of it, in one pass."""
    accumulate(residual, gradient)
    histogram(residual, low, shift, counts)


def moments(values: np.ndarray) -> tuple[float, float]:
    """Sum and sum of squares, in double precision."""
    wide = values.astype(np.float64)
    return float(wide.sum()), float((wide * wide).sum())


def kth_magnitude(values: np.ndarray, k: int) -> int:
    """The k-th largest magnitude as a threshold (1 <= k <= length); 1 if it is zero."""
    return max(1, int(np.sort(magnitude_bits(values))[values.size - k]))


def keep_reaching(index: np.ndarray, value: np.ndarray, threshold: int, k: int) -> int:
    """Moves the pairs above the threshold to the front, in their order, and the first equal to it that make up k."""
    magnitude = magnitude_bits(value)
    above = np.flatnonzero(magnitude > threshold)
    equal = np.flatnonzero(magnitude == threshold)[: max(0, k - above.size)]
    kept = np.sort(np.concatenate([above, equal]))
    index[: kept.size], value[: kept.size] = index[kept], value[kept]
    return kept.size


def keep_top(index: np.ndarray, value: np.ndarray, k: int) -> int:
    """Moves the k pairs of largest magnitude to the front, in their order; of equals the first ones stay."""
    if index.size <= k:
        return index.size
    kept = np.sort(np.argsort(-magnitude_bits(value), kind="stable")[:k])
    index[:k], value[:k] = index[kept], value[kept]
    return k


def scatter_add(dense: np.ndarray, index: np.ndarray, value: np.ndarray) -> None:
    """dense[index] += value; indexes are distinct."""
    dense[index] += value


def merge_add(index_a, value_a, index_b, value_b, index_out, value_out) -> int:
    """The union of two lists sorted by index; where both have an index the value is a + b. Returns its length."""
    union = np.union1d(index_a, index_b)
    total = np.full(union.size, -0.0, np.float32)  # what leaves any number as it is, -0.0 too
    total[np.searchsorted(union, index_a)] = value_a
    total[np.searchsorted(union, index_b)] += value_b
    index_out[: union.size] = union
    value_out[: union.size] = total
    return union.size


def clear_common(residual: np.ndarray, index_a: np.ndarray, index_b: np.ndarray) -> None:
    """residual = 0 at the indexes that are in both sorted lists."""
    residual[np.intersect1d(index_a, index_b)] = 0


def lag_adamw(weight, gradient, moments, index, table, step, lr, bias1, bias2, eps, cap) -> float:
    """One step of lag-aware AdamW on the elements of `index` (distinct); see okrt.engine.lag_adamw. Returns the sum of
    the changes of v.

    Each row of moments is (m, v, step of the last delivery). Column tau of the table is (b1**tau, 1 - b1**tau,
    b2**tau, (1 - b2**tau) * tau**noise, decay**tau); longer lags than it has count as its last one there. In float32.
    """
    m, old_v, last = moments[index].T
    lag = np.float32(step) - last
    keep1, new1, keep2, new2, decay = table[:, np.minimum(lag, table.shape[1] - 1).astype(np.int64)]
    mean = gradient[index] / lag
    m = keep1 * m + new1 * mean
    v = keep2 * old_v + new2 * (mean * mean)
    stride = np.float32(lr) * np.minimum(lag, np.float32(cap))
    change = stride * (m / np.float32(bias1)) / (np.sqrt(v / np.float32(bias2)) + np.float32(eps))
    weight[index] = decay * weight[index] - change
    moments[index] = np.stack([m, v, np.full_like(m, step)], axis=1)
    changes = v.astype(np.float64) - old_v.astype(np.float64)
    return float(np.cumsum(changes)[-1]) if changes.size else 0.0


def balance(residual, weights, moments, index, floor, power) -> None:
    """weights = (sqrt(v) + floor)**-power at the elements of `index` (distinct), and residual in the new weights."""
    scale = (np.sqrt(moments[index, 1]) + np.float32(floor)).astype(np.float64)
    new = (scale ** -np.float64(np.float32(power))).astype(np.float32)
    residual[index] *= new / weights[index]
    weights[index] = new
