"""An ordinary torch script with one line added, against the same script under torch's DistributedDataParallel."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "ordinary.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
DDP = """
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=size)
model = nn.parallel.DistributedDataParallel(model)
"""


def losses(folder: Path, ranks: int, line: str) -> np.ndarray:
    """What the script prints: loss of the last batch of rank 0 and of all data, after each epoch."""
    script = folder / "script.py"
    script.write_text(SCRIPT.read_text().replace("# HERE\n", line + "\n"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OKRT_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [MPIEXEC, "-n", str(ranks), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return np.array([line.split()[2:] for line in done.stdout.splitlines()], float)


@pytest.mark.parametrize("ranks", [1, 3])
def test_dense_gives_the_losses_of_ddp(tmp_path, ranks):
    ours = losses(tmp_path, ranks, 'model = __import__("okrt").DataParallel(model, reducer="dense")')
    ddp = losses(tmp_path, ranks, DDP.format(store=tmp_path / "store"))
    assert ours.shape == (4, 2)
    np.testing.assert_allclose(ours, ddp, rtol=2e-4)
    assert ours[-1, 1] < 0.8 * ours[0, 1]


def test_oktopk_trains_it_too(tmp_path):
    ours = losses(tmp_path, 2, 'model = __import__("okrt").DataParallel(model, reducer="oktopk", density=0.05)')
    assert ours[-1, 1] < 0.9 * ours[0, 1]
