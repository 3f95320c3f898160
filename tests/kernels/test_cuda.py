"""Every CUDA kernel is bit for bit the CPU kernel, in the simulator."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda as numba_cuda
from numba import types

from okrt.kernels.host import Host
from okrt.kernels.packed import BITMAP, BLOCK, GAPS, KINDS
from okrt.kernels.pairs import Pairs
from tests.kernel_cases import (
    ARGUMENTS,
    BY_GRADIENT,
    FLOATS,
    LAST_INDEX,
    MAGNITUDES,
    TYPES,
    assert_same,
    cases,
    each_type,
    message_of,
    pack_arguments,
    sample,
    unpack_arguments,
)

pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install 'okrt[cuda12]'")
if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("set NUMBA_ENABLE_CUDASIM=1, as make test does", allow_module_level=True)

from okrt.kernels import cuda
from okrt.kernels import cuda_code as code

pytestmark = pytest.mark.usefixtures("simulator")
GRID = code.BLOCKS_PER_MULTIPROCESSOR * code.THREADS  # elements, past which a thread takes more than one
SIZES = sorted(
    {0, 1, *(edge + more for edge in (code.THREADS, code.TILE, GRID) for more in (-1, 0, 1)), 3 * code.TILE + 5}
)
some = cases(st.sampled_from(SIZES))
few = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def device():
    return cuda.Device()


def test_every_function_of_the_host_has_its_like():
    public = ({name for name in vars(kind) if not name.startswith("_")} for kind in (cuda.Device, Host))
    assert next(public) == next(public) - {"map", "each"}


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name not in BY_GRADIENT])
@given(case=some)
@few
def test_simulated_kernels_equal_those_of_the_cpu(device, name, case):
    assert_same(device, Host(), name, ARGUMENTS[name](case, case.gradients[0]))


@pytest.mark.parametrize("name", BY_GRADIENT)
@given(case=some, place=st.integers(0, len(TYPES) - 1))
@few
def test_simulated_kernels_of_gradients_equal_those_of_the_cpu(device, name, case, place):
    assert_same(device, Host(), name, ARGUMENTS[name](case, case.gradients[place]))


@pytest.mark.parametrize("kind", ["ties", "heavy"])
def test_kth_magnitude_and_keep_top_over_several_tiles(device, kind):
    values = sample(np.random.default_rng(5), kind, 2 * code.TILE + 3, np.float32)
    arguments = (np.arange(values.size, dtype=np.int32), values, values.size // 2)
    assert_same(device, Host(), "keep_top", arguments)
    assert_same(device, Host(), "kth_magnitude", arguments[1:])


@each_type
def test_one_bad_element_is_found(device, dtype):
    word, _, infinity = TYPES[dtype]
    words = np.full(GRID + 5, infinity - 1, word)
    assert device.all_finite(words.view(dtype))
    for place in (0, code.THREADS, GRID - 1, GRID + 4):
        for bad in (infinity, infinity + 1):
            words[place] = bad
            assert not device.all_finite(words.view(dtype))
        words[place] = infinity - 1


@numba_cuda.jit
def ask(state, own, before):
    base = numba_cuda.shared.array(1, types.int64)
    tile = code.tile_number(state)
    before[0], before[1] = tile, code.before_tile(state, tile, own, base)


def test_a_tile_looks_back_past_tiles_that_know_only_their_own():
    """On a GPU tiles run side by side; in the simulator one after the other, so this is set up by hand."""
    up_to_here, own = 4 * 1000 + code.UP_TO_HERE, [4 * count + code.OWN for count in (20, 3)]
    state, before = np.array([4, 7, up_to_here, *own, 0, 0], np.int64), np.zeros(2, np.int64)
    ask[1, code.THREADS](state, np.int64(500), before)
    assert before.tolist() == [4, 1023]
    assert state.tolist() == [5, 7, up_to_here, *own, 4 * 1523 + code.UP_TO_HERE, 0]


def test_moments_over_several_blocks_and_chunks(device):
    values = np.random.default_rng(1).standard_normal(66 * 2048 + 5).astype(np.float32)
    assert device.moments(values) == Host().moments(values)


def test_merges_in_a_row_read_no_length(device, monkeypatch):
    """The lists of three merges, whose lengths only the device knows until the last."""
    rng = np.random.default_rng(2)
    lists = [np.sort(rng.choice(500, size, replace=False)).astype(np.int32) for size in (200, 0, 150, 300)]
    expected = {}
    for number, index in enumerate(lists):
        for i in index.tolist():
            expected[i] = expected.get(i, 0) + 2**number
    pairs = [Pairs(index, np.full(index.size, 2**number, np.float32)) for number, index in enumerate(lists)]
    rooms = [device.room(np.empty(700, np.int32), np.empty(700, np.float32)) for _ in range(3)]
    read = device._read
    monkeypatch.setattr(device, "_read", None)
    merged = [device.merge(*pairs[:2], rooms[0]), device.merge(*pairs[2:], rooms[1])]
    total = device.merge(*merged, rooms[2])
    monkeypatch.setattr(device, "_read", read)
    index, value = device.settled(total)
    assert dict(zip(index.tolist(), value.tolist(), strict=True)) == expected
    assert index.tolist() == sorted(expected)


def check_message(device, index, value, kind):
    """As the host packs and reads it; returns the layout, None for a plain message."""
    arguments = pack_arguments(index.astype(np.int32), value, KINDS[kind])
    message = message_of(arguments)
    assert_same(device, Host(), "pack", arguments)
    assert_same(device, Host(), "inspect_packed", (message,))
    assert_same(device, Host(), "unpack", unpack_arguments(arguments))
    return None if message[0] >= 0 else int(message[0]) >> 8 & 15


PATTERNS = {  # gaps, and the layout that is the shorter one of many
    "a run": (lambda rng, length: np.zeros(length, np.int64), GAPS),
    "half of them": (lambda rng, length: rng.geometric(0.5, length) - 1, BITMAP),
    "sparse": (lambda rng, length: rng.integers(0, 2000, length), GAPS),
}


@pytest.mark.parametrize("entries", [3, 4, 5, 32, 33, 34, 65, 128, 129, 130, 300])
@pytest.mark.parametrize("what", PATTERNS)
def test_indexes_packed_at_the_limits_of_blocks_and_tiles(device, entries, what):
    gaps, layout = PATTERNS[what]
    index = 2**24 + np.cumsum(gaps(np.random.default_rng(entries), entries) + 1)
    found = check_message(device, index, np.empty(0, np.float32), "none")
    assert found == layout or entries < 65


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("magnitudes", [*MAGNITUDES, *FLOATS])
def test_values_packed(device, kind, magnitudes):
    entries = GRID + 3 + (magnitudes == "any")  # odd and even
    value = sample(np.random.default_rng(0), magnitudes, entries, np.float32)
    assert check_message(device, np.arange(entries), value, kind) == GAPS


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_infinite_sums_packed(device, kind):
    value = np.ones(100, np.float32)
    value[[3, 70]] = np.inf, -np.inf
    assert check_message(device, np.arange(100), value, kind) == GAPS


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_entries_are_plain(device, kind):
    """With 3 of them it takes a look at the gaps to know."""
    for entries in range(4):
        assert check_message(device, 2**20 * np.arange(entries), np.full(entries, 0.1, np.float32), kind) is None


def test_gaps_of_every_width(device):
    """The last gap of a block is the widest; of the last block, which is not full, the first."""
    gaps = np.zeros(30 * BLOCK + 5, np.int64)
    gaps[BLOCK - 1 :: BLOCK] = [2**width - 1 for width in range(30)]
    gaps[-5] = 2**29
    for wide in (gaps, np.append(gaps[:40] * 0, 2**31 - 50)):
        index = np.cumsum(np.append(0, wide + 1))
        assert index[-1] <= LAST_INDEX
        assert check_message(device, index, np.empty(0, np.float32), "none") == GAPS


@pytest.mark.parametrize("left", [1, 2, 3, 4, 20])
def test_what_is_left_of_a_message_is_inspected(device, left):
    for entries in range(100, 108):  # checksums with and without their highest bit
        index, value = 7 * np.arange(entries, dtype=np.int32), np.ones(entries, np.float32)
        message = message_of(pack_arguments(index, value, KINDS["fp32"]))
        assert message[0] < 0
        assert_same(device, Host(), "inspect_packed", (message[:left],))


def test_a_message_is_packed_with_one_wait_and_unpacked_with_none(device, monkeypatch):
    reads = []
    read = device._read
    monkeypatch.setattr(device, "_read", lambda words: reads.append(words) or read(words))
    arguments = pack_arguments(7 * np.arange(100, dtype=np.int32), np.ones(100, np.float32), KINDS["fp16"])
    length = device.pack(*arguments)
    assert len(reads) == 1
    message = arguments[3][:length]
    device.inspect_packed(message)
    assert len(reads) == 2
    device.unpack(message, np.empty(100, np.int32), np.empty(100, np.float32))
    few = np.arange(2, dtype=np.int32)
    device.pack(few, np.ones(2, np.float32), KINDS["fp32"], np.empty(5, np.int32), np.empty(0, np.float32))
    assert len(reads) == 2


def test_working_memory_is_made_once(device):
    values = np.ones(3 * code.TILE, np.float32)
    index_out, value_out = np.empty(values.size, np.int32), np.empty_like(values)
    device.select(values, 1, 0, index_out, value_out)
    before = device._state
    device.select(values[: code.TILE], 1, 0, index_out, value_out)
    device.select(values, 1, 0, index_out, value_out)
    assert device._state is before
