"""Reducers on device arrays: kernels in Numba's simulator, memory that the host cannot touch, real MPI."""

import numpy as np
import pytest

import okrt
from okrt.errors import NonFiniteGradient, PlanMismatch, UsageError
from okrt.transport import mpi
from okrt.world import note_gpu
from tests import fake_cupy

RANK, SIZE = okrt.init().rank, okrt.init().size
# The simulator is slow: odd numbers of ranks are left to the kernels of the CPU, which give the same bits.
pytestmark = [
    pytest.mark.usefixtures("simulator"),
    pytest.mark.skipif(SIZE == 3, reason="device arrays are tried at 1, 2 and 4 ranks"),
]
N = 100  # four tiles of the simulator
BITS = {"float32": np.float32, "float16": np.float16}
CASES = [
    ("dense", {}, "float32"),
    ("dense", {}, "float16"),
    ("topka", {}, "float32"),
    ("topkdsa", {"density": 0.3}, "float32"),
    ("gtopk", {}, "float32"),
    ("gaussiank", {}, "float32"),
    ("oktopk", {"density": 0.25}, "float32"),
    ("oktopk", {"density": 0.25, "complete": True, "dense_steps": 1}, "float16"),
    ("oktopk", {"density": 0.4, "codec": "packed", "values": "fp16"}, "float32"),
    ("gtopk", {"density": 0.4, "codec": "packed", "values": "bf16"}, "float16"),
    ("oktopk", {"density": 0.4, "codec": "packed", "values": "fp16", "complete": True}, "float32"),
]
WAYS = {True: "CUDA-aware", False: "staged"}


ROUNDS = ("topkdsa", "gtopk", "oktopk")  # those that do with four ranks what they do not with two


def ways(number: int) -> list[bool]:
    """Those that a case is tried in: of some reducers one at 2 ranks and the other at 4, of the others both at 2. Alone
    nothing is sent: one. Packed messages are tried once: `complete` at 4, where indexes alone are sent."""
    name, options, _ = CASES[number]
    one = number % 2 == (SIZE < 4)
    if "codec" in options:
        return [one] if (4 if "complete" in options else 2) == SIZE else []
    if SIZE == 1 or name in ROUNDS:
        return [one]
    return [True, False] if SIZE == 2 else []


each_case = pytest.mark.parametrize(
    ("aware", "name", "options", "dtype"),
    [
        pytest.param(way, *case, id=f"{WAYS[way]}-{'-'.join(map(str, case))}")
        for number, case in enumerate(CASES)
        for way in ways(number)
    ],
    indirect=["aware"],
)


@pytest.fixture(params=WAYS, ids=WAYS.values())
def aware(request, monkeypatch) -> bool:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(mpi, "may_touch_device_memory", lambda: request.param)
    return request.param


# What does not depend on the way is tried in one at 2 ranks, and in the other at 4.
one_way = pytest.mark.parametrize("aware", [SIZE < 4], ids=WAYS.get, indirect=True)


def gradient(step: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng([step, RANK])
    return (rng.standard_normal(N) * np.geomspace(1, 0.01, N)).astype(BITS[dtype])


def make(name: str, options: dict):
    """In coordinates if the options do not say: packing takes its time in the simulator."""
    options = {"density": 0.05, "codec": "coo"} | options if name != "dense" else options
    transport = mpi.MpiTransport(okrt.init().comm, 60)
    return okrt.reducer(name, transport=transport, **options)


@pytest.fixture
def first_words(monkeypatch) -> list[int]:
    """Of the messages that are packed on the device."""
    from okrt.kernels.cuda import Device

    words: list[int] = []
    pack = Device.pack

    def packed(self, index, value, kind, message, error):
        length = pack(self, index, value, kind, message, error)
        words.extend(fake_cupy.on_host(message[:1]))
        return length

    monkeypatch.setattr(Device, "pack", packed)
    return words


@each_case
def test_equal_to_the_host(aware, first_words, name, options, dtype):
    """And whatever touches device memory on the host, but for the staging, raises."""
    host, device = make(name, options), make(name, options)
    # With thresholds of a first step, those predicted from it, and those corrected.
    for step in range(3 if name == "oktopk" and "codec" not in options else 2):
        x = gradient(step, dtype)
        given = fake_cupy.on_device(x)
        expected, result = host.allreduce(x), device.allreduce(given)
        assert isinstance(result, fake_cupy.ndarray) and result.dtype == x.dtype
        np.testing.assert_array_equal(fake_cupy.on_host(result), expected)
        np.testing.assert_array_equal(fake_cupy.on_host(given), x)
        seconds = {"seconds": {}}
        assert vars(device.last) | seconds == vars(host.last) | seconds
        if host.residual is not None:
            np.testing.assert_array_equal(fake_cupy.on_host(device.residual), host.residual)
    if name == "oktopk" and SIZE == 4:
        assert {"partition", "split", "threshold"} <= device.last.seconds.keys()
    is_packed = [word < 0 for word in first_words]  # and not plain
    assert any(is_packed) == ("codec" in options)
    staged = [line for line in fake_cupy.log if line.startswith("to host")]
    assert bool(staged) == (not aware and SIZE > 1)
    assert ("fence" in fake_cupy.log) == (SIZE > 1)


@one_way
def test_what_is_refused(aware):
    r = make("oktopk", {})
    x = gradient(0, "float32")
    r.allreduce(fake_cupy.on_device(x))
    with pytest.raises(UsageError, match="serves a tensor on cuda:0, it was given one on host"):
        r.allreduce(x)
    bad = x.copy()
    bad[7] = np.nan if RANK == SIZE - 1 else 0
    kept = fake_cupy.on_host(r.residual)
    with pytest.raises(NonFiniteGradient, match=f"of rank {SIZE - 1};"):
        r.allreduce(fake_cupy.on_device(bad))
    np.testing.assert_array_equal(fake_cupy.on_host(r.residual), kept)
    with pytest.raises(UsageError, match="dtype int32"):
        r.allreduce(fake_cupy.on_device(x.view(np.int32)))


@one_way
def test_state_and_sparse_results(aware):
    """A state goes from the host to a device and back; results as entries; in place."""
    options = {"dense_steps": 1}
    host, device, later = make("oktopk", options), make("oktopk", options), make("oktopk", options)
    for step in range(2):
        x = gradient(step, "float16")
        expected, found = host.allreduce_sparse(x), device.allreduce_sparse(fake_cupy.on_device(x))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(fake_cupy.on_host(mine), theirs)
    states = host.state_dict(), device.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        np.testing.assert_array_equal(states[1][key], value, err_msg=key)
    later.load_state_dict(states[0])
    x = gradient(2, "float16")
    in_place = fake_cupy.on_device(x)
    assert later.allreduce(in_place, out=in_place) is in_place
    np.testing.assert_array_equal(fake_cupy.on_host(in_place), host.allreduce(x))


def test_ranks_with_arrays_in_different_memory(aware):
    if SIZE == 1:
        pytest.skip("needs two ranks")
    x = gradient(0, "float32")
    with pytest.raises(PlanMismatch, match="memory is cuda on rank 0, host on rank"):
        make("dense", {}).allreduce(fake_cupy.on_device(x) if RANK == 0 else x)


def test_a_stand_in_is_not_to_be_touched(aware):
    """What the tests above rest on."""
    array = fake_cupy.on_device(np.ones(3, np.float32))
    for touch in (
        lambda: array[0],
        lambda: np.asarray(array),
        lambda: np.add(array, 1),
        lambda: np.searchsorted(array, 1),
        lambda: array + 1,
        lambda: list(array),
        lambda: array.get(),
        lambda: array.__setitem__(slice(None), np.zeros(3)),
        lambda: np.zeros(3).__setitem__(slice(None), array),
    ):
        with pytest.raises(fake_cupy.HostTouch):
            touch()


def test_two_ranks_on_one_gpu_are_told(aware, monkeypatch):
    monkeypatch.setattr(fake_cupy.Device, "bus", "7")
    note_gpu.cache_clear()
    x = fake_cupy.on_device(gradient(0, "float32"))
    if SIZE == 1:
        make("dense", {}).allreduce(x)
    else:
        with pytest.warns(UserWarning, match="ranks 0, 1.* share the GPU 0000:07:00.0 of .*--gpus-per-task=1"):
            make("dense", {}).allreduce(x)
    make("dense", {}).allreduce(x)  # said once
    note_gpu.cache_clear()
