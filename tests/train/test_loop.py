"""The loop: against plain torch on one rank, and exact resume and redistribution on four."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import okrt
from okrt.cli.train import train
from okrt.errors import UsageError
from okrt.train.checkpoint import Checkpoints, Saved
from okrt.train.config import Job, load_job
from okrt.train.loop import Trainer
from okrt.train.metrics import read_steps
from okrt.train.samples import SampleOrder
from tests.conftest import ALONE

TASK = """
import itertools, os, signal
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn import functional as F

import okrt
from okrt.train import Task

class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = 32
    dropout: float = 0.3
    nan_call: int = 0
    signal_call: int = 0

def build(settings, seed):
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.standard_normal((50, 8), dtype=np.float32))
    y = torch.from_numpy(random.integers(0, 4, 50))
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, settings.width), nn.ReLU(), nn.Dropout(settings.dropout), nn.Linear(settings.width, 4)
    )
    calls = itertools.count(1)

    def loss(model, numbers):
        call = next(calls)
        broken = call == settings.nan_call and okrt.init().rank == 2
        if call == settings.signal_call:
            os.kill(os.getpid(), signal.SIGUSR2)
        return F.cross_entropy(model(x[numbers]), y[numbers]) * (float("nan") if broken else 1.0)

    def figures(model, numbers):
        return {"loss": float(F.cross_entropy(model(x[numbers]), y[numbers], reduction="sum"))}

    return Task(model, 50, loss, 13, figures, "synthetic: 50 points")
"""
JOB = """
steps = 12
batch = 2
eval_every = 4
[task]
module = "tiny"
[optimizer]
lr = 0.02
warmup_steps = 2
[reducer]
density = 0.1
[checkpoint]
every = 6
"""
SGD = ["optimizer.name=sgd", "optimizer.momentum=0.9"]
# Of oktopk the resume falls into the density schedule.
RECIPES = {
    "dense": ["reducer.name=dense"],
    "oktopk": ["reducer.density_schedule=[[4, 0.5], [8, 0.2]]", "reducer.dense_steps=2"],
    "sidco": ["reducer.selector=sidco", "reducer.values=fp16"],
    "updates": [*SGD, "reducer.apply=updates", "reducer.clip_norm=1.0", "reducer.momentum_masking=true"],
}
# Long enough for thresholds and regions to be found anew on both sides of the break.
LENGTH = ["steps=120", "eval_every=60", "checkpoint.every=60"]
LONG = {"oktopk-long": LENGTH}
ACCUMULATION = [*SGD, "reducer.name=dense", "task.dropout=0.0"]

# Four ranks that run all that needs several: starting them takes longer than their steps.
DRIVER = """
import io, shutil, sys
from contextlib import redirect_stdout
from pathlib import Path

from mpi4py import MPI

import okrt.cli.train
import okrt.world
from okrt.errors import UsageError
from okrt.train.checkpoint import Checkpoints
from okrt.train.config import load_job
from okrt.train.loop import Trainer
from okrt.transport.mpi import MpiTransport

HERE = Path(sys.argv[1])
JOB, ALL = HERE / "tiny.toml", MPI.COMM_WORLD

def enter(comm):
    '''From here on the world is that of these ranks.'''
    place = (comm.rank, comm.size) * 2
    world = okrt.world.World(comm, *place, 60.0, MpiTransport(comm, 60.0))
    okrt.world.init = okrt.cli.train.init = lambda: world
    return world

def train(out, overrides, resume=False):
    said = io.StringIO()
    with redirect_stdout(said):
        code = okrt.cli.train.train(str(JOB), None, overrides, HERE / out, resume)
    assert code == 0, (code, said.getvalue())
    with open(HERE / f"{out}.log{ALL.rank}", "a") as file:
        file.write(said.getvalue())

def copy(source, target, step):
    ALL.barrier()
    if ALL.rank == 0:
        shutil.copytree(HERE / source / "checkpoints" / step, HERE / target / "checkpoints" / step)
        shutil.copy(HERE / source / "run.h5", HERE / target)
    ALL.barrier()

enter(ALL)
for name, overrides in (RECIPES | LONG).items():
    train(f"{name}-whole", overrides)
    copy(f"{name}-whole", f"{name}-broken", "step_00000060" if name in LONG else "step_00000006")
    train(f"{name}-broken", overrides, resume=True)
train("batch", ["batch=4", *ACCUMULATION])
train("accumulate", ["accumulate=2", *ACCUMULATION])
train("skip", ["task.nan_call=3", "reducer.nan=skip"])
try:
    train("raise", ["task.nan_call=3"])
except UsageError as error:
    (HERE / f"raise.log{ALL.rank}").write_text(str(error))

overrides = RECIPES["oktopk"]
pair = ALL.Split(0 if ALL.rank < 2 else MPI.UNDEFINED, ALL.rank)
if ALL.rank < 2:
    enter(pair)
    train("two", ["steps=6", *overrides])
for source, size in (("oktopk-whole", 2), ("oktopk-whole", 3), ("two", 4)):
    out = f"{source}-on-{size}"
    copy(source, out, "step_00000006")
    comm = ALL.Split(0 if ALL.rank < size else MPI.UNDEFINED, ALL.rank)
    if ALL.rank < size:
        world = enter(comm)
        job, module, settings = load_job(JOB, overrides)
        trainer = Trainer(job, module.build(settings, job.seed), world)
        trainer.load(Checkpoints(HERE / out / "checkpoints", world.transport).newest())
        assert trainer.save(Checkpoints(HERE / out / "loaded", world.transport))
        train(out, overrides, resume=True)
ALL.barrier()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of the driver."""
    if not ALONE:
        pytest.skip("starts ranks of its own: run it as a single process")
    folder = tmp_path_factory.mktemp("runs")
    write_job(folder)
    script = folder / "driver.py"
    script.write_text(f"RECIPES = {RECIPES}\nLONG = {LONG}\nACCUMULATION = {ACCUMULATION}\n{DRIVER}")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run(
        [mpiexec, "-n", "4", sys.executable, script, folder], capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def write_job(folder: Path) -> Path:
    (folder / "tiny.py").write_text(TASK)
    path = folder / "tiny.toml"
    path.write_text(JOB)
    return path


def saved(run: Path, step: int, folder: str = "checkpoints") -> Saved:
    found = Checkpoints(run / folder, okrt.init().transport).newest()
    assert found is not None
    if found.step != step:
        found = Saved(found.path.with_name(f"step_{step:08d}"), step, found.ranks, found.shared)
    return found


def assert_same(one: Any, other: Any, where: str) -> None:
    """Same types and the same bits, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    else:
        assert one == other, where


def residuals(of: Saved) -> list[np.ndarray]:
    """Of each rank, all buckets side by side."""
    buckets = [of.own(rank)["reducers"]["buckets"] for rank in range(of.ranks)]
    return [np.concatenate([bucket["reducer"]["residual"] for bucket in own]) for own in buckets]


@pytest.mark.parametrize("recipe", RECIPES | LONG)
def test_exact_resume(runs: Path, recipe: str) -> None:
    half, end = (60, 120) if recipe in LONG else (6, 12)
    whole, broken = (saved(runs / f"{recipe}-{kind}", end) for kind in ("whole", "broken"))
    assert_same(whole.model(), broken.model(), "model")
    assert whole.shared == broken.shared
    own = [whole.own(rank) for rank in range(4)]
    for rank in range(4):
        assert_same(own[rank], broken.own(rank), f"rank {rank}")
    # What is compared is worth it: the ranks have their own random numbers and residuals, and have moved on.
    assert len({own[rank]["random"]["torch"].numpy().tobytes() for rank in range(4)}) == 4
    middle = saved(runs / f"{recipe}-whole", half)
    assert not torch.equal(middle.model()["0.weight"], whole.model()["0.weight"])
    assert not torch.equal(middle.own(0)["random"]["torch"], own[0]["random"]["torch"])
    if not recipe.startswith("dense"):
        assert len({residual.tobytes() for residual in residuals(whole)}) == 4
        assert all(np.count_nonzero(residual) > 100 for residual in residuals(middle))


@pytest.mark.parametrize("recipe", RECIPES)
def test_metrics_go_on_after_a_resume(runs: Path, recipe: str) -> None:
    whole, broken = (read_steps(runs / f"{recipe}-{kind}" / "run.h5") for kind in ("whole", "broken"))
    np.testing.assert_array_equal(broken["step"], np.arange(1, 13))
    for column in ("loss", "eval_loss", "lr", "samples", "bytes_received"):
        np.testing.assert_array_equal(broken[column], whole[column], err_msg=column)
    np.testing.assert_array_equal(whole["samples"], 8 * whole["step"])
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(whole["eval_loss"])) + 1, [4, 8, 12])


def test_log_of_a_resume(runs: Path) -> None:
    first, second = ((runs / f"oktopk-{kind}.log0").read_text().splitlines() for kind in ("whole", "broken"))
    assert "4 ranks, oktopk at density 0.1, lag_adamw; data synthetic: 50 points" in first[0]
    assert [line.split("  ")[0] for line in first[1:]] == [f"step {step}/12" for step in (1, 4, 8, 12)]
    assert second[1] == "resumed step_00000006"
    assert [line.split("  ")[0] for line in second[2:]] == [f"step {step}/12" for step in (7, 8, 12)]
    assert [(runs / f"oktopk-whole.log{rank}").read_text() for rank in (1, 2, 3)] == [""] * 3


def test_density_schedule_changes_what_is_sent(runs: Path) -> None:
    """420 parameters: all of them twice, then 210, 84 and 42, of which a rank sends at most that many."""
    with h5py.File(runs / "oktopk-whole" / "run.h5") as file:
        selected = file["ranks/selected"][:].max(axis=1)
    assert (selected[:2] == 420).all()
    for part, most in ((selected[2:4], 210), (selected[4:8], 84), (selected[8:], 42)):
        assert (part <= 1.25 * most).all()
        assert (part > 0.6 * most).all()


@pytest.mark.parametrize(("source", "old", "new"), [("oktopk-whole", 4, 2), ("oktopk-whole", 4, 3), ("two", 2, 4)])
def test_resume_on_other_ranks_keeps_the_residual_sum(runs: Path, source: str, old: int, new: int) -> None:
    run = runs / f"{source}-on-{new}"
    before, after = saved(runs / source, 6), saved(run, 6, "loaded")
    assert (before.ranks, after.ranks) == (old, new)
    sums = [np.sum(residuals(s), axis=0, dtype=np.float64) for s in (before, after)]
    assert np.abs(sums[0]).max() > 1e-3
    np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=1e-6)
    assert_same(before.model(), after.model(), "model")
    told = (runs / f"{source}-on-{new}.log0").read_text()
    assert f"resumed step_00000006 of {old} ranks on {new}: residuals are redistributed, their sum is kept\n" in told
    steps = read_steps(run / "run.h5")
    np.testing.assert_array_equal(steps["step"], np.arange(1, 13))
    np.testing.assert_array_equal(np.diff(steps["samples"]), [2 * old] * 5 + [2 * new] * 6)
    assert saved(run, 12).ranks == new


def test_accumulation_on_four_ranks(runs: Path) -> None:
    """Half the batch twice takes the same samples."""
    batch, accumulate = (saved(runs / name, 12).model() for name in ("batch", "accumulate"))
    for name in batch:
        torch.testing.assert_close(accumulate[name], batch[name], rtol=0, atol=2e-6)
    losses = [read_steps(runs / name / "run.h5")["loss"] for name in ("batch", "accumulate")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_nan_is_skipped(runs: Path) -> None:
    steps = read_steps(runs / "skip" / "run.h5")
    np.testing.assert_array_equal(steps["step"], np.arange(1, 13))
    np.testing.assert_array_equal(np.isfinite(steps["loss"]), steps["step"] != 3)
    end = saved(runs / "skip", 12)
    assert all(weight.isfinite().all() for weight in end.model().values())
    assert all(np.isfinite(residual).all() for residual in residuals(end))
    assert (runs / "skip.log0").read_text().count("step 3 is skipped: NaN or Inf in a gradient\n") == 1
    assert [bucket["reducer"]["skipped_steps"] for bucket in end.own(0)["reducers"]["buckets"]] == [1]


def test_nan_stops_with_the_rank(runs: Path) -> None:
    for rank in range(4):
        assert "NaN or Inf in the gradient of rank 2;" in (runs / f"raise.log{rank}").read_text()
    np.testing.assert_array_equal(read_steps(runs / "raise" / "run.h5")["step"], [1, 2])


Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trainer of the tiny job on one rank."""
    path = write_job(tmp_path)

    def trainer(*overrides: str) -> Trainer:
        job, module, settings = load_job(path, overrides)
        return Trainer(job, module.build(settings, job.seed), okrt.init())

    return trainer


def plain_torch(job: Job, trainer: Trainer, batch: int) -> tuple[torch.nn.Module, list[float]]:
    model = trainer.task.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    order, losses = SampleOrder(50, job.seed), []
    for step in range(15):
        optimizer.zero_grad()
        loss = trainer.task.loss(model, order(step * batch, batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(("batch", "accumulate"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("apply", ["gradients", "updates"])
def test_as_plain_torch_does(make: Make, batch: int, accumulate: int, apply: str) -> None:
    """Fifteen steps of 8 samples are more than two epochs."""
    settings = [*ACCUMULATION, "optimizer.lr=0.05", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    plain = make(*settings)
    model, losses = plain_torch(plain.job, plain, 8)
    trainer = make(*settings, f"batch={batch}", f"accumulate={accumulate}", f"reducer.apply={apply}")
    np.testing.assert_allclose([trainer.take_step().loss for _ in range(15)], losses, rtol=1e-5)
    for mine, expected in zip(trainer.task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)
    assert (trainer.step, trainer.samples) == (15, 120)


def test_learning_rate(make: Make) -> None:
    trainer = make("steps=110", "optimizer.lr=0.4", "optimizer.warmup_steps=10", "optimizer.final_lr=0.1")

    def lr(step: int) -> float:
        trainer.step = step
        return trainer.lr()

    points = {0: 0.04, 4: 0.2, 9: 0.4, 10: 0.4, 60: 0.22, 110: 0.04}
    assert {step: lr(step) for step in points} == pytest.approx(points)
    trainer.step = 4
    trainer.take_step()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.2])
    constant = make("optimizer.lr=0.4", "optimizer.schedule=constant")
    constant.step = 11
    assert constant.lr() == 0.4


@pytest.mark.parametrize("apply", ["gradients", "updates"])
def test_density_schedule(make: Make, apply: str) -> None:
    trainer = make("reducer.density_schedule=[[2, 1.0], [4, 0.5]]", f"reducer.apply={apply}")
    seen = []
    for _ in range(6):
        trainer.take_step()
        seen.append(trainer.engine.last.k)
    assert seen == [420, 420, 210, 210, 42, 42]


def test_evaluation_is_the_mean_over_held_out_samples(make: Make) -> None:
    trainer = make()
    model = trainer.task.model
    found = trainer.evaluate()
    assert not model.training
    with torch.no_grad():
        assert found == pytest.approx({"loss": trainer.task.figures(model, np.arange(13))["loss"] / 13})


def test_a_signal_in_the_middle_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is finished, a checkpoint saved, and the rest gives what an unbroken run gives."""
    path, before = write_job(tmp_path), signal.getsignal(signal.SIGUSR2)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert train(str(path), None, ["task.signal_call=3"], broken) == 75
    assert [file.name for file in (broken / "checkpoints").iterdir()] == ["step_00000003"]
    assert "stopped by SIGUSR2 after step 3\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGUSR2) is before
    assert train(str(path), None, [], broken, resume=True) == 0
    assert train(str(path), None, [], whole) == 0
    assert_same(saved(broken, 12).model(), saved(whole, 12).model(), "model")
    assert_same(saved(broken, 12).own(0), saved(whole, 12).own(0), "own")


def test_a_signal_in_the_last_step_is_no_stop(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    assert train(str(path), None, ["task.signal_call=12"], tmp_path / "run") == 0
    assert saved(tmp_path / "run", 12).step == 12


@pytest.mark.parametrize("other", [SGD, RECIPES["dense"], ["reducer.apply=updates"], ["task.width=16"]])
def test_a_checkpoint_of_another_job_is_refused(make: Make, tmp_path: Path, other: list[str]) -> None:
    trainer = make()
    trainer.take_step()
    trainer.save(Checkpoints(tmp_path / "checkpoints", okrt.init().transport))
    with pytest.raises(
        UsageError, match=r"step_00000001 is of (a job with \w+\.\w+ = '\w+', this|another model: )"
    ) as told:
        make(*other).load(saved(tmp_path, 1))
    assert "\n" not in str(told.value)
