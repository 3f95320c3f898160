"""A job that would not be what the user thinks it is does not start."""

from collections.abc import Callable

import pytest

INIT = "import okrt; okrt.init(); print('went on')"


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("command", [["python", "-c", INIT], ["okrt", "bench", "allreduce"]], ids=["script", "okrt"])
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


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"])
def test_launcher_of_one_rank_is_fine(start: Callable, variable: str) -> None:
    done = start("python", "-c", INIT, **{variable: "1"})
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "value", "ranks"),
    [
        ("OKRT_TIMEOUT_S", "-1", None),
        ("OKRT_TIMEOUT_S", "soon", 2),
        ("OKRT_THREADS", "0", None),
        ("OKRT_THREADS", "x", 2),
    ],
)
def test_bad_setting_of_a_command(start: Callable, name: str, value: str, ranks: int | None) -> None:
    done = start("okrt", "bench", "allreduce", "--elements", 100, "--steps", 1, ranks=ranks, **{name: value})
    assert done.returncode == 64
    assert f"{name}={value}: a positive number is needed" in done.stderr
    assert "Traceback" not in done.stderr
