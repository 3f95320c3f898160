"""Starting the ranks of a command that no launcher has started."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from okrt.errors import UsageError
from okrt.perf.lab import Lab, LabError, parse_rate
from okrt.world import World, launcher_size

TERMINAL_WIDTH = "OKRT_TERMINAL_WIDTH"  # tells rank 0, which writes into a pipe, that a person is watching


def started_by_launcher(ranks: int | None) -> bool:
    """True if this process is a rank already; an error if the launcher started another number than --ranks."""
    told = launcher_size()
    if told is None:
        return False
    if ranks is not None and ranks != told[1]:
        raise UsageError(f"the launcher started {told[1]} ranks ({told[0]}), --ranks says {ranks}: leave --ranks out")
    return True


def check_lab(rate: str) -> None:
    try:
        parse_rate(rate)
    except ValueError as error:
        raise UsageError(f"--lab: {error}") from None


def start_ranks(ranks: int, lab: str | None, launcher: list[str] | None = None) -> int:
    """Runs this very command on that many ranks, one to a host of the lab if there is one; its exit code.

    launcher: what starts ranks in place of mpiexec, such as srun.
    """
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}: at least one rank is needed")
    command = [sys.executable, "-m", "okrt", *sys.argv[1:]]
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OKRT_THREADS"):
        environment.setdefault(name, str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if sys.stderr.isatty():
        environment[TERMINAL_WIDTH] = str(shutil.get_terminal_size().columns)
    if lab is None:
        return run_forwarding([*(launcher or mpiexec()), "-n", str(ranks), *command], environment)
    try:
        with Lab(ranks, lab) as hosts:
            return hosts.run(command, environment).returncode
    except LabError as error:
        raise UsageError(f"--lab {lab}: {error}") from None


def run_forwarding(command: list[str], environment: dict[str, str]) -> int:
    """Runs the launcher; a signal that asks the ranks to stop reaches them, as the one that launchers pass on."""
    with subprocess.Popen(command, env=environment) as launcher:

        def forward(number: int, frame: Any) -> None:
            launcher.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            return launcher.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def mpiexec() -> list[str]:
    """The launcher beside this Python, or the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("no mpiexec found: install one with pip install 'okrt[mpich]', or start okrt with srun")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        return [found, "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    return [found]


def console(world: World, file: Any) -> Console:
    """A console on `file`; rank 0 may write colours through the launcher's pipe if a person watches its end."""
    width = os.environ.get(TERMINAL_WIDTH)
    if world.rank == 0 and width:
        return Console(file=file, force_terminal=True, width=int(width))
    return Console(file=file, width=None if file.isatty() else 132)
