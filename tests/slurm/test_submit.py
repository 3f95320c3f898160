"""`okrt slurm submit` on a real Slurm of two nodes: jobs and sweeps that end, are cut off, and are cancelled.

All jobs are submitted at once where that is possible: most of the time goes by in waiting.
"""

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import okrt
from okrt.cli.main import main
from okrt.report import sweep_file
from okrt.train.checkpoint import Checkpoints, Saved
from okrt.train.config import JOBS
from okrt.train.metrics import read_steps
from tests.conftest import ALONE
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not ALONE, reason="a cluster of its own: run it as a single process"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

FINAL = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
PATIENCE_S = 360  # for a job, on a busy machine
NASTY = """it's "$HOME" `x` #1 100%j ü; & *"""
STEPS = 40
SETTINGS = {
    "task.width": 16,
    "task.layers": 1,
    "task.text_mb": 0.05,
    "task.context": 16,
    "task.eval_samples": 8,
    "batch": 2,
    "eval_every": 0,
    "steps": STEPS,
    "reducer.dense_steps": 5,
    "checkpoint.every": 2,
}
SMALL = [f"--set={key}={value}" for key, value in SETTINGS.items()]

# gpt_bytes that takes its time, and stops in its fifth step if told so. When it goes on from a checkpoint it is quick,
# and has more time: on a busy machine it would be signalled again and again while it starts.
SLOW = """
import atexit
import dataclasses
import itertools
import os
import subprocess
import time
from pathlib import Path

from okrt.jobs.gpt_bytes import Settings, build as quick

def build(settings, seed):
    task = quick(settings, seed)
    if any(Path(os.environ["SLURM_JOB_NAME"], "checkpoints").glob("step_*")):
        return task
    if os.environ["SLURM_PROCID"] == "0":
        longer = ["scontrol", "update", f"JobId={os.environ['SLURM_JOB_ID']}", "TimeLimit=50"]
        atexit.register(subprocess.run, longer)
    calls = itertools.count(1)

    def loss(model, numbers):
        time.sleep(600 if "STOPS" in os.environ and next(calls) == 5 else 2)
        return task.loss(model, numbers)

    return dataclasses.replace(task, loss=loss)
"""
SPEC = (
    "[grid]\nranks = [1, 2]\nreducer = ['dense']\nelements = [1000]\n[repeat]\nwarmup = 1\nat_least = 3\nat_most = 3\n"
)
LONG_SPEC = SPEC.replace("at_least = 3\nat_most = 3", "at_least = 10_000_000\nat_most = 10_000_000")


@dataclass(frozen=True)
class Queue:
    """A cluster, and the folder that all is submitted from."""

    cluster: Cluster
    folder: Path

    def submit(self, *argv: object) -> str:
        """Runs `okrt slurm submit`; the number of the job."""
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            for module in (sys, threading):
                patch.setattr(module, "excepthook", module.excepthook)
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["okrt", "slurm", "submit", *map(str, argv)])
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code
        number = re.match(r"job (\d+): ", printed.getvalue())
        assert number
        return number[1]

    def wait_for(self, what: str, there: Callable[[], object], number: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not there():
            if time.monotonic() > until:
                pytest.fail(f"waited {PATIENCE_S} s for {what}\n{self.told_by(number)}")
            time.sleep(0.1)

    def ended(self, number: str, state: str) -> dict[str, str]:
        """The job when it has ended for good, in that state."""
        self.wait_for(f"the end of job {number}", lambda: self.cluster.job(number)["JobState"] in FINAL, number)
        job = self.cluster.job(number)
        assert job["JobState"] == state, self.told_by(number)
        return job

    def told_by(self, number: str) -> str:
        """All that may tell what became of a job."""
        logs = [*self.folder.glob(f"**/*-{number}.log"), *self.folder.glob(f"**/*-{number}_*.log")]
        parts = [f"--- {log.name}\n{log.read_text()}" for log in logs]
        ask = self.cluster.ask
        return "\n".join([ask("scontrol", "show", "job", number), *parts, ask("squeue"), self.cluster.logs()])


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    folder = tmp_path_factory.mktemp("slurm") / NASTY
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW)
    ready = (JOBS / "gpt_bytes.toml").read_text()
    (folder / "slow.toml").write_text(ready.replace('"gpt_bytes"', '"slow"'))
    (folder / "scaling.toml").write_text(SPEC)
    (folder / "long.toml").write_text(LONG_SPEC)
    with Cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            patch.delenv(name)
        # Ranks that wait for others to start are no stall.
        patch.setenv("OKRT_TIMEOUT_S", "300")
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield Queue(cluster, folder)


@pytest.fixture(scope="module")
def jobs(queue: Queue) -> dict[str, str]:
    """Numbers of a job that runs through, and of one alike that is slow and signalled soon after its start.

    Slurm looks at the clock every half minute, and sends the signal up to that much too early.
    """
    size = ("--nodes", 2, "--tasks-per-node", 2, "--time", 20)
    return {
        "cut off": queue.submit("slow.toml", *named("cut off"), *size, "--signal-before", 1190, *SMALL),
        "whole": queue.submit("gpt_bytes", "--out", "whole", "--name", NASTY, *size, *SMALL),
    }


def named(name: str) -> tuple[str, ...]:
    return ("--name", name, "--out", name)


def newest(run: Path) -> Saved:
    passed_over: list[str] = []
    found = Checkpoints(run / "checkpoints", okrt.init().transport, log=passed_over.append).newest()
    assert found is not None
    assert passed_over == []
    return found


def parameters(run: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in newest(run).model().items()}


def test_sweep_array(queue: Queue, jobs: dict[str, str]) -> None:
    """One file for all tasks; the one that is asked to stop is queued again, the other is not."""
    number = queue.submit("scaling.toml", "--array", "--tasks-per-node", 2)
    tasks = {point: f"{number}_{point}" for point in (0, 1)}

    def running() -> list[str]:
        return [task for task in tasks.values() if queue.cluster.job(task).get("JobState") == "RUNNING"]

    def measuring() -> bool:
        begun = len(list(queue.folder.glob(".scaling.h5.point-*")))
        return begun > 0 and len(running()) == begun

    queue.wait_for("tasks that measure", measuring, number)
    # The task that has the number of the whole array, if it is there: to queue that number is to queue all.
    asked = max(running(), key=lambda task: queue.cluster.job(task)["JobId"] == number)
    queue.cluster.ask("scancel", "--batch", "--signal=USR2", asked)
    for task in tasks.values():
        assert queue.ended(task, "COMPLETED")["Restarts"] == ("1" if task == asked else "0")
    sweep = sweep_file.read(queue.folder / "scaling.h5")
    assert sweep.numbers(sweep_file.DONE) == [0, 1]
    log = (queue.folder / f"scaling-{asked}.log").read_text()
    assert "interrupted: " in log
    assert log.rstrip().endswith("scaling.h5")


def test_cancelled_sweep(queue: Queue) -> None:
    number = queue.submit("long.toml", "--tasks-per-node", 2)
    queue.wait_for("a point", lambda: list(queue.folder.glob(".long.h5.point-*")), number)
    queue.cluster.ask("scancel", number)
    assert queue.ended(number, "CANCELLED")["Restarts"] == "0"
    assert sweep_file.read(queue.folder / "long.h5").numbers(sweep_file.PENDING) == [0, 1]


@pytest.mark.parametrize("stops", [False, True])
def test_cancelled_job(queue: Queue, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """Between steps it has time to save; in a step that does not end it is killed. It does not come back."""
    if stops:
        monkeypatch.setenv("STOPS", "1")
    run = queue.folder / f"cancelled {stops}"
    number = queue.submit("slow.toml", "--nodes", 2 if stops else 1, *named(run.name), *SMALL)
    done = 4 if stops else 2
    queue.wait_for(
        f"{done} steps",
        lambda: (
            (run / f"checkpoints/step_{done:08d}/manifest.json").exists()
            and len(read_steps(run / "run.h5")["step"]) >= done
        ),
        number,
    )
    queue.cluster.ask("scancel", number)
    assert queue.ended(number, "CANCELLED")["Restarts"] == "0"
    steps = read_steps(run / "run.h5")["step"]
    np.testing.assert_array_equal(steps, np.arange(1, len(steps) + 1))
    assert newest(run).step == (done if stops else len(steps))


def test_whole_job(queue: Queue, jobs: dict[str, str]) -> None:
    job = queue.ended(jobs["whole"], "COMPLETED")
    assert (job["NumNodes"], job["NumTasks"]) == ("2", "4")
    run = queue.folder / "whole"
    np.testing.assert_array_equal(read_steps(run / "run.h5")["step"], np.arange(1, STEPS + 1))
    assert (newest(run).step, newest(run).ranks) == (STEPS, 4)
    assert (run / f"slurm-{jobs['whole']}.sh").exists()
    assert f"step {STEPS}/{STEPS}" in (run / f"slurm-{jobs['whole']}.log").read_text()


def test_job_that_is_cut_off(queue: Queue, jobs: dict[str, str]) -> None:
    """Signalled before its time is over it saves, is queued again, and ends where the whole one did, bit for bit."""
    number, run = jobs["cut off"], queue.folder / "cut off"
    log = run / f"slurm-{number}.log"
    assert int(queue.ended(number, "COMPLETED")["Restarts"]) >= 1
    stopped = re.search(r"^stopped by SIGUSR2 after step (\d+)$", log.read_text(), re.MULTILINE)
    assert stopped
    assert 0 < int(stopped[1]) < STEPS
    assert f"resumed step_{int(stopped[1]):08d}" in log.read_text()
    assert newest(run).step == STEPS
    np.testing.assert_array_equal(read_steps(run / "run.h5")["step"], np.arange(1, STEPS + 1))
    queue.ended(jobs["whole"], "COMPLETED")
    assert parameters(run) == parameters(queue.folder / "whole")
