"""The packed form of entries: lossless where it must be, short, and the same bits in every form of the kernels."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from okrt.kernels import packed
from okrt.kernels.host import Host
from okrt.kernels.packed import BITMAP, GAPS, HEADER, KINDS, PLAIN_MASK, room_words

HOST = Host()
GUARD = 8
# Half a unit in the last place: relative to the value and to the largest of the message, and of the smallest numbers.
ROUNDING = {"fp32": (0, 0, 0), "fp16": (2.0**-11, 2.0**-39, 2.0**-150), "bf16": (2.0**-8, 0, 2.0**-134)}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Reference:
    """The oracle under the names of the kernels."""

    pack, unpack, inspect_packed = map(staticmethod, (packed.pack, packed.unpack, packed.inspect))


def pack(index, value, kind, kernels=HOST):
    """The message, the values that its readers get, and their errors; a write past the room for it shows."""
    room = room_words(index.size, KINDS[kind], 2**31)
    held = np.full(room + 2 * GUARD, -7, np.int32)
    is_short = kind in ("fp16", "bf16")
    seen, error = value.copy(), np.full(index.size if is_short else 0, np.nan, np.float32)
    length = kernels.pack(index, seen[: 0 if kind == "none" else None], KINDS[kind], held[GUARD : GUARD + room], error)
    assert (held[:GUARD] == -7).all() and (held[GUARD + room :] == -7).all()
    return held[GUARD : GUARD + length], seen, error if is_short else np.zeros_like(value)


def unpack(message, entries, kind, kernels=HOST):
    index, value = np.full(entries + GUARD, -7, np.int32), np.full(entries + GUARD, -7, np.float32)
    kernels.unpack(message, index[:entries], value[: 0 if kind == "none" else entries])
    assert (index[entries:] == -7).all() and (value[entries:] == -7).all()
    return index[:entries], value[:entries]


def layout(message):
    return None if message[0] >= 0 else int(message[0]) >> 8 & 15


@st.composite
def patterns(draw):
    """Sorted indexes: runs, scattered ones at any density, far jumps, up to the last index there is."""
    gaps = [draw(st.integers(0, 2**26))]
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.sampled_from([0, 1, 2, 31, 32, 33, 63, 100, 129]))
        widest = draw(st.sampled_from([0, 1, 3, 12, 200, 2**12, 2**20]))
        seed = draw(st.integers(0, 2**32 - 1))
        gaps += [int(gap) for gap in np.random.default_rng(seed).integers(0, widest + 1, length)]
    index = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    index = index[index < 2**31 - 2]
    if draw(st.booleans()):
        index = np.append(index, 2**31 - 2)
    return index.astype(np.int32)


@st.composite
def values_for(draw, entries):
    scale = 10.0 ** draw(st.integers(-44, 38))
    spread = draw(st.sampled_from([0, 1, 8, 60]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with np.errstate(over="ignore"):
        value = (rng.standard_normal(entries) * 2.0 ** -rng.uniform(0, spread, entries) * scale).astype(np.float32)
    return np.clip(value, -3.4028234e38, 3.4028234e38)


@st.composite
def entries(draw):
    index = draw(patterns())
    return index, draw(values_for(index.size))


NOTHING = np.empty(0, np.int32), np.empty(0, np.float32)
ONE = np.array([2**31 - 2], np.int32), np.array([-3.0], np.float32)
ENDS = np.array([0, 2**31 - 2], np.int32), np.array([3.4028234e38, 1e-45], np.float32)


@each_kind
@settings(max_examples=60)
@given(entries=entries())
@example(entries=NOTHING)
@example(entries=ONE)
@example(entries=ENDS)
def test_indexes_come_back_and_values_within_the_rounding_of_their_type(kind, entries):
    index, value = entries
    message, seen, error = pack(index, value, kind)
    index_back, value_back = unpack(message, index.size, kind)
    np.testing.assert_array_equal(index_back, index)
    if kind == "none":
        return
    assert value_back.tobytes() == seen.tobytes()
    assert (seen + error).tobytes() == (value + np.float32(0)).tobytes()  # nothing is lost, to the last bit
    relative, to_largest, absolute = ROUNDING[kind]
    magnitude = np.abs(value).astype(np.float64)
    allowed = np.maximum(relative * magnitude, to_largest * magnitude.max(initial=0))
    # What would round to more than float32 has becomes the largest number below that.
    allowed *= np.where(magnitude > 3.38e38, 2, 1)
    assert (np.abs(error) <= np.maximum(allowed, absolute)).all()


@each_kind
@settings(max_examples=60)
@given(entries=entries())
@example(entries=NOTHING)
@example(entries=ONE)
@example(entries=ENDS)
def test_same_bits_as_the_oracle(kind, entries):
    index, value = entries
    (message, *rest), (expected, *expected_rest) = (pack(index, value, kind, kernels) for kernels in (HOST, Reference))
    np.testing.assert_array_equal(message, expected)
    for array, other in zip(rest, expected_rest, strict=True):
        assert array.tobytes() == other.tobytes()
    assert HOST.inspect_packed(message) == Reference.inspect_packed(message)
    for array, other in zip(
        unpack(message, index.size, kind), unpack(message, index.size, kind, Reference), strict=True
    ):
        assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("kernels", [HOST, Reference], ids=["numba", "oracle"])
def test_infinite_sums_become_the_largest_number_and_leave_no_error(kind, kernels):
    value = np.ones(100, np.float32)
    value[[3, 70]] = np.inf, -np.inf
    _, seen, error = pack(np.arange(100, dtype=np.int32), value, kind, kernels)
    assert (np.abs(seen[[3, 70]]) > 3.3e38).all() and np.isfinite(seen).all()
    assert (np.sign(seen[[3, 70]]) == [1, -1]).all()
    assert (error[[3, 70]] == 0).all() and np.isfinite(error).all()


@each_kind
@settings(max_examples=60)
@given(entries=entries())
def test_never_longer_than_coordinates_and_a_word(kind, entries):
    index, value = entries
    span = int(index[-1] - index[0]) + 1 if index.size else 0
    message, _, _ = pack(index, value, kind)
    assert message.size <= room_words(index.size, KINDS[kind], span) <= (1 if kind == "none" else 2) * index.size + 1


def scattered(n, density, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(n) < density).astype(np.int32)


@pytest.mark.parametrize(("kind", "limit"), [("fp32", 5.3), ("fp16", 3.3), ("bf16", 3.3), ("none", 1.3)])
@pytest.mark.parametrize("first", [0, 2**24 - 100_000])
def test_bytes_an_entry_at_one_percent(kind, limit, first):
    index = scattered(1_000_000, 0.01) + np.int32(first)
    message, _, _ = pack(index, np.ones(index.size, np.float32), kind)
    assert message.nbytes / index.size <= limit


def test_the_shorter_layout_is_taken():
    cases = {
        "one percent": (scattered(100_000, 0.01), GAPS, 0.3),
        "a run": (np.arange(2**24 - 5, 2**24 + 5000, dtype=np.int32), GAPS, 0.02),
        "every other": (np.arange(0, 8192, 2, dtype=np.int32), GAPS, 0.04),
        "half of them": (scattered(10_000, 0.5), BITMAP, 0.07),
        "three far apart": (np.array([1, 2**20, 2**30], np.int32), None, 1.4),
    }
    for what, (index, expected, words) in cases.items():
        message, _, _ = pack(index, np.empty(0, np.float32), "none")
        assert layout(message) == expected, what
        assert message.size <= words * index.size + HEADER, what


def test_sizes_around_the_limits_of_blocks():
    for entries in (*range(70), 127, 128, 129, 130, 1000):
        index = scattered(200_000, 0.01)[:entries]
        message, seen, _ = pack(index, np.arange(entries, dtype=np.float32), "bf16")
        index_back, value_back = unpack(message, entries, "bf16")
        np.testing.assert_array_equal(index_back, index)
        np.testing.assert_array_equal(value_back, seen)


def test_fp16_of_numbers_that_fp16_does_not_have():
    """A power of two takes them into its range: 1e-20 is not zero, and 1e20 not infinite."""
    for scale in (1e-38, 1e-20, 1, 1e20, 1e38):
        value = np.array([1.0, -0.75, 1e-3], np.float32) * np.float32(scale)
        value = np.tile(value, 40)
        _, seen, error = pack(np.arange(value.size, dtype=np.int32), value, "fp16")
        assert (np.abs(error) <= 2.0**-11 * np.abs(value)).all() and (seen != 0).all()


@pytest.mark.parametrize("entries", [1, 5, 40, 1000])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "none"])
def test_every_change_of_a_bit_shows(kind, entries):
    index = scattered(1_000_000, 0.01)[:entries]
    message, _, _ = pack(index, np.ones(entries, np.float32), kind)
    _, _, has, right = HOST.inspect_packed(message)
    assert has == right
    rng = np.random.default_rng(0)
    places = range(message.size) if message.size < 60 else [*range(8), *rng.choice(message.size, 50), message.size - 1]
    for place in places:
        for bit in range(32):
            changed = message.copy()
            changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
            _, _, has, right = HOST.inspect_packed(changed)
            assert has != right, (place, bit)


@pytest.mark.parametrize("entries", [1, 5, 40, 1000])
def test_every_cut_shows(entries):
    index = scattered(1_000_000, 0.01)[:entries]
    message, _, _ = pack(index, np.ones(entries, np.float32), "fp16")
    for length in range(1, message.size):
        _, _, has, right = HOST.inspect_packed(message[:length])
        assert has != right, length


def test_two_words_in_each_others_place_show():
    index = scattered(1_000_000, 0.01)
    message, _, _ = pack(index, np.arange(index.size, dtype=np.float32), "fp32")
    for place, other in pairwise(range(message.size - 100, message.size)):
        changed = message.copy()
        changed[[place, other]] = changed[[other, place]]
        _, _, has, right = HOST.inspect_packed(changed)
        assert has != right


def test_plain_and_packed_are_told_apart_by_the_sign():
    few, many = scattered(100_000, 0.01)[:3], scattered(100_000, 0.01)
    assert int(pack(few, np.ones(3, np.float32), "fp16")[0].view(np.uint32)[0]) <= PLAIN_MASK
    assert int(pack(many, np.ones(many.size, np.float32), "fp16")[0].view(np.uint32)[0]) > PLAIN_MASK
