"""okrt train: a job file becomes a trained model, its metrics and its checkpoints."""

import contextlib
import gc
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from okrt.cli.launch import console, start_ranks, started_by_launcher
from okrt.cli.mistakes import checking
from okrt.errors import UsageError
from okrt.train.config import Job, find_job, load_job, read_job
from okrt.train.stop import StopFlag
from okrt.world import agree, init

if TYPE_CHECKING:
    from okrt.train.task import Task


def train(
    job: Annotated[str, typer.Argument(help="a job file, or the name of a ready job such as gpt_bytes")],
    ranks: Annotated[int | None, typer.Option(help="ranks to start, when no launcher did")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="change a key of the job: reducer.density=0.02 (may be repeated)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for run.h5 and checkpoints  [default: runs/JOB]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint in --out")] = False,
    lab: Annotated[str | None, typer.Option(help="one host per rank at this rate, such as 100mbit; needs root")] = None,
) -> int:
    """Trains a job: the model and data that it names, over all ranks.

    Leaves run.h5 (readable while it runs), checkpoints and result.json in --out. SIGTERM or SIGUSR2 ends it after the
    current step with a checkpoint and exit code 75; --resume goes on, bit for bit on as many ranks.
    """
    if not started_by_launcher(ranks) and (ranks not in (None, 1) or lab):
        path = find_job(job)
        read_job(path, overrides or ())
        run_folder(path, out, resume)
        return start_ranks(1 if ranks is None else ranks, lab)
    stop = StopFlag()
    # From the start: a signal that comes while this loads and compiles must not end it before it has saved a step.
    with stop.listening():
        # MPI before what takes seconds to load: it keeps a core busy while it waits for ranks that come later.
        with checking(init().transport), without_garbage_collection():
            path = find_job(job)
            config, module, settings = load_job(path, overrides or ())
            folder = run_folder(path, out, resume)
        return train_here(path, config, module.build, settings, folder, resume, stop)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For loading, of which it takes a sixth of the time; what was loaded then stays, and is not looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_folder(path: Path, out: Path | None, resume: bool) -> Path:
    """Where the run of that job goes."""
    folder = Path("runs") / path.stem if out is None else out
    if not resume and any((folder / name).exists() for name in ("run.h5", "checkpoints")):
        raise UsageError(f"{folder} holds a run already: --resume goes on with it, another --out starts anew")
    return folder


def train_here(
    path: Path, config: Job, build: Callable[..., "Task"], settings: Any, folder: Path, resume: bool, stop: StopFlag
) -> int:
    """As one of the ranks."""
    from okrt.train.loop import run
    from okrt.train.metrics import run_attributes
    from okrt.train.progress import Progress

    world = init()
    agree(world.transport, {"job": config.model_dump_json(), "resume": resume, "out": folder}, None, flag=False)
    task = build(settings, config.seed)
    agree(world.transport, {"data": task.data, "train_samples": task.train_samples}, None, flag=False)
    folder.mkdir(parents=True, exist_ok=True)
    hostnames = world.transport.gather_texts(socket.gethostname())
    attributes = run_attributes(shlex.join(sys.argv), config.model_dump(mode="json"), config.seed, hostnames)
    attributes["data"] = task.data
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    dense_bytes = 2 * 4 * parameters * (world.size - 1) / world.size
    screen = console(world, sys.stdout)
    with Progress(screen, world.rank == 0, config.steps, config.log_every, dense_bytes) as progress:
        progress.log(
            f"{path.stem}: {parameters:,} parameters, {world.size} ranks, {config.reducer.name}"
            f"{'' if config.reducer.name == 'dense' else f' at density {config.reducer.density:g}'}, "
            f"{config.optimizer.name}; data {task.data}; into {folder}"
        )
        if unused := config.without_effect():
            progress.log(f"no effect with {config.reducer.name} and {config.optimizer.name}: {', '.join(unused)}")
        return run(config, task, world, folder, attributes, progress, resume, stop)
