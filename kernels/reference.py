"""The kernels in NumPy: slow, plain, and the oracle for every other form."""

from collections.abc import Sequence

import numpy as np

from okrt.kernels import packed
from okrt.kernels.bits import MAGNITUDE_MASK, missing, narrow, threshold_bits, threshold_value, widen

pack, unpack, inspect_packed = packed.pack, packed.unpack, packed.inspect


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


def counts(values: np.ndarray, thresholds: Sequence[int]) -> np.ndarray:
    """How many elements are of at least each of the thresholds."""
    return np.array([count(values, threshold) for threshold in thresholds], np.int64)


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
    """Sum and sum of squares, in double precision; always added up in the same order, by blocks.

    A block of 2048 is 32 rows of 64: rows are summed, then halves are added to each other; blocks by `chunked_sum`.
    """
    wide = np.zeros(-(-values.size // 2048) * 2048)
    wide[: values.size] = values
    sums = []
    for rows in (wide.reshape(-1, 32, 64), np.square(wide).reshape(-1, 32, 64)):
        lanes = np.zeros((len(rows), 64))
        for row in range(32):
            lanes += rows[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        sums.append(chunked_sum(lanes[:, 0]))
    return sums[0], sums[1]


def chunked_sum(values: np.ndarray) -> float:
    """The sum of chunks of 64, each added up from its first to its last, and of the sums of these in the same way."""
    while values.size > 1:
        chunks = np.zeros(-(-values.size // 64) * 64)
        chunks[: values.size] = values
        values = np.cumsum(chunks.reshape(-1, 64), axis=1)[:, -1]
    return float(values[0]) if values.size else 0.0


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


def cut_to_top(index: np.ndarray, value: np.ndarray, k: int, ratio: float) -> tuple[int, int]:
    """As keep_top, of values that are not zero (1 <= k < length). Returns the k-th largest magnitude as a threshold,
    and how many of those kept reach `ratio` times it."""
    threshold = kth_magnitude(value, k)
    keep_top(index, value, k)
    return threshold, count(value[:k], threshold_bits(threshold_value(threshold) * ratio))


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


def take(dense: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Moves the elements of distinct indexes to `out`: zeros stay behind."""
    out[:] = dense[index]
    dense[index] = 0


def put(dense: np.ndarray, first_index: int, index: np.ndarray, value: np.ndarray) -> None:
    """dense[index - first_index] = value; indexes are distinct."""
    dense[index - first_index] = value


def cuts(index: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Where the sorted indexes reach each of the bounds (a host array, as is the result)."""
    return np.searchsorted(index, bounds)


def keep_lost(residual: np.ndarray, index, value, kept: np.ndarray, delivered: np.ndarray) -> None:
    """residual[index] += value for those of the sorted indexes that were not kept but are delivered all the same."""
    lost = np.isin(index, delivered, assume_unique=True) & ~np.isin(index, kept, assume_unique=True)
    residual[index[lost]] += value[lost]


def mean(total: np.ndarray, size: float, out: np.ndarray) -> None:
    """out = total / size, rounded to the gradient type of `out`, which may be the memory of the total."""
    with np.errstate(over="ignore"):
        if out.dtype == np.float32:
            np.divide(total, np.float32(size), out=out)
        else:
            out[:] = narrow(total / np.float32(size), out.dtype)


def rounding_error(total: np.ndarray, size: float, rounded: np.ndarray, out: np.ndarray) -> None:
    """out = total - size * rounded: what the rounding of `mean` took away from the sums, `missing` from them."""
    with np.errstate(over="ignore"):
        out[:] = missing(total, widen(rounded) * np.float32(size))


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


def exceedances(values: np.ndarray, location: float) -> tuple[int, float, float, float, int]:
    """Of the magnitudes above a location: how many, and of what they exceed it by, the sum, the sum of squares and the
    product, as a mantissa from 1 to 2 and an exponent of 2: its logarithm is the sum of logarithms.

    Numbers below the normal ones of float32 enter the product as 2**-127 to 2**-126. Sums are taken as by `moments`;
    the product by lanes, halves of them and blocks, in order.
    """
    over = np.zeros(-(-values.size // 2048) * 2048, np.float32)
    beyond = np.abs(values) > np.float32(location)
    over[: values.size][beyond] = np.abs(values[beyond]) - np.float32(location)
    rows, word = over.reshape(-1, 32, 64), over.view(np.int32).reshape(-1, 32, 64)
    lanes = np.ones((len(rows), 64))
    for row in range(32):
        lanes *= ((word[:, row] & 0x7FFFFF) | 0x3F800000).view(np.float32)
    count = int(np.count_nonzero(over))
    exponent = int((word >> 23).sum(dtype=np.int64)) - 127 * count
    mantissa, more = np.frexp(lanes)
    exponent += int(more.sum()) - more.size
    lanes = 2 * mantissa
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] * lanes[:, half:]
    product = 1.0
    for block in lanes[:, 0]:
        mantissa, more = np.frexp(product * block)
        product, exponent = 2 * float(mantissa), exponent + int(more) - 1
    return count, *moments(over), product, exponent


def accumulate_select_exceedances(residual, gradient, threshold, first_index, index_out, value_out, location) -> tuple:
    """residual += gradient, `select` from it, and `exceedances` of it, in one pass: what both return, in a row."""
    found = accumulate_select(residual, gradient, threshold, first_index, index_out, value_out)
    return found, *exceedances(residual, location)
