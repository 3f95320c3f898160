"""A job that would not be what the user thinks it is does not start."""

import sys
import threading
from collections.abc import Callable

import pytest

from okrt.errors import UsageError
from okrt.world import LAUNCHER_SIZES, init
from tests.conftest import ALONE

INIT = "import okrt; okrt.init(); print('went on')"


@pytest.mark.parametrize(
    ("command", "variable"),
    [(["python", "-c", INIT], "OMPI_COMM_WORLD_SIZE"), (["okrt", "bench", "allreduce"], "SLURM_STEP_NUM_TASKS")],
    ids=["script", "okrt"],
)
def test_launcher_says_4_ranks_and_mpi_says_1(start: Callable, command: list[str], variable: str) -> None:
    done = start(*command, **{variable: "4"})
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"the launcher started 4 ranks ({variable}), but MPI (MPICH" in done.stderr
    assert "Use the mpiexec of this MPI library, or srun --mpi=pmi2" in done.stderr
    if command[0] == "okrt":
        assert done.returncode == 64
        # mpi4py may warn of the same, in lines of its own.
        assert len([line for line in done.stderr.splitlines() if line.startswith("okrt: ")]) == 1
        assert "Traceback" not in done.stderr


def test_launcher_of_one_rank_is_fine(start: Callable) -> None:
    done = start("python", "-c", INIT, PMI_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.skipif(not ALONE, reason="needs an MPI of one rank")
@pytest.mark.parametrize("variable", LAUNCHER_SIZES)
def test_each_launcher_is_heard(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """In this process: its MPI has one rank."""
    for hook in (sys, threading):
        monkeypatch.setattr(hook, "excepthook", hook.excepthook)
    for name in LAUNCHER_SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    assert init.__wrapped__().size == 1
    monkeypatch.setenv(variable, "4")
    with pytest.raises(UsageError, match=rf"the launcher started 4 ranks \({variable}\), but MPI \(MPICH"):
        init.__wrapped__()


@pytest.mark.parametrize(
    ("name", "value", "ranks"),
    [
        ("OKRT_TIMEOUT_S", "-1", None),
        ("OKRT_THREADS", "x", 2),
    ],
)
def test_bad_setting_of_a_command(start: Callable, name: str, value: str, ranks: int | None) -> None:
    done = start("okrt", "bench", "allreduce", "--elements", 100, "--steps", 1, ranks=ranks, **{name: value})
    assert done.returncode == 64
    assert f"{name}={value}: a positive number is needed" in done.stderr
    assert "Traceback" not in done.stderr
