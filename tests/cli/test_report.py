"""okrt report: what it says and leaves behind, and what it refuses."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from okrt.errors import EX_IO, EX_USAGE
from okrt.report import sweep_file
from tests.report import examples

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three points; topka loses to dense."""
    made = examples.sweep(ranks=[4], lab=[""], density=[0.3])
    sweep_file.write(tmp_path / "sweep.h5", made)
    return tmp_path / "sweep.h5"


def test_a_sweep(command: Command, sweep: Path, tmp_path: Path) -> None:
    code, out, err = command("report", sweep, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    losses = out.partition("Slower than dense:\n")[2]
    assert "topka on 4 ranks: " in losses and "times as long as dense" in losses
    assert out.endswith(f"Report: {tmp_path / 'out/report.html'}\n")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = ("time", "speedup_over_dense", "speedup_over_best_other", "words", "phases")
    assert names == {"report.html", "summary.csv"} | {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    html = (tmp_path / "out/report.html").read_text()
    assert "Slower than dense" in html and "topka on 4 ranks: " in html
    assert len((tmp_path / "out/summary.csv").read_text().splitlines()) == 4


def test_a_run_without_rows(command: Command, tmp_path: Path) -> None:
    examples.run(tmp_path / "run.h5", 0)
    code, out, err = command("report", tmp_path / "run.h5", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "No step of 400 has been recorded yet" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "summary.csv"}


def test_a_sweep_without_a_measured_point(command: Command, tmp_path: Path) -> None:
    sweep_file.write(tmp_path / "sweep.h5", examples.sweep(left=9))
    code, out, err = command("report", tmp_path / "sweep.h5", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert "0 of 9 points so far; 9 are pending. Nothing was measured" in out
    assert "Nothing was measured" in (tmp_path / "report.html").read_text()


def absent(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("median_s 0.3\n")


def foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["weights"] = [1.0, 2.0]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_column(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["points/median_s"]


def of_another_shape(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["points/median_s"]
        file["points/median_s"] = [1.0, 2.0]


def of_a_later_layout(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 99


def with_another_config(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["config"] = "{scaling"


@pytest.mark.parametrize(
    ("spoil", "expected", "says"),
    [
        (absent, EX_IO, "No such file"),
        (folder, EX_IO, "Is a directory"),
        (empty, EX_IO, "the file is empty"),
        (text, EX_USAGE, "is not an HDF5 file: okrt report takes a sweep.h5 or a run.h5"),
        (foreign, EX_USAGE, "neither of a sweep nor of a run"),
        (truncated, EX_IO, "the file cannot be read"),
        (without_a_column, EX_IO, "median_s"),
        (of_another_shape, EX_IO, "the file is damaged"),
        (of_a_later_layout, EX_USAGE, "has the layout 99"),
        (with_another_config, EX_IO, "the file is damaged"),
    ],
)
def test_a_file_that_cannot_be_shown(
    command: Command, sweep: Path, tmp_path: Path, spoil: Callable[[Path], None], expected: int, says: str
) -> None:
    spoil(sweep)
    before = sweep.read_bytes() if sweep.is_file() else b""
    code, out, err = command("report", sweep, "--out", tmp_path / "out")
    assert (code, out) == (expected, "")
    assert err.startswith("okrt: ") and err.count("\n") == 1 and says in err and str(sweep) in err
    assert not (tmp_path / "out").exists() and before == (sweep.read_bytes() if sweep.is_file() else b"")


@pytest.mark.parametrize("rows", [0, 60])
def test_a_run_cut_short(command: Command, tmp_path: Path, rows: int) -> None:
    path = tmp_path / "run.h5"
    examples.run(path, rows)
    whole = path.read_bytes()
    for size in (9, 100, len(whole) // 3, len(whole) * 2 // 3):
        path.write_bytes(whole[:size])
        code, out, err = command("report", path, "--out", tmp_path / "out")
        assert (code, out) == (EX_IO, "") and err.count("\n") == 1 and str(path) in err
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be(command: Command, sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    code, out, err = command("report", sweep, "--out", tmp_path / "out")
    assert (code, out, err) == (EX_IO, "", f"okrt: {tmp_path / 'out'} is a file: --out takes a folder\n")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_without_a_parent(command: Command, sweep: Path, tmp_path: Path) -> None:
    code, out, err = command("report", sweep, "--out", tmp_path / "no/out")
    assert (code, out) == (EX_IO, "")
    assert err == f"okrt: {tmp_path / 'no/out'} cannot be made: there is no folder {tmp_path / 'no'}\n"


# On a disk that can only be read, even by root.
READ_ONLY = """
import subprocess, sys
from pathlib import Path

file, disk = sys.argv[1], Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
(disk / "report.html").write_text("earlier")
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
from okrt.cli.main import main

for out in (disk, disk / "new"):
    sys.argv = ["okrt", "report", file, "--out", str(out)]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, sorted(path.name for path in disk.iterdir()))
"""
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and to be root or allowed to use user namespaces")
    (tmp_path / "disk").mkdir()
    sweep_file.write(tmp_path / "sweep.h5", examples.sweep(left=9))
    command = [*OWN_MOUNTS, sys.executable, "-c", READ_ONLY, str(tmp_path / "sweep.h5"), str(tmp_path / "disk")]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.stdout == f"{EX_IO} ['report.html']\n" * 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all("Read-only file system" in line for line in lines)
