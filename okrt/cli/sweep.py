"""okrt sweep: a grid of measurements, point after point, into one HDF5 file; killed anywhere, it goes on from there."""

import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import mpi4py
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from okrt.cli.launch import check_lab
from okrt.errors import EX_REQUEUE, UsageError
from okrt.report.sweep_file import DONE, FAILED, Sweep
from okrt.sweep.lock import SweepLock
from okrt.sweep.runner import Interrupted, Runner, pending
from okrt.sweep.spec import Spec, load_spec
from okrt.train.stop import STOP_SIGNALS, StopFlag
from okrt.world import launcher_size

INTERRUPTED = 130
READY = Path(__file__).parent.parent / "perf" / "sweeps"


def sweep(
    spec: Annotated[str, typer.Argument(help="a TOML file with a grid, or the name of a ready one such as default")],
    out: Annotated[Path, typer.Option(help="file for all points; goes on with it if it is there")] = Path("sweep.h5"),
    points: Annotated[
        list[int] | None, typer.Option("--point", help="only this point of the grid (may be repeated)", min=0)
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="what starts ranks, such as 'srun --mpi=pmi2'; if not given: srun in an allocation, or mpiexec"
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="measure the points that failed again")] = False,
    mix_code: Annotated[
        bool, typer.Option("--mix-code", help="go on with a file that other code began; each point tells its code")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--list", help="only show the points, with their numbers")] = False,
) -> int:
    """Measures every point of a grid of ranks, reducers, densities and sizes, and keeps all samples.

    Each point is a job of its own: ranks on this machine, hosts of a lab, or a step of srun in an allocation. It is
    repeated until the 95 % interval of the median is narrow enough, or the spec's limit is reached. Started again, the
    command goes on where it was. A point that fails is noted with its reason, and the exit code is 1 in the end.
    """
    # A sweep is no rank: some MPI libraries refuse to start without a launcher.
    mpi4py.rc.initialize = False
    told = launcher_size()
    if told is not None:
        raise UsageError(f"okrt sweep starts its ranks itself, but a launcher started it ({told[0]}={told[1]})")
    grid = load_spec(find_spec(spec))
    chosen = check_points(grid, points)
    for lab in grid.file.grid.lab:
        if lab:
            check_lab(lab)
    screen = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 132)
    if dry_run:
        screen.print(table_of_settings(grid, chosen))
        return 0
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise OSError(f"--out {out}: cannot write it")
    if launcher is None and in_allocation() and shutil.which("srun"):
        launcher = "srun"
    if launcher and in_allocation():
        check_allocation(grid, chosen)
    stop = StopFlag()
    runner = Runner(grid, out, shlex.join(sys.argv), launcher, stop)
    with stop.listening((*STOP_SIGNALS, signal.SIGINT)), SweepLock(out, shared=points is not None) as lock:
        if points is None:
            runner.tidy()
        state = runner.open(lock, chosen if retry else None, mix_code)
        todo = pending(state, chosen)
        try:
            state = run_all(runner, lock, state, todo, screen)
        except Interrupted:
            screen.print(f"interrupted: {out} has all points that were done; the same command goes on")
            return INTERRUPTED if "SIGINT" in stop.names else EX_REQUEUE
    return conclude(state, chosen, out, screen)


def find_spec(name: str) -> Path:
    """The file of that path, or the ready spec of that name."""
    path, ready = Path(name), {file.stem: file for file in READY.glob("*.toml")}
    if path.is_file():
        return path
    if name not in ready:
        raise UsageError(
            f"no spec {name}: give the path of one, or the name of a ready one ({', '.join(sorted(ready))})"
        )
    return ready[name]


def check_points(grid: Spec, points: list[int] | None) -> list[int]:
    if points is None:
        return list(range(len(grid.points)))
    for number in points:
        if number >= len(grid.points):
            raise UsageError(f"--point {number}: the grid has points 0 to {len(grid.points) - 1} (--list shows them)")
    return sorted(set(points))


def in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def check_allocation(grid: Spec, chosen: list[int]) -> None:
    """There are ranks enough for all points."""
    most, tasks = max(grid.points[number]["ranks"] for number in chosen), os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) < most:
        raise UsageError(f"the grid has points of {most} ranks, this allocation has {tasks} tasks: ask for more")


def run_all(runner: Runner, lock: SweepLock, state: Sweep, todo: list[int], screen: Console) -> Sweep:
    """The file as it is after the last point."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    shown = Console(file=sys.stderr)
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(todo), left="")
        began = time.monotonic()
        for done, number in enumerate(todo):
            left = time_left(time.monotonic() - began, done, len(todo) - done)
            progress.update(task, description=named(runner.spec.points[number]), left=left)
            state = runner.run(number, lock)
            progress.advance(task)
            left = time_left(time.monotonic() - began, done + 1, len(todo) - done - 1)
            screen.print(
                f"{done + 1}/{len(todo)}  {line(state, number)}{f'  ({left})' if left else ''}", soft_wrap=True
            )
    return state


def time_left(spent_s: float, done: int, left: int) -> str:
    """By the mean of the points so far."""
    if not done or not left:
        return ""
    seconds = spent_s / done * left
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def named(point: dict[str, Any]) -> str:
    words = [f"{point['ranks']} rank{'s' * (point['ranks'] != 1)}", point["reducer"]]
    words += [f"{name} {value}" for name, value in point.items() if name not in ("ranks", "reducer") and value != ""]
    return ", ".join(words)


def line(state: Sweep, number: int) -> str:
    """What came of a point."""
    row = {name: column[number] for name, column in state.points.items()}
    if row["status"] == FAILED:
        return f"{named(state.setting(number))}: FAILED: {row['reason']}"
    low, high = (1e3 * row[f"ci95_{end}_s"] for end in ("low", "high"))
    return (
        f"{named(state.setting(number))}: {1e3 * row['median_s']:.1f} ms ({low:.1f} to {high:.1f}), "
        f"{row['repetitions']} steps, {row['words_over_k_median']:.2f} words/k"
    )


def table_of_settings(grid: Spec, chosen: list[int]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("point", *grid.points[0]):
        shown.add_column(heading, justify="right")
    for number in chosen:
        shown.add_row(str(number), *(str(value) for value in grid.points[number].values()))
    return shown


def conclude(state: Sweep, chosen: list[int], out: Path, screen: Console) -> int:
    done = [number for number in state.numbers(DONE) if number in chosen]
    failed = [number for number in state.numbers(FAILED) if number in chosen]
    screen.print(f"{len(done)} of {len(chosen)} points measured, {len(failed)} failed: {out}", soft_wrap=True)
    if failed:
        screen.print(f"--retry measures the failed points again: {', '.join(map(str, failed))}", soft_wrap=True)
    return int(bool(failed))
