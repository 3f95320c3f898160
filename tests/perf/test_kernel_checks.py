"""The checks of the selftest on the kernels for GPUs: the simulator, and memory that the host cannot touch."""

import os

import numpy as np
import pytest

from okrt.kernels.host import Host
from okrt.perf.kernel_checks import check_kernel, names
from okrt.perf.kernel_inputs import KINDS, TYPES, Inputs, sample
from okrt.perf.kernel_speed import COPY, TRAFFIC_WORDS, speeds
from tests import fake_cupy

pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install 'okrt[cuda12]'")
if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("set NUMBA_ENABLE_CUDASIM=1, as make test does", allow_module_level=True)

from okrt.kernels.cuda import Device

pytestmark = pytest.mark.usefixtures("simulator")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake_cupy.install(monkeypatch)
    return Device()


def test_all_pass(device: Device) -> None:
    inputs = [Inputs(0), Inputs(70, "ties")]
    assert names(Device) == names(Host)
    for name in names(device):
        assert set(check_kernel(device, name, inputs)) == {""}, name


def test_what_is_broken_is_told(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Device.scatter_add
    monkeypatch.setattr(Device, "scatter_add", lambda self, dense, index, value: right(self, dense[1:], index, value))
    (wrong,) = check_kernel(device, "scatter_add", [Inputs(70, "ties")])
    assert wrong.startswith("70 elements, ties, fp32: array 0 is wrong at ")


def test_speeds(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("okrt.perf.kernel_speed.ROUNDS", 1)
    monkeypatch.setattr("okrt.perf.kernel_speed.CALLS", 1)
    monkeypatch.setattr("okrt.perf.kernel_speed.TRAFFIC_WORDS", {"mean": TRAFFIC_WORDS["mean"]})
    found = dict(speeds(device, 70))
    assert list(found) == [COPY, "mean"]
    assert min(found.values()) > 0
    assert fake_cupy.log[-1] == "fence"


def test_all_that_move_data_are_timed() -> None:
    assert set(TRAFFIC_WORDS) == set(names(Host)) - {"cuts"}


@pytest.mark.parametrize("type_name", TYPES)
def test_subnormal_numbers_are_subnormal(type_name: str) -> None:
    dtype, word, mantissa, infinity = TYPES[type_name]
    for kind in KINDS:
        words = sample(np.random.default_rng(0), kind, 500, type_name).view(word)
        magnitude = words & (2 ** (8 * np.dtype(dtype).itemsize - 1) - 1)
        assert magnitude.max() < infinity
        assert (magnitude.max() < 1 << mantissa) == (kind in ("zeros", "subnormal"))
