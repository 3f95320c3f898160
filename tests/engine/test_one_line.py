"""An ordinary torch script with one line added, against the same script under torch's DistributedDataParallel."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ALONE

SCRIPT = Path(__file__).parent.parent / "scripts" / "ordinary.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
LINES = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model)",
    "dense": 'model = __import__("okrt").DataParallel(model, reducer="dense")',
    "oktopk": 'model = __import__("okrt").DataParallel(model, reducer="oktopk", density=0.05)',
}
# The ranks run one script after the other: starting them takes longer than the training.
DRIVER = """
import os, runpy, sys
from contextlib import redirect_stdout
import torch

rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
store = f"file://{os.getcwd()}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
for name in sys.argv[1:]:
    with open(f"{name}.{rank}", "w") as file, redirect_stdout(file):
        runpy.run_path(f"{name}.py", run_name="__main__")
torch.distributed.destroy_process_group()
"""


def write(folder: Path, *names: str) -> None:
    """The scripts, and what runs them."""
    (folder / "driver.py").write_text(DRIVER)
    for name in names:
        (folder / f"{name}.py").write_text(SCRIPT.read_text().replace("# HERE\n", LINES[name] + "\n"))


def losses(folder: Path, *names: str) -> list[np.ndarray]:
    """What each script printed: loss of the last batch of rank 0 and of all data, after each epoch."""
    printed = [(folder / f"{name}.0").read_text() for name in names]
    return [np.array([line.split()[2:] for line in text.splitlines()], float) for text in printed]


def check_dense(dense: np.ndarray, ddp: np.ndarray) -> None:
    assert dense.shape == (4, 2)
    np.testing.assert_allclose(dense, ddp, rtol=2e-4)
    assert dense[-1, 1] < 0.8 * dense[0, 1]


def test_dense_gives_the_losses_of_ddp_and_oktopk_trains_too(tmp_path):
    names = ("dense", "ddp", "oktopk")
    write(tmp_path, *names)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OKRT_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [MPIEXEC, "-n", "2", sys.executable, "driver.py", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    dense, ddp, oktopk = losses(tmp_path, *names)
    check_dense(dense, ddp)
    assert oktopk.shape == (4, 2)
    assert oktopk[-1, 1] < 0.9 * oktopk[0, 1]
    assert (np.abs(oktopk - dense) > 1e-3).any(), "something is left out"


@pytest.mark.skipif(not ALONE, reason="needs an MPI of one rank")
def test_one_rank(tmp_path, monkeypatch):
    """In this process."""
    names = ("dense", "ddp")
    write(tmp_path, *names)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["driver.py", *names])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed wraps it
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    runpy.run_path("driver.py")
    check_dense(*losses(tmp_path, *names))
