"""`okrt sweep`, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import okrt
from okrt.cli.point import TrainSteps
from okrt.report import sweep_file
from okrt.sweep.runner import code_version
from tests.processes import processes

ELEMENTS = 20_000
SMALL = f"""
title = "A small one"
[grid]
ranks = [1, 3]
reducer = ["dense", "oktopk"]
elements = [{ELEMENTS}]
[repeat]
warmup = 1
at_least = 3
at_most = 3
"""
FOREVER = "at_least = 10_000_000\nat_most = 10_000_000"
JOB = '[task]\nmodule = "mine"\n'
MODULE = """
import numpy as np, pydantic, torch
from okrt.train import Task

class Settings(pydantic.BaseModel):
    trouble: str = ""

def build(settings, seed):
    if settings.trouble == "raise":
        raise RuntimeError("out of luck")
    torch.manual_seed(seed)
    def loss(model, numbers):
        return model(torch.ones(len(numbers), 50)).square().mean()
    def figures(model, numbers):
        return {"loss": float(loss(model, numbers)) * len(numbers)}
    return Task(torch.nn.Linear(50, 40), 64, loss, 8, figures, "synthetic")
"""
TROUBLED = """
job = "mine.toml"
scaling = "weak"
[grid]
ranks = [2]
reducer = ["oktopk"]
density = [0.1]
"task.trouble" = ["raise", ""]
[repeat]
warmup = 1
at_least = 3
at_most = 3
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "spec.toml"
    file.write_text(SMALL)
    return file


def columns(path: Path) -> dict[str, np.ndarray]:
    return sweep_file.read(path).points


def test_a_sweep_and_what_it_does_when_started_again(
    start: Callable, command: Callable, tmp_path: Path, spec: Path
) -> None:
    out = tmp_path / "sweep.h5"
    done = start("okrt", "sweep", spec, "--out", out, limit_s=100)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        f"{at}/4  {ranks}, {reducer}, elements {ELEMENTS}, density {density}"
        for at, (ranks, reducer, density) in enumerate(
            [
                ("1 rank", "dense", 1.0),
                ("1 rank", "oktopk", 0.01),
                ("3 ranks", "dense", 1.0),
                ("3 ranks", "oktopk", 0.01),
            ],
            1,
        )
    ]
    assert "left" in lines[0] and lines[4] == f"4 of 4 points measured, 0 failed: {out}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.toml", "sweep.h5"]

    found = sweep_file.read(out)
    points = found.points
    assert list(points["status"]) == ["done"] * 4 and list(points["repetitions"]) == [3] * 4
    assert list(points["k"]) == [ELEMENTS, 200, ELEMENTS, 200]
    seconds = found.samples["seconds"]
    assert seconds.shape == (4, 3) and (seconds > 0).all()
    np.testing.assert_array_equal(points["median_s"], np.median(seconds, axis=1))
    np.testing.assert_allclose(points["speedup_over_dense"], points["median_s"][[0, 0, 2, 2]] / points["median_s"])
    assert (points["words_over_k_max"][:2] == 0).all(), "one rank receives nothing"
    assert points["words_over_k_max"][2] == pytest.approx(4 / 3, abs=0.01), "2n(P-1)/P"
    assert 2 <= points["words_over_k_max"][3] <= points["bound_words_over_k"][3] + (8 * 3 + 64) / 200
    np.testing.assert_array_equal(points["bytes_received"], 4 * points["k"] * points["words_over_k_median"])
    # Phases are those of the slowest rank, the rest included: in all as long as the step, but for taking medians.
    np.testing.assert_allclose(points["phase_s"].sum(axis=1), points["median_s"], rtol=1)
    assert (points["phase_s"] >= 0).all() and (points["alpha_beta_s"][2:] > 0).all()
    config = json.loads(found.attributes["config"])
    assert config["grid"]["ranks"] == [1, 3] and config["repeat"]["at_most"] == 3
    for name in ("okrt_version", "git_sha", "command", "seed", "started_utc", "hostnames", "mpi_library", "packages"):
        assert name in found.attributes

    assert command("sweep", spec, "--out", out) == (0, lines[4] + "\n", "")
    np.testing.assert_array_equal(sweep_file.read(out).samples["seconds"], seconds)

    # With other numbers in the spec the file would mix two things, and so it would with other code.
    before = out.read_bytes()
    spec.write_text(SMALL.replace("ranks = [1, 3]", "ranks = [1]").replace("warmup = 1", "warmup = 2"))
    code, _, err = command("sweep", spec, "--out", out)
    assert code == 64
    assert "is of another spec: grid.ranks was [1, 3], is [1]; repeat.warmup was 1, is 2" in err
    assert out.read_bytes() == before


def test_other_code_is_noticed(command: Callable, tmp_path: Path, spec: Path) -> None:
    out = tmp_path / "sweep.h5"
    spec.write_text(SMALL.replace("[1, 3]", "[1]"))
    assert command("sweep", spec, "--out", out, "--point", 0)[0] == 0
    assert list(columns(out)["status"]) == ["done", "pending"]
    with h5py.File(out, "a") as file:
        file["points/code"][0] = file.attrs["code"] = "0123456789ab"
    code, _, err = command("sweep", spec, "--out", out)
    assert (code, err.count("\n")) == (64, 1)
    assert "was measured with other code" in err and "code 0123456789ab" in err and f"code {code_version()}" in err
    assert list(columns(out)["status"]) == ["done", "pending"]
    assert command("sweep", spec, "--out", out, "--mix-code")[0] == 0
    assert list(columns(out)["code"]) == ["0123456789ab", code_version()]


@pytest.mark.timeout(200)
def test_points_that_fail_are_noted_and_the_others_measured(start: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(JOB)
    (tmp_path / "mine.py").write_text(MODULE)
    spec, out = tmp_path / "spec.toml", tmp_path / "sweep.h5"
    spec.write_text(TROUBLED)
    done = start("okrt", "sweep", spec, "--out", out, limit_s=120)
    assert done.returncode == 1
    found = sweep_file.read(out)
    points = found.points
    assert list(points["task.trouble"]) == ["raise", ""]
    assert list(points["status"]) == ["failed", "done"]
    assert points["reason"][0].startswith("exit code ") and points["reason"][0].endswith("RuntimeError: out of luck")
    assert "FAILED: exit code" in done.stdout and "1 of 2 points measured, 1 failed" in done.stdout
    assert found.phases == ("compute", "communication")
    assert (points["phase_s"][1] > 0).all() and points["k"][1] == 204
    assert 0 < points["words_over_k_max"][1] <= points["bound_words_over_k"][1] + (8 * 2 + 64) / 204
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        *("mine.py", "mine.toml", "spec.toml", "sweep.h5"),
    }
    assert not list(tmp_path.glob(".sweep*")), "nothing is left behind"


@pytest.mark.parametrize(("reducer", "known"), [("oktopk", True), ("topka", False), ("dense", True)])
def test_bound_of_a_job_with_complete_deliveries(tmp_path: Path, reducer: str, known: bool) -> None:
    """They come on top of what an algorithm receives at most, but for oktopk, which makes room for them."""
    (tmp_path / "mine.toml").write_text(JOB)
    (tmp_path / "mine.py").write_text(MODULE)
    changes = [f"reducer.name={reducer}", "reducer.complete=true", "reducer.density=0.1"]
    steps = TrainSteps(okrt.init(), tmp_path / "mine.toml", changes)
    assert np.isfinite(steps.cost.words) == known
    steps.step()
    assert len(steps.account(1.0)) == 4


def test_a_point_that_does_not_end(command: Callable, tmp_path: Path, spec: Path) -> None:
    out = tmp_path / "sweep.h5"
    spec.write_text(SMALL.replace("[1, 3]", "[2]").replace("at_least = 3\nat_most = 3", f"{FOREVER}\ntimeout_s = 3"))
    code, printed, _ = command("sweep", spec, "--out", out, "--point", 0)
    assert code == 1 and "FAILED: not done after 3 s" in printed
    assert list(columns(out)["status"]) == ["failed", "pending"]
    wait_for(lambda: not processes(str(tmp_path)), "the ranks to end")


def test_failed_points_are_measured_again_only_when_asked_for(command: Callable, tmp_path: Path, spec: Path) -> None:
    out = tmp_path / "sweep.h5"
    spec.write_text(SMALL.replace("[1, 3]", "[1]"))
    assert command("sweep", spec, "--out", out, "--point", 0)[0] == 0
    state = sweep_file.read(out)
    seconds = state.samples["seconds"][0]
    state.fail(1, "bad luck", code_version(), "then")
    sweep_file.write(out, state)
    code, printed, _ = command("sweep", spec, "--out", out)
    assert code == 1 and "1 of 2 points measured, 1 failed" in printed and "--retry" in printed
    assert list(columns(out)["status"]) == ["done", "failed"]
    assert command("sweep", spec, "--out", out, "--retry")[0] == 0
    assert list(columns(out)["status"]) == ["done", "done"] and columns(out)["reason"][1] == ""
    np.testing.assert_array_equal(sweep_file.read(out).samples["seconds"][0], seconds)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_the_ranks_of_the_point(tmp_path: Path, number: int, code: int) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "sweep.h5"
    spec.write_text(SMALL.replace("[1, 3]", "[2]").replace("at_least = 3\nat_most = 3", FOREVER))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "HYDRA_", "SLURM_"))}
    command = [sys.executable, "-m", "okrt", "sweep", str(spec), "--out", str(out)]
    with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, text=True) as sweep:
        wait_for(lambda: len(processes(str(tmp_path))) >= 4, "two ranks, their launcher and the sweep")
        sweep.send_signal(number)
        assert sweep.wait(30) == code
        assert sweep.stdout is not None and "interrupted" in sweep.stdout.read()
    wait_for(lambda: not processes(str(tmp_path)), "the ranks to end")
    assert list(columns(out)["status"]) == ["pending"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.toml", "sweep.h5"]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)


def test_list(command: Callable, spec: Path, tmp_path: Path) -> None:
    code, out, err = command("sweep", spec, "--list", "--point", 2, "--point", 1)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert rows == [["1", "1", str(ELEMENTS), "oktopk", "0.01"], ["2", "3", str(ELEMENTS), "dense", "1.0"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.toml"]


@pytest.mark.parametrize("name", ["default", "weak", "density", "size", "network", "training"])
def test_ready_specs(command: Callable, name: str) -> None:
    code, out, err = command("sweep", name, "--list")
    assert (code, err) == (0, "") and out.count("oktopk") >= 3


def test_under_a_launcher(start: Callable, spec: Path) -> None:
    done = start("okrt", "sweep", spec, ranks=2)
    assert done.returncode == 64
    assert "okrt sweep starts its ranks itself, but a launcher started it (PMI_SIZE=2)" in done.stderr


def test_an_allocation_that_is_too_small(command: Callable, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    code, out, err = command("sweep", spec)
    assert (code, out) == (64, "")
    assert "points of 3 ranks, this allocation has 2 tasks" in err


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["missing.toml"], 64, "no spec missing.toml: give the path of one, or the name of a ready one (default, "),
        (["SPEC", "--point", 4], 64, "the grid has points 0 to 3"),
        (["SPEC", "--point", -1], 64, "--point"),
        (["SPEC", "--out", "missing/sweep.h5"], 74, "missing/sweep.h5: cannot write it"),
        (["SPEC", "--out", "."], 74, "cannot write it"),
        (
            ["SPEC", "--out", "/proc/sweep.h5"],
            74,
            "the sweep cannot be written: No such file or directory: '/proc/sweep.h5'",
        ),
        (["SPEC", "--out", "SPEC"], 74, "the sweep cannot be read"),
        (["LAB"], 64, "rate 'fast' is not a positive number"),
    ],
)
def test_bad_input(
    command: Callable, spec: Path, monkeypatch: pytest.MonkeyPatch, options: list, code: int, told: str
) -> None:
    monkeypatch.chdir(spec.parent)
    Path("lab.toml").write_text(SMALL.replace("[repeat]", 'lab = ["fast"]\n[repeat]'))
    before = {path.name: path.read_bytes() for path in spec.parent.iterdir()}
    options = [{"SPEC": spec, "LAB": "lab.toml"}.get(option, option) for option in options]
    found, out, err = command("sweep", *options)
    assert (found, out) == (code, "")
    assert told in err and err.startswith("okrt: ") and err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in spec.parent.iterdir()} == before
