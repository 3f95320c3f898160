"""The metrics file: read while a process writes it, after that was killed, resumed, and where it cannot be written."""

import inspect
import json
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from mpi4py import MPI

import okrt
from okrt.train.metrics import Metrics, git_sha, read_steps, run_attributes

LIVE = {"engine": "h5netcdf", "driver_kwds": {"swmr": True}}


def step_row(step: int) -> dict[str, float]:
    """Every value says which column and step it belongs to; integers are beyond what float32 could hold."""
    return {
        "step": step,
        "loss": 1 / (step + 1),
        "eval_loss": step / 8 if step % 10 == 0 else float("nan"),
        "lr": step * 1e-5,
        "samples": 32 * (step + 1),
        "step_s": step + 0.1,
        "compute_s": step + 0.2,
        "comm_s": step + 0.3,
        "bytes_received": 2**40 + step,
        "words_over_k": step + 0.4,
    }


def rank_row(step: int, ranks: int) -> dict[str, np.ndarray]:
    rank = np.arange(ranks)
    return {
        "step_s": step + rank / 16,
        "comm_s": step + rank / 32,
        "idle_s": step + rank / 64,
        "selected": 1000 * step + rank,
        "bytes_received": 2**40 + 1000 * step + rank,
    }


def expected(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def check(path: Path, rows: int, ranks: int) -> None:
    """The file has the steps 0 to rows - 1, each once, in both groups."""
    steps = read_steps(path)
    for name, column in expected([step_row(step) for step in range(rows)]).items():
        np.testing.assert_array_equal(steps.pop(name), column, name)
    assert not steps
    with h5py.File(path, "r", swmr=True, locking=False) as file:
        np.testing.assert_array_equal(file["ranks/step"][:rows], np.arange(rows))
        for name, column in expected([rank_row(step, ranks) for step in range(rows)]).items():
            np.testing.assert_array_equal(file["ranks"][name][:rows], column, name)


def write_rows(path: Path, rows: int, ranks: int, **options: Any) -> None:
    metrics = Metrics(path, ranks, {"seed": 1}, **options)
    for step in range(options.get("keep_below", 0), rows):
        metrics.write(step_row(step), rank_row(step, ranks))
    metrics.close()


def script(body: str) -> str:
    rows = inspect.getsource(step_row) + inspect.getsource(rank_row)
    return f"import numpy as np\nfrom okrt.train.metrics import Metrics, read_steps\n{rows}\n{body}"


# Told on its standard input how many rows to write and what to do then, it says when that is done.
WRITER = """
import sys
from pathlib import Path

metrics = Metrics(Path(sys.argv[1]), 3, {"seed": 1})
print("done", flush=True)
step = 0
for line in sys.stdin:
    rows, then = line.split()
    for step in range(step, step + int(rows)):
        metrics.write(step_row(step), rank_row(step, 3))
    step += 1
    if then == "flush":
        metrics.flush()
    print("done", flush=True)
"""


def test_is_read_while_it_is_written_and_after_a_kill_and_then_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    command = [sys.executable, "-c", script(WRITER), str(path)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin and writer.stdout
        try:
            assert writer.stdout.readline() == "done\n"
            assert all(len(column) == 0 for column in read_steps(path).values())

            def write(rows: int, then: str) -> None:
                print(rows, then, file=writer.stdin, flush=True)
                assert writer.stdout and writer.stdout.readline() == "done\n"

            write(70, "flush")
            check(path, 70, 3)
            with h5py.File(path, "r", swmr=True) as file:
                loss = file["steps/loss"]
                assert len(loss) == 70
                write(5, "flush")
                loss.refresh()
                np.testing.assert_array_equal(loss[:], [1 / (step + 1) for step in range(75)])
            with xr.open_dataset(path, group="steps", **LIVE) as steps:
                np.testing.assert_array_equal(steps["step"], np.arange(75))
            with xr.open_dataset(path, group="ranks", **LIVE) as ranks:
                np.testing.assert_array_equal(ranks["idle_s"][74], rank_row(74, 3)["idle_s"])
            write(50, "wait")
            write(7, "wait")
        finally:
            writer.kill()
    with pytest.raises(OSError):
        h5py.File(path, "r")
    rows = len(read_steps(path)["step"])
    assert 125 <= rows <= 132
    check(path, rows, 3)
    with xr.open_dataset(path, group="ranks", **LIVE) as ranks:
        assert ranks.sizes == {"step": rows, "rank": 3}

    write_rows(path, 160, 3, keep_below=110)
    check(path, 160, 3)
    write_rows(path, 160, 3, keep_below=160)
    check(path, 160, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]


# Each writer is killed while it writes, and whatever is read until then is right. It would end by itself, too.
KILLS = """
import os, signal, sys
from pathlib import Path

for number in range(6):
    path = Path(sys.argv[1]) / f"{number}.h5"
    writer = os.fork()
    if not writer:
        try:
            metrics = Metrics(path, 3, {})
            for step in range(200_000):
                metrics.write(step_row(step), rank_row(step, 3))
        finally:
            os._exit(1)
    rows = 0
    while rows <= 77 * number:
        if path.exists():
            steps = read_steps(path)
            rows = len(steps["step"])
            assert all(len(column) == rows for column in steps.values())
            assert (steps["loss"] == 1 / (np.arange(rows) + 1)).all()
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL
"""


def test_kills_in_the_middle_of_writing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", script(KILLS), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for number in range(6):
        path = tmp_path / f"{number}.h5"
        rows = len(read_steps(path)["step"])
        assert rows > 77 * number
        check(path, rows, 3)
        write_rows(path, rows + 10, 3, keep_below=rows // 2)
        check(path, rows + 10, 3)


def test_a_slow_run_is_seen_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(1000.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    metrics = Metrics(tmp_path / "run.h5", 2, {})
    for step in range(3):
        metrics.write(step_row(step), rank_row(step, 2))
        check(tmp_path / "run.h5", step + 1, 2)
    metrics.close()


def test_rows_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    metrics = Metrics(tmp_path / "run.h5", 2, {})
    seen = []
    for step in range(101):
        metrics.write(step_row(step), rank_row(step, 2))
        if step in (48, 49, 98, 99, 100):
            seen.append(len(read_steps(tmp_path / "run.h5")["step"]))
    metrics.close()
    assert seen == [0, 50, 50, 100, 100]


def test_arrays_may_be_used_again_by_the_caller(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run.h5", 2, {})
    reused = rank_row(0, 2)
    for step in range(3):
        for name, values in rank_row(step, 2).items():
            reused[name][:] = values
        metrics.write(step_row(step), reused)
    metrics.close()
    check(tmp_path / "run.h5", 3, 2)


def test_without_keep_below_it_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    write_rows(path, 60, 2)
    write_rows(path, 5, 4)
    check(path, 5, 4)


def test_resume_of_a_run_without_metrics(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run.h5", 1, {}, keep_below=10)
    metrics.write(step_row(10), rank_row(10, 1))
    metrics.close()
    assert read_steps(tmp_path / "run.h5")["step"].tolist() == [10]


@pytest.mark.parametrize("before, after", [(2, 4), (4, 2), (1, 3)])
def test_resume_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "run.h5"
    write_rows(path, 80, before)
    write_rows(path, 90, after, keep_below=70)
    both = min(before, after)
    with xr.open_dataset(path, group="steps", engine="h5netcdf") as steps:
        for name, column in expected([step_row(step) for step in range(90)]).items():
            np.testing.assert_array_equal(steps[name], column)
    with xr.open_dataset(path, group="ranks", engine="h5netcdf") as ranks:
        assert ranks.sizes == {"step": 90, "rank": after}
        for name, column in expected([rank_row(step, after) for step in range(90)]).items():
            np.testing.assert_array_equal(ranks[name][:, :both], column[:, :both])
            np.testing.assert_array_equal(ranks[name][70:], column[70:])
            assert np.isnan(ranks[name][:70, both:]).all()


def test_xarray_opens_both_groups(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    write_rows(path, 55, 3)
    per_step = {"loss": "1", "eval_loss": "1", "lr": "1", "samples": "1", "step_s": "s", "compute_s": "s"}
    per_step |= {"comm_s": "s", "bytes_received": "bytes", "words_over_k": "words/k"}
    per_rank = {"step_s": "s", "comm_s": "s", "idle_s": "s", "selected": "1", "bytes_received": "bytes"}
    with xr.open_dataset(path, group="steps", engine="h5netcdf") as steps:
        assert {name: column.attrs["units"] for name, column in steps.data_vars.items()} == per_step
        assert set(steps.coords) == {"step"} and steps["step"].attrs["units"] == "1"
        assert all(column.dims == ("step",) for column in steps.values())
        integers = {name for name, column in steps.variables.items() if column.dtype == np.int64}
        assert integers == {"step", "samples", "bytes_received"}
        assert float(steps["loss"].sel(step=9)) == 0.1
        assert int(np.isfinite(steps["eval_loss"]).sum()) == 6
    with xr.open_dataset(path, group="ranks", engine="h5netcdf") as ranks:
        assert {name: column.attrs["units"] for name, column in ranks.data_vars.items()} == per_rank
        assert set(ranks.coords) == {"step", "rank"} and ranks["rank"].attrs["units"] == "1"
        assert all(column.dims == ("step", "rank") for column in ranks.values())
        assert int(ranks["selected"].sel(step=54, rank=2)) == 54002
    with h5py.File(path) as file:
        assert file["ranks/selected"].dtype == file["ranks/bytes_received"].dtype == np.int64


def test_attributes(tmp_path: Path) -> None:
    config = {"reducer": {"name": "oktopk", "density": 0.01}, "data": tmp_path, "long": "x" * 100_000}
    hosts = [f"nid{number:05d}" for number in range(5000)]
    begun = datetime.now(timezone.utc).replace(microsecond=0)
    attributes = run_attributes(["okrt", "train", "a job.toml"], config, 7, hosts)
    Metrics(tmp_path / "run.h5", 2, attributes).close()
    with h5py.File(tmp_path / "run.h5") as file:
        found = dict(file.attrs)
    assert found["schema_version"] == 1
    assert found["okrt_version"] == okrt.__version__
    assert found["command"] == "okrt train 'a job.toml'"
    assert json.loads(found["config"]) == config | {"data": str(tmp_path)}
    assert found["seed"] == 7
    assert begun <= datetime.fromisoformat(found["started_utc"]) <= datetime.now(timezone.utc)
    assert list(found["hostnames"]) == hosts
    assert found["mpi_library"] and found["mpi_library"] in " ".join(MPI.Get_library_version().split())
    packages = json.loads(found["packages"])
    assert packages["h5py"] == h5py.__version__
    # Some builds name themselves after the version, here, there or in both.
    assert packages["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert re.fullmatch("[0-9a-f]{40}|", found["git_sha"])
    assert set(found) == set(attributes)
    with xr.open_dataset(tmp_path / "run.h5", engine="h5netcdf") as root:
        assert root.attrs["okrt_version"] == okrt.__version__


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_sha_is_that_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("pass\n")
    assert git_sha(tmp_path / "code.py") == ""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "code.py"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "installed.py").write_text("pass\n")
    (branch,) = (tmp_path / ".git/refs/heads").iterdir()
    assert git_sha(tmp_path / "code.py") == branch.read_text().strip()
    assert git_sha(tmp_path / "installed.py") == "", "code that merely lies in somebody's working tree"


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match=re.escape(str(tmp_path / "out/run.h5"))):
        Metrics(tmp_path / "out/run.h5", 2, {})


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run.h5").mkdir()
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path / "run.h5"))):
        Metrics(tmp_path / "run.h5", 2, {})
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]


@pytest.mark.parametrize("content", ["not HDF5", "no metrics"])
def test_what_cannot_be_carried_over_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.h5"
    if content == "not HDF5":
        path.write_text("loss 2.3\n")
    else:
        h5py.File(path, "w", libver="v110").close()
    before = path.read_bytes()
    with pytest.raises(OSError, match=f"cannot be carried over.*{re.escape(str(path))}"):
        Metrics(path, 2, {}, keep_below=5)
    with pytest.raises(OSError, match=f"cannot be read.*{re.escape(str(path))}"):
        read_steps(path)
    assert path.read_bytes() == before


def test_a_file_that_was_cut_short_is_said_at_once(tmp_path: Path) -> None:
    """HDF5 would wait for a writer to put the checksums right, twice as long after each look."""
    path = tmp_path / "run.h5"
    write_rows(path, 60, 3)
    whole = path.read_bytes()
    refused = 0
    for size in range(len(whole) // 8, len(whole), len(whole) // 8):
        path.write_bytes(whole[:size])
        before = time.monotonic()
        try:
            read_steps(path)
        except OSError as error:
            assert str(path) in str(error)
            refused += 1
        assert time.monotonic() - before < 10
    assert refused > 2


# Fills small disks that no other process sees, first with rows, then with a resume, and saves the files.
FULL = """
import shutil, subprocess, sys
from pathlib import Path

disk, saved = Path(sys.argv[1]) / "disk", Path(sys.argv[1]) / "saved"
disk.mkdir()
saved.mkdir()
for size in (280, 400, 550):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    path = disk / "run.h5"
    metrics = Metrics(path, 3, {})
    try:
        try:
            for step in range(100_000):
                metrics.write(step_row(step), rank_row(step, 3))
        finally:
            metrics.close()
    except OSError as error:
        print(step, error)
    shutil.copy(path, saved / f"{size}.h5")
    try:
        Metrics(path, 3, {}, keep_below=100)
    except OSError as error:
        print(step, error)
    assert path.read_bytes() == (saved / f"{size}.h5").read_bytes()
    assert list(disk.iterdir()) == [path]
    subprocess.run(["umount", disk], check=True)
"""
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def test_a_full_disk_is_said_and_what_was_written_stays(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and to be root or allowed to use user namespaces")
    command = [*OWN_MOUNTS, sys.executable, "-c", script(FULL), str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for size in (280, 400, 550):
        step = int(lines[0].split()[0])
        said = f"{step} [Errno 28] metrics cannot be written: No space left on device: '{tmp_path / 'disk/run.h5'}'"
        assert [lines.pop(0), lines.pop(0)] == [said, said]
        path = tmp_path / f"saved/{size}.h5"
        rows = len(read_steps(path)["step"])
        assert 100 < rows == step // 50 * 50
        check(path, rows, 3)
        write_rows(path, rows + 5, 3, keep_below=rows)
        check(path, rows + 5, 3)
    assert not lines
