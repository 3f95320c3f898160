"""DataParallel, DistributedOptimizer and LagAdamW with gradients that count as being on a GPU.

torch has no CUDA here: its tensors are in host memory, and only what okrt does with them takes the way of a device:
CuPy (the stand-in that the host cannot touch), kernels in the simulator, staging.
"""

import pytest
import torch

import okrt
from okrt import buffers
from okrt.engine import lag_adamw, side_stream
from okrt.transport import mpi
from tests import fake_cupy

RANK, SIZE = okrt.init().rank, okrt.init().size
pytestmark = [
    pytest.mark.usefixtures("simulator"),
    pytest.mark.skipif(SIZE == 3, reason="device arrays are tried at 1, 2 and 4 ranks"),
]
STEPS = 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture
def as_on_a_gpu(request, monkeypatch):
    """From the call on."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(mpi, "may_touch_device_memory", lambda: request.param)

    def declare() -> None:
        monkeypatch.setattr(buffers, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(lag_adamw, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(buffers, "stream_of", lambda tensor: 0)

    return declare


def trained(make_step) -> list[torch.Tensor]:
    """The parameters and buffers after some steps on this rank's own data."""
    model = Model()
    step, plain = make_step(model)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(100 * number + RANK)
        step(torch.randn(8, 6, generator=generator))
    return [tensor.detach().clone() for tensor in (*plain.parameters(), *plain.buffers())]


def with_data_parallel(optimizer, **options):
    def make(model):
        wrapped = okrt.DataParallel(model, **options)
        chosen = optimizer(wrapped.parameters())

        def step(x: torch.Tensor) -> None:
            chosen.zero_grad()
            wrapped(x).backward()
            chosen.step()

        return step, model

    return make


def with_updates(model):
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = okrt.DistributedOptimizer(momentum, model, density=0.2, momentum_masking=True)

    def step(x: torch.Tensor) -> None:
        chosen.zero_grad()
        model(x).backward()
        chosen.step()

    return step, model


WAYS = {
    "dense": with_data_parallel(lambda ps: torch.optim.AdamW(ps, lr=1e-2), reducer="dense", bucket_mb=1e-4),
    "lag-aware": with_data_parallel(lambda ps: okrt.LagAdamW(ps, lr=1e-2), density=0.2, complete=True, clip_norm=1.0),
    "updates": with_updates,
}


# Whether MPI touches device memory, by the number of ranks: each way of training with both.
IS_AWARE = {
    1: [("dense", True), ("lag-aware", False), ("updates", True)],
    2: [("dense", True), ("dense", False), ("lag-aware", False), ("updates", True)],
    4: [("lag-aware", True), ("updates", False)],
}


@pytest.mark.parametrize(
    ("way", "as_on_a_gpu"),
    [
        pytest.param(way, aware, id=f"{way}-{'CUDA-aware' if aware else 'staged'}")
        for way, aware in IS_AWARE.get(SIZE, [])
    ],
    indirect=["as_on_a_gpu"],
)
def test_equal_to_the_host(as_on_a_gpu, way):
    expected = trained(WAYS[way])
    as_on_a_gpu()
    result = trained(WAYS[way])
    assert fake_cupy.log or SIZE == 1  # alone nothing is sent
    for mine, theirs in zip(result, expected, strict=True):
        # LagAdamW's entries are stepped by torch on a GPU, by a kernel on the host.
        torch.testing.assert_close(mine, theirs, rtol=1e-6 if way == "lag-aware" else 0, atol=1e-8)


def test_a_side_stream_waits_for_the_caller_and_the_caller_for_it(monkeypatch):
    said = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            said.append(f"{self.name} records")
            return f"event of {self.name}"

        def wait_event(self, event):
            said.append(f"{self.name} waits for {event}")

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            said.append(f"on {self.name}")

        def __exit__(self, *_):
            said.append(f"off {self.name}")

    monkeypatch.setattr(side_stream, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("backward"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Stream("GPU"))
    side = side_stream.SideStream(torch.zeros(1))
    job = side.after_this(lambda: said.append("the job"))
    assert said == ["backward records"]
    job()
    side.join()
    expected = ["on GPU", "on side", "side waits for event of backward", "the job", "off side", "off GPU"]
    assert said[1:] == [*expected, "backward waits for side"]
