"""Under several MPI ranks a test that fails or hangs on one rank ends the job, and says which rank and which test."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from mpi4py import MPI

WHO = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
ALONE = MPI.COMM_WORLD.size == 1
FIRST = ("tests/test_many_ranks.py", "tests/slurm/test_submit.py")
FORWARD_S = 0.3  # mpiexec ends at once on an abort, with what it has not yet passed on
HEAD_START_S = 0.5  # the name of a hanging test is out before pytest-timeout dumps the stacks

hypothesis.settings.register_profile("okrt", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("okrt")


class EndTheJob:
    """The other ranks may wait for a rank that has failed: print its report and end them all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._end_if_failed(report, f" ({report.when})")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._end_if_failed(report, " (collection)")

    def _end_if_failed(self, report: Any, when: str) -> None:
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.sep("=", f"{WHO}: {report.nodeid}{when} failed, ending the job")
            terminal.write(f"{report.longreprtext}\n")
            for title, text in report.sections:
                terminal.write(f"--- {title}\n{text}\n")
            terminal.flush()
            time.sleep(FORWARD_S)
            MPI.COMM_WORLD.Abort(1)
            time.sleep(FORWARD_S)  # it may return before the job is ended
            os._exit(1)


class NameWhatHangs:
    """pytest-timeout shows stacks, not the rank and not the parameters of the test."""

    def __init__(self) -> None:
        self._timer = threading.Timer(0, lambda: None)

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Iterator[None]:
        def name_it() -> None:
            terminal = item.config.get_terminal_writer()
            terminal.write(f"\n{WHO}: {item.nodeid} has not ended after {settings.timeout:g} s\n", flush=True)

        self._timer = threading.Timer(max(0.0, settings.timeout - HEAD_START_S), name_it)
        self._timer.daemon = True
        self._timer.start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> Iterator[None]:
        self._timer.cancel()
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    config.pluginmanager.register(NameWhatHangs())
    if not ALONE:
        config.pluginmanager.register(EndTheJob(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that start the most ranks and that wait the longest would be the last, with one core idle."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at them again and again."""
    gc.freeze()
    gc.enable()


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start() -> Start:
    """Runs a command, with `ranks` under mpiexec, and returns what it printed; one that hangs is ended.

    "python" and "okrt" are those of this environment. The time it ended is in `ended`, as time.time() gives it.
    """
    if not ALONE:
        pytest.skip("starts ranks of its own: run it as a single process")
    scripts = Path(sys.executable).parent

    def run(*argv: Any, ranks: int | None = None, limit_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(scripts / argv[0]), *map(str, argv[1:])]
        if ranks is not None:
            command = [str(scripts / "mpiexec"), "-n", str(ranks), *command]
        single = {"OKRT_THREADS": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        launched = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "HYDRA_", "MPIR_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
        job = subprocess.Popen(
            command,
            env=clean | single | env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = job.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            out, err = job.communicate(timeout=10)
            pytest.fail(f"{command} has not ended after {limit_s} s\n{out}\n{err}")
        done = subprocess.CompletedProcess(command, job.returncode, out, err)
        done.ended = time.time()  # type: ignore[attr-defined]
        return done

    return run


@pytest.fixture(scope="module")
def simulator() -> Iterator[None]:
    """Numba's simulator of CUDA, its threads in turn."""
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install 'okrt[cuda12]'")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        pytest.skip("set NUMBA_ENABLE_CUDASIM=1, as make test does")
    from tests.simulator import installed

    yield from installed()
