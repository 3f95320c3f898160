"""A sweep that is killed again and again: nothing that was finished is lost, and the end is that of an unbroken one."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from okrt.report import sweep_file
from okrt.report.sweep_file import DONE, Sweep
from tests.conftest import ALONE

KILLS = 20
SPEC = """
[grid]
ranks = [1]
reducer = ["oktopk"]
density = [0.01, 0.1]
elements = [1000]
[repeat]
warmup = 1
at_least = 2
at_most = 2
"""
TIMES = {"median_s", "ci95_low_s", "ci95_high_s", "phase_s", "speedup_over_dense", "measured_utc"}


# Has imported what a sweep imports, which takes longer than what is to be killed: each sweep is a fork of it.
NURSERY = """
import os, sys
from okrt.cli.main import main

for out in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["okrt", "sweep", "spec.toml", "--out", out.strip()]
        main()
    print(child, flush=True)
    sys.stdin.readline()  # until then the number is the child's, also when it has ended
    status = os.waitid(os.P_PID, child, os.WEXITED)
    print(-status.si_status if status.si_code == os.CLD_KILLED else status.si_status, flush=True)
"""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "HYDRA_", "SLURM_"))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], env=clean, cwd=folder, stdin=pipe, stdout=pipe, text=True)


def finish(out: Path) -> Sweep:
    with start(out.parent, "-m", "okrt", "sweep", "spec.toml", "--out", out.name) as running:
        assert running.wait(90) == 0
    return sweep_file.read(out)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(tmp_path, "-c", NURSERY) as process:
        yield process
        process.kill()


def killed_after(seconds: float, out: Path, nursery: subprocess.Popen[str]) -> bool:
    """Whether a sweep was killed after so long; else it had come to its end before."""
    assert nursery.stdin is not None and nursery.stdout is not None
    print(out.name, file=nursery.stdin, flush=True)
    child = int(nursery.stdout.readline())
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    print(file=nursery.stdin, flush=True)
    code = int(nursery.stdout.readline())
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.timeout(280)
@pytest.mark.skipif(not ALONE, reason="starts processes of its own: run it as a single process")
def test_kill_9_at_random_moments(tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    began = time.monotonic()
    unbroken = finish(tmp_path / "unbroken.h5")
    point_s = (time.monotonic() - began) / unbroken.size
    moments = random.Random(1)
    out = tmp_path / "sweep.h5"
    finished: dict[int, np.ndarray] = {}
    most = kills = 0
    while kills < KILLS:
        kills += killed_after(moments.uniform(0, 1.2) * point_s, out, nursery)
        if not out.exists():
            continue
        state = sweep_file.read(out)
        check_kept(state, finished)
        finished = {number: state.samples["seconds"][number] for number in state.numbers(DONE)}
        most = max(most, len(finished))
        if len(finished) == state.size:
            compare(state, unbroken)
            out.unlink()
            finished = {}
    assert most > 0, "the kills came too soon to show anything"
    whole = finish(out)
    check_kept(whole, finished)
    compare(whole, unbroken)
    assert {path.name for path in tmp_path.iterdir()} == {"spec.toml", "sweep.h5", "unbroken.h5"}


def check_kept(state: Sweep, finished: dict[int, np.ndarray]) -> None:
    """What was finished is there, as it was."""
    assert finished.keys() <= {*state.numbers(DONE)}
    for number, seconds in finished.items():
        np.testing.assert_array_equal(state.samples["seconds"][number], seconds)


def compare(one: Sweep, other: Sweep) -> None:
    """All but the times."""
    for name in one.points.keys() - TIMES:
        np.testing.assert_array_equal(one.points[name], other.points[name], name)
    for name in ("words_over_k", "bytes_received"):
        np.testing.assert_array_equal(one.samples[name], other.samples[name], name)
    assert one.samples["seconds"].shape == other.samples["seconds"].shape
    assert (np.isfinite(one.points["median_s"])).all()
    same = one.attributes.keys() - {"command", "started_utc"}
    assert {name: str(one.attributes[name]) for name in same} == {name: str(other.attributes[name]) for name in same}
