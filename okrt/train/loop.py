"""The training loop: the same on every rank, and bit-identical when it goes on from a checkpoint."""

import contextlib
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from okrt.engine.data_parallel import DataParallel
from okrt.engine.distributed_optimizer import DistributedOptimizer
from okrt.engine.lag_adamw import LagAdamW
from okrt.engine.redistribute import redistributed
from okrt.errors import EX_IO, EX_REQUEUE, UsageError
from okrt.train.checkpoint import Checkpoints, Saved
from okrt.train.config import Job
from okrt.train.metrics import Metrics
from okrt.train.progress import Progress
from okrt.train.samples import SampleOrder
from okrt.train.stop import StopFlag
from okrt.train.task import Task
from okrt.world import World

EVAL_BATCH = 64
HYPERPARAMETERS = ("balance", "base_lr", "betas", "lag_cap", "momentum", "noise", "weight_decay")


@dataclass
class Step:
    """What this rank has to say about a step."""

    loss: float
    step_s: float
    comm_s: float
    idle_s: float
    selected: float
    bytes_received: float
    words_over_k: float
    stop: float

    def row(self) -> np.ndarray:
        return np.array(list(vars(self).values()), np.float64)


class Trainer:
    """A job on this rank: model, optimizer and reducers, and where in the data it is."""

    def __init__(self, job: Job, task: Task, world: World) -> None:
        self.job, self.task, self.world = job, task, world
        torch.set_num_threads(world.threads)
        self.order = SampleOrder(task.train_samples, job.seed)
        self.step, self.samples = 0, 0
        reducer = job.reducer
        options: dict[str, Any] = {"nan": reducer.nan, "clip_norm": reducer.clip_norm}
        if reducer.name != "dense":
            names = ("selector", "codec", "values", "dense_steps", "complete")
            options |= {name: getattr(reducer, name) for name in names}
            options["density"] = job.density(0)
        self.engine: DataParallel | DistributedOptimizer
        self.model: torch.nn.Module
        if reducer.apply == "updates":
            self.model = task.model
            options["momentum_masking"] = reducer.momentum_masking
            self.engine = DistributedOptimizer(self._make_optimizer(), task.model, reducer.name, **options)
            self.optimizer: torch.optim.Optimizer = self.engine
        else:
            self.engine = self.model = DataParallel(task.model, reducer.name, bucket_mb=reducer.bucket_mb, **options)
            self.optimizer = self._make_optimizer()
        # After the start, which is alike on all ranks, dropout and the like differ.
        seed_everything(job.seed, world.rank)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        settings = self.job.optimizer
        parameters = [p for p in self.task.model.parameters() if p.requires_grad]
        common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        if settings.name == "sgd":
            return torch.optim.SGD(parameters, momentum=settings.momentum, **common)
        if settings.name == "adamw":
            return torch.optim.AdamW(parameters, betas=settings.betas, **common)
        own = {name: getattr(settings, name) for name in ("betas", "lag_cap", "balance", "noise")}
        return LagAdamW(parameters, **own, **common)

    def lr(self) -> float:
        settings = self.job.optimizer
        if self.step < settings.warmup_steps:
            return settings.lr * (self.step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return settings.lr
        done = (self.step - settings.warmup_steps) / max(1, self.job.steps - settings.warmup_steps)
        return settings.lr * (settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))

    def take_step(self) -> Step:
        start = time.perf_counter()
        job, world = self.job, self.world
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        if job.reducer.density_schedule and job.reducer.name != "dense":
            for reducer in self.engine.reducers:
                reducer.density = job.density(self.step)  # type: ignore[attr-defined]
        self.model.train()
        self.optimizer.zero_grad()
        loss = 0.0
        for turn in range(job.accumulate):
            mine = self.samples + (turn * world.size + world.rank) * job.batch
            with self._no_sync(turn + 1 < job.accumulate):
                part = self.task.loss(self.model, self.order(mine, job.batch)) / job.accumulate
                part.backward()
            loss += float(part.detach())
        if not (isinstance(self.engine, DataParallel) and self.engine.last.skipped):
            self.optimizer.step()
        self.step += 1
        self.samples += job.batch * job.accumulate * world.size
        spent, last = time.perf_counter() - start, self.engine.last
        return Step(
            loss=loss,
            step_s=spent,
            comm_s=last.comm_s,
            idle_s=last.wait_s,
            selected=last.selected,
            bytes_received=last.bytes_received,
            words_over_k=last.words_received / max(1, last.k),
            stop=0.0,
        )

    def _no_sync(self, local: bool) -> Any:
        return self.engine.no_sync() if local and isinstance(self.engine, DataParallel) else contextlib.nullcontext()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over all held-out samples; each rank takes its share."""
        self.task.model.eval()
        rank, size = self.world.rank, self.world.size
        mine = np.arange(rank, self.task.eval_samples, size)
        sums: dict[str, float] = {}
        for at in range(0, mine.size, EVAL_BATCH):
            for name, value in self.task.figures(self.task.model, mine[at : at + EVAL_BATCH]).items():
                sums[name] = sums.get(name, 0.0) + value
        # A rank without a sample does not know the names: they come from the others.
        names = max(self.world.transport.gather_texts(" ".join(sums)), key=len).split()
        totals = np.array([sums.get(name, 0.0) for name in names])
        self.world.transport.allreduce(totals, "sum")
        return {name: float(total) / self.task.eval_samples for name, total in zip(names, totals, strict=True)}

    def save(self, checkpoints: Checkpoints) -> bool:
        own = {
            "optimizer": self.optimizer.state_dict(),
            "reducers": self.engine.reducer_state_dict(),
            "random": random_state(),
        }
        shared = {"samples": self.samples, "job": self.job.model_dump(mode="json")}
        return checkpoints.save(self.step, self.task.model.state_dict(), own, shared)

    def load(self, saved: Saved) -> str:
        """Goes on from there; tells how."""
        rank, size = self.world.rank, self.world.size
        for table, key in (("optimizer", "name"), ("reducer", "name"), ("reducer", "apply")):
            before, now = saved.shared["job"][table][key], getattr(getattr(self.job, table), key)
            if before != now:
                raise UsageError(f"{saved.path} is of a job with {table}.{key} = {before!r}, this one has {now!r}")
        try:
            self.task.model.load_state_dict(saved.model())
        except RuntimeError as error:
            raise UsageError(f"{saved.path} is of another model: {' '.join(str(error).split())}") from None
        self.step, self.samples = saved.step, saved.shared["samples"]
        own = saved.own(rank % saved.ranks)
        settings = {key: value for key, value in self.optimizer.param_groups[0].items() if key in HYPERPARAMETERS}
        self.optimizer.load_state_dict(own["optimizer"])
        for group in self.optimizer.param_groups:
            group |= settings  # those of this job: they may have been changed for the rest of the run
        if saved.ranks == size:
            self.engine.load_reducer_state_dict(own["reducers"])
            set_random_state(own["random"])
            return f"resumed {saved.path.name}"
        states = [saved.own(other)["reducers"] for other in range(rank, saved.ranks, size)]
        self.engine.load_reducer_state_dict(redistributed(own["reducers"], states))
        seed_everything(self.job.seed + self.step, rank)
        how = "residuals are redistributed, their sum is kept"
        return f"resumed {saved.path.name} of {saved.ranks} ranks on {size}: {how}"


# The global generators, which a task may use.
def seed_everything(seed: int, rank: int) -> None:
    own = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(own)
    np.random.seed(own)  # noqa: NPY002
    random.seed(own)


def random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def run(
    job: Job,
    task: Task,
    world: World,
    out: Path,
    attributes: dict[str, Any],
    progress: Progress,
    resume: bool,
    stop: StopFlag,
) -> int:
    """Trains to the end, or to a signal; the exit code."""
    if world.device.type != "cpu":
        progress.log(
            f"there is {world.device}, but jobs compute on the CPU: GPUs are for okrt.DataParallel in a script"
        )
    trainer = Trainer(job, task, world)
    checkpoints = Checkpoints(out / "checkpoints", world.transport, job.checkpoint.keep, progress.log)
    saved = checkpoints.newest() if resume else None
    if saved is not None:
        progress.log(trainer.load(saved))
    elif resume:
        progress.log("no checkpoint to resume: starting at step 0")
    metrics = Metrics(out / "run.h5", world.size, attributes, keep_below=trainer.step + 1) if world.rank == 0 else None
    is_saved = saved is not None
    try:
        while trainer.step < job.steps:
            lr = trainer.lr()
            step = trainer.take_step()
            step.stop = float(stop.raised)
            rows = world.transport.allgather(step.row())
            stopping = bool(rows[:, -1].any())
            last = trainer.step == job.steps
            due = job.eval_every and trainer.step % job.eval_every == 0
            figures = trainer.evaluate() if last or (due and not stopping) else {}
            if metrics is not None:
                metrics.write(*metric_rows(trainer, rows, lr, figures))
            if trainer.engine.last.skipped:
                progress.log(f"step {trainer.step} is skipped: NaN or Inf in a gradient")
            progress.step(trainer.step, rows, figures, job.batch * job.accumulate * world.size)
            periodic = job.checkpoint.every and trainer.step % job.checkpoint.every == 0
            if stopping or last or periodic:
                if metrics is not None:
                    metrics.flush()
                is_saved = trainer.save(checkpoints)
            if last and world.rank == 0:
                text = json.dumps({"step": trainer.step, "samples": trainer.samples, "figures": figures}, indent=1)
                (out / "result.json.new").write_text(text + "\n")
                (out / "result.json.new").replace(out / "result.json")
            if stopping and not last:
                why = ", ".join(stop.names) or "a signal to another rank"
                progress.log(f"stopped by {why} after step {trainer.step}")
                return EX_REQUEUE if is_saved else EX_IO
    finally:
        if metrics is not None:
            metrics.close()
    return 0 if is_saved else EX_IO


def metric_rows(
    trainer: Trainer, rows: np.ndarray, lr: float, figures: dict[str, float]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The rows of all ranks as a row of each group of run.h5; times are of the slowest rank."""
    loss, step_s, comm_s, idle_s, selected, received, words_over_k, _ = rows.T
    return (
        {
            "step": trainer.step,
            "loss": loss.mean(),
            "eval_loss": figures.get("loss", math.nan),
            "lr": lr,
            "samples": trainer.samples,
            "step_s": step_s.max(),
            "compute_s": (step_s - idle_s).max(),
            "comm_s": comm_s.max(),
            "bytes_received": received.max(),
            "words_over_k": words_over_k.max(),
        },
        {"step_s": step_s, "comm_s": comm_s, "idle_s": idle_s, "selected": selected, "bytes_received": received},
    )
