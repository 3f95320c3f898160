"""A training job that is told to stop, or in which a rank fails: it ends soon, and what it has done is kept."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import okrt
from okrt.train.checkpoint import Checkpoints, Saved
from okrt.train.metrics import read_steps

LIMIT_S = 10
PATIENCE_S = 110  # to start on a busy machine
STAMP = "fails at "
STEPS = 40

# The environment says what rank 1 (or whoever gets the signal) meets in its third step.
TASK = """
import itertools, os, signal, sys, time
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

import okrt
from okrt.train import Task

class Settings(BaseModel):
    pass

def launcher():
    pid = os.getpid()
    while not Path(f"/proc/{pid}/comm").read_text().startswith("mpiexec"):
        pid = parent(pid)
    return pid

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def fail(rank):
    fault = os.environ.get("FAULT", "")
    if fault == "signal" and rank == 0:
        pid = parent(launcher())
        assert b"train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGUSR2)
    elif fault in ("raise", "kill") and rank == 1:
        print(f"STAMP{time.time()}", file=sys.stderr, flush=True)
        time.sleep(0.3)
        if fault == "raise":
            raise RuntimeError("broken on purpose")
        os.kill(os.getpid(), signal.SIGKILL)

def build(settings, seed):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((64, 20), dtype=np.float32))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.2), nn.Linear(20, 20))
    calls = itertools.count(1)

    def loss(model, numbers):
        call = next(calls)
        if call == 3:
            fail(okrt.init().rank)
        if "FAULT" in os.environ and call >= 3:
            time.sleep(0.2)
        return (model(x[numbers]) - x[numbers]).square().mean()

    return Task(model, 64, loss, 4, lambda model, numbers: {"loss": 0.0}, "synthetic: 64 points")
""".replace("STAMP", STAMP)
JOB = f"""
steps = {STEPS}
batch = 2
[task]
module = "tiny"
[optimizer]
lr = 0.02
[reducer]
density = 0.1
"""

# Two ranks that run two jobs, one after the other: each argument is a folder to resume or to begin.
DRIVER = """
import sys
from pathlib import Path
from okrt.cli.train import train

for folder in map(Path, sys.argv[2:]):
    assert train(sys.argv[1], None, [], folder, folder.exists()) == 0
assert "torch._dynamo" not in sys.modules, "a compiler that takes two seconds to load, and that nobody has asked for"
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "tiny.py").write_text(TASK)
    path = folder / "tiny.toml"
    path.write_text(JOB)
    return path


def newest(run: Path) -> Saved:
    passed_over: list[str] = []
    found = Checkpoints(run / "checkpoints", okrt.init().transport, log=passed_over.append).newest()
    assert found is not None
    assert passed_over == []
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that a signal stops."""
    return tmp_path_factory.mktemp("runs") / "run"


def test_a_signal_ends_it_with_a_checkpoint(start: Callable, job: Path, run: Path) -> None:
    """SIGUSR2 to okrt: it sends SIGTERM to mpiexec, which passes it on to the ranks."""
    done = start("okrt", "train", job, "--out", run, "--ranks", 2, limit_s=PATIENCE_S, FAULT="signal")
    assert done.returncode == 75, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = newest(run).step
    assert 3 <= step < STEPS
    assert checkpoint.name == f"step_{step:08d}"
    assert f"stopped by SIGTERM after step {step}\n" in done.stdout
    np.testing.assert_array_equal(read_steps(run / "run.h5")["step"], np.arange(1, step + 1))


def test_after_a_signal_it_goes_on(start: Callable, job: Path, run: Path, tmp_path: Path) -> None:
    assert run.exists(), "run it together with the test above"
    stopped = newest(run).step
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    done = start("python", driver, job, tmp_path / "unbroken", run, ranks=2, limit_s=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    expected = newest(tmp_path / "unbroken")
    assert f"resumed step_{stopped:08d}\n" in done.stdout
    end = newest(run)
    assert end.step == STEPS
    for name, weight in expected.model().items():
        assert torch.equal(end.model()[name], weight), name
    np.testing.assert_array_equal(read_steps(run / "run.h5")["step"], np.arange(1, STEPS + 1))


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_fails_in_the_middle_of_a_step(start: Callable, job: Path, tmp_path: Path, fault: str) -> None:
    command = ["okrt", "train", job, "--out", tmp_path / "run", "--set", "checkpoint.every=2"]
    done = start(*command, ranks=2, limit_s=PATIENCE_S, FAULT=fault)
    if fault == "raise":
        assert done.returncode == 1
        assert "rank 1: Traceback" in done.stderr
        assert "RuntimeError: broken on purpose" in done.stderr
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.returncode not in (0, 75)
        assert "KILLED" in (done.stdout + done.stderr).upper()
    (stamp,) = [line for line in done.stderr.splitlines() if STAMP in line]
    assert done.ended - float(stamp.split(STAMP)[1].split()[0]) < LIMIT_S
    assert newest(tmp_path / "run").step == 2
    np.testing.assert_array_equal(read_steps(tmp_path / "run" / "run.h5")["step"], [1, 2])
