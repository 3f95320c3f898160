"""Whatever goes wrong on one rank ends the whole job, at once, and says what and where."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 5
STAMP = "raised at "

# All ranks have done a first step, so what follows is not start-up. They meet as the ranks of any reducer do.
PROLOGUE = """
import os, signal, sys, threading, time
import numpy as np
import okrt
from okrt.errors import UsageError

world = okrt.init()
x = np.ones(1000, np.float32)
world.transport.allreduce(x, "sum")

def stamp():
    print(f"{STAMP}{time.time()}", file=sys.stderr, flush=True)
    time.sleep(0.3)  # the others are waiting by now

def broken_part():
    stamp()
    raise RuntimeError("broken on purpose")

def in_thread():
    thread = threading.Thread(target=broken_part)
    thread.start()
    time.sleep(60)

def killed():
    stamp()
    os.kill(os.getpid(), signal.SIGKILL)

def broken_beside_torch():
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # wraps sys.excepthook
    broken_part()

def users_mistake():
    stamp()
    raise UsageError("density is 7: choose less")

def stall():
    stamp()
    time.sleep(60)
"""
PROLOGUE = PROLOGUE.replace("{STAMP}", STAMP)

# On PYTHONPATH: breaks the benchmark of rank 1 in its third step.
SABOTAGE = f"""
import sys, time
from okrt.perf import synthetic

whole = synthetic.SyntheticGradient.__call__

def broken_part(self, step):
    if self._rank == 1 and step == 2:
        print(f"{STAMP}{{time.time()}}", file=sys.stderr, flush=True)
        raise RuntimeError("broken on purpose")
    return whole(self, step)

synthetic.SyntheticGradient.__call__ = broken_part
"""
BENCH = ["bench", "allreduce", "--elements", "20000", "--reducers", "oktopk", "--steps", "20"]


def seconds_to_end(done: Any) -> float:
    (stamp,) = [line for line in done.stderr.splitlines() if STAMP in line]
    return done.ended - float(stamp.split(STAMP)[1].split()[0])


@pytest.fixture
def fail_at(start: Callable, tmp_path: Path) -> Callable:
    """Runs a job in which one rank does `what` while the others wait for it in an all-reduction."""

    def run(what: str, rank: int = 1, ranks: int = 2, **options: Any) -> Any:
        script = tmp_path / "job.py"
        script.write_text(f"{PROLOGUE}\nif world.rank == {rank}:\n    {what}()\nworld.transport.allreduce(x, 'sum')\n")
        return start("python", script, ranks=ranks, **options)

    return run


@pytest.mark.parametrize(
    ("what", "rank", "ranks"),
    [("broken_part", 2, 3), ("in_thread", 0, 2), ("broken_beside_torch", 1, 2)],
)
def test_exception_in_a_script(fail_at: Callable, what: str, rank: int, ranks: int) -> None:
    done = fail_at(what, rank, ranks)
    assert done.returncode == 1
    assert seconds_to_end(done) < LIMIT_S
    assert f"rank {rank}: Traceback" in done.stderr
    assert "in broken_part" in done.stderr
    assert "RuntimeError: broken on purpose" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        (["python", "-m", "okrt", *BENCH], {"ranks": 2}),
        (["okrt", *BENCH], {"ranks": 2}),
        (["okrt", *BENCH, "--ranks", "2"], {}),
    ],
    ids=["mpiexec python -m okrt", "mpiexec okrt", "okrt --ranks"],
)
def test_exception_in_a_command(start: Callable, tmp_path: Path, command: list[str], launch: dict[str, int]) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    done = start(*command, PYTHONPATH=str(tmp_path), **launch)
    assert done.returncode == 1
    assert seconds_to_end(done) < LIMIT_S
    assert "rank 1: Traceback" in done.stderr
    assert "in broken_part" in done.stderr
    assert "RuntimeError: broken on purpose" in done.stderr
    assert done.stdout == ""


def test_kill_9(fail_at: Callable) -> None:
    done = fail_at("killed")
    assert done.returncode != 0
    assert seconds_to_end(done) < LIMIT_S


def test_mistake_of_the_user_on_one_rank(fail_at: Callable) -> None:
    done = fail_at("users_mistake")
    assert done.returncode == 64
    assert seconds_to_end(done) < LIMIT_S
    assert [line for line in done.stderr.splitlines() if "density" in line] == [
        "okrt: rank 1: density is 7: choose less"
    ]
    assert "Traceback" not in done.stderr


def test_a_rank_that_stops_taking_part(fail_at: Callable) -> None:
    done = fail_at("stall", OKRT_TIMEOUT_S="3")
    assert done.returncode == 70
    assert seconds_to_end(done) < 3 + LIMIT_S
    assert "StallError: rank " in done.stderr
    assert "of 2 waited 3 s for an all-reduction of" in done.stderr


def test_a_rank_that_never_starts(start: Callable, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import time\n"
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n    time.sleep(60)\n"
        "import okrt\nokrt.init()\n"
    )
    begin = time.monotonic()
    done = start("python", script, ranks=2, OKRT_TIMEOUT_S="3")
    assert time.monotonic() - begin < 40
    assert done.returncode == 70
    assert "waited 3 s for all ranks to start" in done.stderr


def test_a_bad_setting_on_one_rank(start: Callable, tmp_path: Path) -> None:
    """It is found before MPI starts: the others must not wait for this rank for ever."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os\n"
        "if os.environ.get('PMI_RANK') == '1':\n    os.environ['OKRT_TIMEOUT_S'] = 'soon'\n"
        "import okrt\nokrt.init()\nokrt.reducer('dense')\n"
    )
    done = start("python", script, ranks=2, limit_s=30)
    assert done.returncode != 0
    assert "OKRT_TIMEOUT_S=soon: a positive number is needed" in done.stderr


def test_nothing_goes_wrong(fail_at: Callable) -> None:
    done = fail_at("int")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
