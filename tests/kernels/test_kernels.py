"""Every CPU kernel is bit for bit the NumPy reference, and the reference is what plain Python gives."""

import bisect
import inspect
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from okrt.kernels import cpu, reference
from okrt.kernels.bits import threshold_bits, threshold_value
from okrt.kernels.host import Host
from tests.kernel_cases import (
    ARGUMENTS,
    FLOATS,
    MAGNITUDES,
    TYPES,
    assert_all_same,
    assert_same,
    cases,
    each_type,
    run,
    sample,
)

BLOCK = cpu.BLOCK
EDGES = [cpu.LANES - 1, cpu.LANES, cpu.LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + cpu.LANES]
large = cases(st.sampled_from([0, 1, 9, *EDGES, 2 * BLOCK, 3 * BLOCK + 5]))
small = cases(st.integers(0, 40))


def decoded(gradient: np.ndarray) -> list[float]:
    """The elements of a gradient as Python floats."""
    if gradient.dtype == np.uint16:
        return [value for (value,) in struct.iter_unpack("<e", gradient.tobytes())]
    if gradient.dtype == np.int16:
        return [struct.unpack("<f", b"\0\0" + struct.pack("<h", word))[0] for word in gradient.tolist()]
    return gradient.tolist()


class Plain:
    """The kernels in Python: magnitudes are abs() of floats here, not bits."""

    def all_finite(gradient):
        return all(math.isfinite(x) for x in decoded(gradient))

    def accumulate(residual, gradient):
        # The sum of two float32 in double precision, rounded once more, is their float32 sum.
        residual[:] = [r + g for r, g in zip(residual.tolist(), decoded(gradient), strict=True)]

    def accumulate_select(residual, gradient, *rest):
        Plain.accumulate(residual, gradient)
        return Plain.select(residual, *rest)

    def select(values, threshold, first_index, index_out, value_out):
        found = [i for i, x in enumerate(values.tolist()) if abs(x) >= threshold_value(threshold)]
        for place, i in list(enumerate(found))[: index_out.size]:
            index_out[place], value_out[place] = first_index + i, values[i]
        return len(found)

    def select_top(values, threshold, ties, index_out, value_out):
        found = 0
        for i, x in enumerate(values.tolist()):
            tie = abs(x) == threshold_value(threshold)
            if abs(x) > threshold_value(threshold) or (tie and ties > 0):
                index_out[found], value_out[found] = i, x
                ties, found = ties - tie, found + 1
        return found

    def count(values, threshold):
        return sum(abs(x) >= threshold_value(threshold) for x in values.tolist())

    def histogram(values, low, shift, counts):
        for x in values.tolist():
            (magnitude,) = struct.unpack("<i", struct.pack("<f", abs(x)))
            j = (magnitude - low) // 2**shift
            if 0 <= j < counts.size:
                counts[j] += 1

    def accumulate_histogram(residual, gradient, *rest):
        Plain.accumulate(residual, gradient)
        Plain.histogram(residual, *rest)

    def kth_magnitude(values, k):
        return threshold_bits(sorted(map(abs, values.tolist()), reverse=True)[k - 1])

    def keep_reaching(index, value, threshold, k):
        strengths = [abs(x) for x in value.tolist()]
        level = threshold_value(threshold)
        above = [i for i, strength in enumerate(strengths) if strength > level]
        equal = [i for i, strength in enumerate(strengths) if strength == level]
        kept = sorted(above + equal[: max(0, k - len(above))])
        for place, i in enumerate(kept):
            index[place], value[place] = index[i], value[i]
        return len(kept)

    def keep_top(index, value, k):
        pairs = list(zip(index.tolist(), value.tolist(), strict=True))
        kept = sorted(sorted(pairs, key=lambda pair: (-abs(pair[1]), pair[0]))[:k])
        for place, (i, x) in enumerate(kept):
            index[place], value[place] = i, x
        return len(kept)

    def cut_to_top(index, value, k, ratio):
        threshold = Plain.kth_magnitude(value, k)
        Plain.keep_top(index, value, k)
        level = min(threshold_value(threshold) * ratio, float(np.finfo(np.float32).max))
        return threshold, Plain.count(value[:k], threshold_bits(level))

    def scatter_add(dense, index, value):
        for i, x in zip(index, value, strict=True):
            dense[i] += x

    def merge_add(index_a, value_a, index_b, value_b, index_out, value_out):
        total = dict(zip(index_a, value_a, strict=True))
        for i, x in zip(index_b, value_b, strict=True):
            total[i] = total[i] + x if i in total else x
        for place, i in enumerate(sorted(total)):
            index_out[place], value_out[place] = i, total[i]
        return len(total)

    def clear_common(residual, index_a, index_b):
        residual[list(set(index_a.tolist()) & set(index_b.tolist()))] = 0

    def counts(values, thresholds):
        return np.array([Plain.count(values, threshold) for threshold in thresholds])

    def take(dense, index, out):
        for place, i in enumerate(index.tolist()):
            out[place], dense[i] = dense[i], 0

    def put(dense, first_index, index, value):
        for i, x in zip(index.tolist(), value.tolist(), strict=True):
            dense[i - first_index] = x

    def cuts(index, bounds):
        return np.array([bisect.bisect_left(index.tolist(), bound) for bound in bounds.tolist()])

    def keep_lost(residual, index, value, kept, delivered):
        for i, x in zip(index.tolist(), value, strict=True):
            if i in delivered.tolist() and i not in kept.tolist():
                residual[i] += x

    def mean(total, size, out):
        exact = [x / size for x in total.tolist()]
        if out.dtype == np.float32:
            out[:] = exact
            return
        # Rounded twice, to float32 and from there, as the kernels do.
        once = np.array(exact, np.float32)
        kind = torch.float16 if out.dtype == np.uint16 else torch.bfloat16
        largest = torch.finfo(kind).max
        rounded = torch.from_numpy(once).clamp(-largest, largest).to(kind)
        out[:] = rounded.view(torch.int16).numpy().view(out.dtype)

    def rounding_error(total, size, rounded, out):
        products = np.array([np.float32(x) for x in decoded(rounded)], np.float32) * np.float32(size)
        for i in range(total.size):
            lacking = total[i] - products[i]
            out[i] = lacking if math.isfinite(lacking) else 0


def test_every_kernel_is_tested():
    compiled = {n for n, f in vars(cpu).items() if isinstance(f, Dispatcher) and not n.startswith("_")}
    oracles = {n for n, _ in inspect.getmembers(reference, inspect.isfunction)}
    helpers = {"magnitude_bits", "widen", "narrow", "missing", "chunked_sum", "threshold_bits", "threshold_value"}
    assert ARGUMENTS.keys() | {"lag_adamw", "balance"} == oracles - helpers
    assert compiled - {"block_moments", "chunked_sum"} <= oracles - helpers
    assert {name for name in vars(Host) if not name.startswith("_")} >= ARGUMENTS.keys()


# One case for all kernels: to draw it takes longer than to run them.
@given(case=large)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cpu_equals_reference(case):
    assert_all_same(cpu, reference, [name for name in ARGUMENTS if hasattr(cpu, name)], case)


@given(case=small)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_reference_equals_plain_python(case):
    sums = {"moments", "exceedances", "accumulate_select_exceedances"}
    elsewhere = sums | {"pack", "inspect_packed", "unpack"}  # the last three: in test_packed
    assert_all_same(reference, Plain, [name for name in ARGUMENTS if name not in elsewhere], case)


@pytest.mark.parametrize("kernels", [reference, Host()])
@given(case=large)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_moments(kernels, case):
    (total, squares), _ = run(kernels, "moments", (case.residual,))
    values = case.residual.tolist()
    assert total == pytest.approx(math.fsum(values), rel=0, abs=1e-12 * math.fsum(map(abs, values)))
    assert squares == pytest.approx(math.fsum(x * x for x in values), rel=1e-12, abs=0)


@pytest.mark.parametrize("kernels", [reference, Host()])
@given(case=large, quantile=st.sampled_from([0, 0, 0.5, 0.99, 1]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_exceedances(kernels, case, quantile):
    magnitudes = np.abs(case.residual)
    location = float(np.sort(magnitudes)[int(quantile * (case.size - 1))]) if case.size and quantile else 0.0
    (count, total, squares, mantissa, exponent), _ = run(kernels, "exceedances", (case.residual, location))
    excesses = (magnitudes - np.float32(location)).astype(np.float64)
    excesses = excesses[excesses > 0].tolist()
    assert count == len(excesses)
    assert total == pytest.approx(math.fsum(excesses), rel=1e-12)
    assert squares == pytest.approx(math.fsum(x * x for x in excesses), rel=1e-12, abs=0)
    assert 1 <= mantissa < 2
    if min(excesses, default=1) >= 2.0**-126:
        logs = math.fsum(map(math.log, excesses))
        assert math.log(mantissa) + exponent * math.log(2) == pytest.approx(logs, rel=1e-11, abs=1e-9)


@each_type
@pytest.mark.parametrize("bad", ["infinity", "nan", "quiet nan"])
@pytest.mark.parametrize("kernels, sizes", [(reference, (1, 2, 9)), (cpu, (1, 2, 9, 2 * BLOCK, 4 * BLOCK + 3))])
def test_all_finite_finds_one_bad_element_anywhere(kernels, sizes, bad, dtype):
    word, mantissa, infinity = TYPES[dtype]
    sign = 1 << (8 * np.dtype(dtype).itemsize - 1)
    pattern = infinity + {"infinity": 0, "nan": 1, "quiet nan": 1 << (mantissa - 1)}[bad]
    for size in sizes:
        words = np.full(size, infinity - 1, word)
        words[::2] |= sign
        gradient = words.view(dtype)
        assert run(kernels, "all_finite", (gradient,))[0] is True
        for place, finite in enumerate(words.tolist()):
            for signed in (pattern, pattern | sign):
                words[place] = signed
                assert kernels.all_finite(gradient) is False, (size, place, hex(signed))
            words[place] = finite


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("kind", [*MAGNITUDES, *FLOATS])
def test_kth_magnitude_and_keep_top_for_every_k(kernels, kind):
    values = sample(np.random.default_rng(5), kind, 100, np.float32)
    index = np.arange(100, dtype=np.int32)
    for k in range(102):
        assert_same(kernels, Plain, "keep_top", (index, values, k))
        if 1 <= k <= 100:
            assert_same(kernels, Plain, "kth_magnitude", (values, k))


@each_type
@pytest.mark.parametrize("kernels", [reference, cpu])
def test_accumulate_adds_every_finite_16_bit_pattern_exactly(kernels, dtype):
    _, _, infinity = TYPES[dtype]
    magnitudes = np.arange(infinity if dtype != np.float32 else 0x7C00)
    gradient = np.concatenate([magnitudes, magnitudes | 0x8000]).astype(np.uint16).view(np.int16)
    gradient = gradient.view(dtype) if dtype != np.float32 else gradient.view(np.float16).astype(np.float32)
    residual = np.full(gradient.size, -0.0, np.float32)  # x + -0.0 is x, its sign of zero included
    kernels.accumulate(residual, gradient)
    expected = np.array(decoded(gradient), np.float32)
    np.testing.assert_array_equal(residual.view(np.uint32), expected.view(np.uint32))


@each_type
def test_a_gradient_may_be_read_only(dtype):
    gradient = sample(np.random.default_rng(1), "normal", BLOCK + 1, dtype)
    gradient.flags.writeable = False
    expected = np.zeros(gradient.size, np.float32)
    reference.accumulate(expected, gradient)
    residual = np.zeros_like(expected)
    cpu.accumulate(residual, gradient)
    np.testing.assert_array_equal(residual, expected)
    assert cpu.all_finite(gradient)
