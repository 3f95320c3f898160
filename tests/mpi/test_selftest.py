"""The GPU of `okrt selftest`, by a stand-in: rings through MPI and a reducer, in memory that the host cannot touch."""

from types import SimpleNamespace

import pytest
from rich.progress import Progress

import okrt
from okrt.cli.selftest import Gpu
from okrt.cli.tally import Tally
from okrt.perf.reducer_checks import check_reducer
from okrt.perf.ring import MESSAGE_WORDS, check_ring
from okrt.transport import cuda_aware, mpi
from tests import fake_cupy

pytestmark = pytest.mark.usefixtures("simulator")
WORLD = okrt.init()
several = pytest.mark.skipif(WORLD.size == 1, reason="needs two ranks")
MESSAGES = 2 * len(MESSAGE_WORDS)


class Chosen(fake_cupy.Device):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        assert number == 0

    def use(self) -> None:
        fake_cupy.log.append("chosen")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """One GPU for all ranks; a parameter is the verdict on MPI."""
    aware = getattr(request, "param", True)
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(fake_cupy.cuda, "runtime", SimpleNamespace(getDeviceCount=lambda: 1), raising=False)
    monkeypatch.setattr(fake_cupy.cuda, "Device", Chosen)
    monkeypatch.setattr(fake_cupy.cuda, "Stream", lambda non_blocking: fake_cupy.Stream())
    found = cuda_aware.Verdict(aware, "so they say", "")
    # Of the last rank; it counts for all.
    last = WORLD.rank == WORLD.size - 1
    monkeypatch.setattr(cuda_aware, "verdict", lambda: found if last else cuda_aware.Verdict(True, "yes", ""))
    monkeypatch.setattr(mpi, "may_touch_device_memory", lambda: bool(aware))
    return Gpu(WORLD)


@several
@pytest.mark.parametrize("gpu", [True, None], indirect=True)
def test_rings(gpu: Gpu) -> None:
    assert "chosen" in fake_cupy.log
    tally = Tally(WORLD.transport, Progress(disable=True))
    fake_cupy.log.clear()
    with gpu.working():
        gpu.rings(WORLD, tally)
    assert tally.failures == {}
    is_aware = tally.rows["ring, direct"].checks > 0
    assert tally.checks == MESSAGES * (2 if is_aware else 1)
    if not is_aware:
        assert tally.rows["ring, direct"].note.endswith(f"CUDA-aware: rank {WORLD.size - 1}: so they say")
    # Each message is read on the host to be checked; a staged one also to be sent.
    copies = [line for line in fake_cupy.log if line.startswith("to host")]
    assert len(copies) == MESSAGES * (3 if is_aware else 2)


@several
def test_a_reducer_in_device_memory(gpu: Gpu) -> None:
    with gpu.working():
        assert set(check_reducer("dense", mpi.MpiTransport(WORLD.comm, 60), gpu.kernels, 70)) == {""}


@several
def test_a_message_that_arrives_wrong(gpu: Gpu) -> None:
    class Lossy(mpi.MpiTransport):
        def exchange(self, outgoing, incoming):
            for peer, message in super().exchange(outgoing, incoming):
                if self.rank == 1:
                    message[:1] = 77
                yield peer, message

    tally = Tally(WORLD.transport, Progress(disable=True))
    with gpu.working():
        tally.add("ring", check_ring(Lossy(WORLD.comm, 60), gpu.kernels), is_collective=True)
    assert tally.verdict() == "selftest failed: ring (rank 1)"
    assert "6 of 6 checks, the first: 1 of 1 words from rank 0 are wrong" in tally.failures["ring"][1]
