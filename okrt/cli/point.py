"""One point of a sweep: what `okrt sweep` starts, with the ranks of that point, and reads the result of."""

import ctypes
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from okrt.cli.bench import write_atomically
from okrt.cli.launch import start_ranks, started_by_launcher
from okrt.cli.measure import BYTES, PHASES, SECONDS, WORDS, Allreduce, Subject, alpha_beta_s, measure, ping
from okrt.perf.synthetic import SyntheticGradient
from okrt.reducers import REDUCERS, Cost
from okrt.sweep.spec import Repeat
from okrt.world import World, agree, init

PR_SET_PDEATHSIG = 1


def point(
    settings: Annotated[str, typer.Option(help="what to measure, as JSON")],
    result: Annotated[Path, typer.Option(help="file to write")],
    ranks: Annotated[int, typer.Option()],
    parent: Annotated[int, typer.Option(help="process without which there is no use in going on")],
    lab: Annotated[str | None, typer.Option()] = None,
    launcher: Annotated[str | None, typer.Option()] = None,
) -> int:
    """Measures one point of a sweep, for okrt sweep."""
    if not started_by_launcher(ranks):
        end_with(parent)
        if ranks > 1 or lab or launcher:
            return start_ranks(ranks, lab, shlex.split(launcher) if launcher else None)
    world = init()
    what = json.loads(settings)
    agree(world.transport, {"settings": settings}, None, flag=False)
    subject: Subject
    if "job" in what:
        subject = TrainSteps(world, Path(what["job"]), what["overrides"])
    else:
        gradient = SyntheticGradient(what["elements"], world.rank, what["seed"])
        subject = Allreduce(world, what["reducer"], gradient, what["density"])
    alpha_s, beta_s = ping(world.transport)
    rows = measure(subject, world.transport, Repeat(**what["repeat"]))
    if world.rank == 0:
        write_atomically(result, json.dumps(told(subject, rows, what["phases"], alpha_s, beta_s)))
    return 0


def end_with(parent: int) -> None:
    """A sweep that was killed leaves no ranks behind that disturb the next one."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


class TrainSteps:
    """The steps of a job, without evaluations and checkpoints."""

    def __init__(self, world: World, job: Path, overrides: list[str]) -> None:
        from okrt.train.config import load_job
        from okrt.train.loop import Trainer

        config, module, settings = load_job(job, overrides)
        self._trainer = Trainer(config, module.build(settings, config.seed), world)
        parameters = sum(p.numel() for p in self._trainer.task.model.parameters() if p.requires_grad)
        name = config.reducer.name
        self.k = parameters if name == "dense" else max(1, int(np.ceil(config.reducer.density * parameters)))
        self.cost = REDUCERS[name].cost(parameters, self.k, world.size)
        if config.reducer.complete and name not in ("dense", "oktopk"):
            # What completes the deliveries comes on top of the algorithm's bound, but for oktopk, which makes room.
            self.cost = Cost(self.cost.messages, math.nan)

    def prepare(self, step: int) -> None:
        pass

    def step(self) -> None:
        self._trainer.take_step()

    def account(self, seconds: float) -> list[float]:
        last = self._trainer.engine.last
        return [last.words_received, last.bytes_received, seconds - last.wait_s, last.wait_s]


def told(subject: Subject, rows: np.ndarray, phases: list[str], alpha_s: float, beta_s: float) -> dict[str, Any]:
    """The fields of Measured."""
    is_job = isinstance(subject, TrainSteps)
    samples = {
        "seconds": rows[:, SECONDS],
        "words_over_k": rows[:, WORDS] / subject.k,
        "bytes_received": rows[:, BYTES],
    }
    medians = np.median(rows[:, PHASES:], axis=0)
    return {
        "samples": {name: values.tolist() for name, values in samples.items()},
        "phase_s": dict(zip(phases, medians.tolist(), strict=True)),
        "k": subject.k,
        "bound_words_over_k": subject.cost.words / subject.k,
        "alpha_s": alpha_s,
        "beta_s": beta_s,
        # Nobody knows how long a job computes.
        "alpha_beta_s": math.nan if is_job else alpha_beta_s(subject.cost, alpha_s, beta_s),
    }
