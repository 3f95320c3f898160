"""`okrt bench allreduce`, as a user starts it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

HAS_LAB = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
ELEMENTS, K = 20_000, 200
PATIENCE_S = 110  # to start on a busy machine
SMALL = ["bench", "allreduce", "--elements", ELEMENTS, "--steps", 3, "--warmup", 1]
FIELDS = [
    *("reducer", "ranks", "elements", "density", "lab", "steps", "median_ms", "ci95_low_ms", "ci95_high_ms"),
    *("words_over_k_median", "words_over_k_max", "bytes_received_median", "bound_words_over_k", "alpha_beta_ms"),
]
OPTIONS = [
    *("--reducers", "--elements", "--density", "--ranks", "--steps", "--warmup"),
    *("--max-seconds", "--lab", "--seed", "--json"),
]


def control_words(ranks: int) -> int:
    return 8 * ranks + 64


def check_rows(rows: list[dict], names: list[str], ranks: int, lab: str | None = None) -> None:
    assert [row["reducer"] for row in rows] == names
    bounds = {"oktopk": 6 * (ranks - 1) / ranks}
    for row in rows:
        assert list(row) == FIELDS
        assert (row["ranks"], row["elements"], row["density"], row["steps"]) == (ranks, ELEMENTS, 0.01, 3)
        assert row["lab"] == lab
        assert 0 < row["ci95_low_ms"] <= row["median_ms"] <= row["ci95_high_ms"] < 60_000
        bound = bounds.get(row["reducer"], 2 * ELEMENTS * (ranks - 1) / ranks / K)
        assert row["bound_words_over_k"] == pytest.approx(bound)
        assert 0 < row["words_over_k_median"] <= row["words_over_k_max"] <= bound + control_words(ranks) / K
        assert row["bytes_received_median"] == pytest.approx(4 * K * row["words_over_k_median"], abs=4)
        assert row["alpha_beta_ms"] > 0


@pytest.mark.timeout(250)
def test_rows_and_table_and_seed(start: Callable, tmp_path: Path) -> None:
    """Three ranks: there the words of oktopk depend on the gradients."""
    file = tmp_path / "rows.json"
    names = ["dense", "oktopk", "oktopk"]
    options = ["--reducers", ",".join(names), "--seed", 3, "--json", file]
    done = start("okrt", *SMALL, "--ranks", 3, *options, limit_s=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(file.read_text())
    check_rows(rows, names, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    for row, line in zip(rows, lines_of(done.stdout, names), strict=True):
        assert (line[0], line[1]) == (row["reducer"], "3")
        assert float(line[2]) == pytest.approx(row["median_ms"], rel=0.02, abs=0.06)
    for told in ("3 ranks", f"{ELEMENTS} elements", "density 0.01", "no lab"):
        assert told in done.stdout
    assert words(rows[1]) == words(rows[2])

    # As a launcher starts it, and with another seed.
    done = start("okrt", *SMALL, "--reducers", "oktopk", "--seed", 4, "--json", file, ranks=3, limit_s=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    (other,) = json.loads(file.read_text())
    check_rows([other], ["oktopk"], 3)
    assert done.stdout.count("3 ranks") == 1
    assert words(other) != words(rows[1])


def lines_of(printed: str, names: list[str]) -> list[list[str]]:
    """The cells of the rows of the table."""
    return [line.split() for line in printed.splitlines() if line.split()[:1] and line.split()[0] in names]


def words(row: dict) -> list[float]:
    return [row[key] for key in ("words_over_k_median", "words_over_k_max", "bytes_received_median")]


def test_one_rank(start: Callable, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = start("python", "-m", "okrt", *SMALL, "--reducers", "dense,oktopk", "--json", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(row["ranks"], row["words_over_k_max"]) for row in json.loads(file.read_text())] == [(1, 0), (1, 0)]


def test_under_a_launcher_of_another_size(start: Callable) -> None:
    done = start("okrt", *SMALL, "--ranks", 3, ranks=2)
    assert done.returncode == 64
    assert "the launcher started 2 ranks (PMI_SIZE), --ranks says 3: leave --ranks out" in done.stderr
    assert "Traceback" not in done.stderr


def test_gloo_beside_oktopk(start: Callable, tmp_path: Path) -> None:
    """In a lab where there can be one."""
    lab = "1gbit" if HAS_LAB else None
    file = tmp_path / "rows.json"
    names = ["gloo", "oktopk"]
    options = [*(["--lab", lab] if lab else []), "--ranks", 2, "--reducers", ",".join(names), "--json", file]
    done = start("okrt", *SMALL, *options, limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    # torch cannot find names for the addresses of the lab, and says so.
    assert all("[c10d] The hostname" in line for line in done.stderr.splitlines())
    check_rows(json.loads(file.read_text()), names, 2, lab)
    assert [line[0] for line in lines_of(done.stdout, names)] == names
    assert ("lab 1gbit" if lab else "no lab") in done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--reducers", "dense,oktop"], "unknown 'oktop': choose from dense"),
        (["--reducers", ""], "unknown '': choose from dense"),
        (["--reducers", "oktopk:kodec=packed"], "unknown option 'kodec' of oktopk: it takes density, selector, codec"),
        (["--reducers", "oktopk:packed"], "'packed' is not an option, write NAME:OPTION=VALUE"),
        (["--reducers", "oktopk:density=0.1"], "the density is that of --density"),
        (["--reducers", "gloo:codec=coo"], "gloo has no options here"),
        (["--reducers", "gloo,dense,gloo"], "gloo can be there once only"),
        (["--density", 0], "--density is 0.0: it must be above 0 and at most 1"),
        (["--density", 1.5], "--density is 1.5"),
        (["--density", "nan"], "--density is nan"),
        (["--density", "half"], "--density"),
        (["--elements", 0], "--elements"),
        (["--elements", "many"], "--elements"),
        (["--steps", 0], "--steps"),
        (["--warmup", -1], "--warmup"),
        (["--ranks", 0], "--ranks is 0"),
        (["--ranks", -2], "--ranks is -2"),
        (["--lab", "fast"], "rate 'fast' is not a positive number with kbit, mbit or gbit"),
        (["--seed", -1], "--seed"),
        (["--max-seconds", -1], "--max-seconds"),
        (["--nonsense"], "--nonsense"),
        (["extra"], "extra"),
        (["--density"], "--density"),
    ],
)
def test_bad_options(command: Callable, options: list, told: str) -> None:
    code, out, err = command("bench", "allreduce", *options)
    assert (code, out) == (64, "")
    assert told in err
    assert err.startswith("okrt: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["trian"], ["bench", "allgather"], ["--nonsense"]])
def test_bad_commands(command: Callable, argv: list[str]) -> None:
    code, out, err = command(*argv)
    assert (code, out) == (64, "")
    assert argv[-1] in err
    assert err.count("\n") == 1


def test_bad_option_of_a_process(start: Callable) -> None:
    done = start("okrt", *SMALL, "--ranks", 2, "--density", 1.5)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)


@pytest.mark.parametrize("file", ["missing/rows.json", "."])
def test_json_that_cannot_be_written(command: Callable, tmp_path: Path, file: str) -> None:
    code, out, err = command("bench", "allreduce", "--elements", 100, "--steps", 1, "--json", tmp_path / file)
    assert (code, out) == (74, ""), "found before the measurement, not after it"
    assert str(tmp_path) in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_json_that_no_rank_can_write(start: Callable, tmp_path: Path) -> None:
    done = start("okrt", *SMALL, "--json", tmp_path / "missing" / "rows.json", ranks=2)
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr == f"okrt: --json {tmp_path}/missing/rows.json: cannot write it\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], ["bench"]),
        (["--help"], ["bench"]),
        (["bench"], ["allreduce"]),
        (["bench", "--help"], ["allreduce"]),
        (["bench", "allreduce", "--help"], OPTIONS),
    ],
)
def test_help(command: Callable, argv: list[str], told: list[str]) -> None:
    code, out, err = command(*argv)
    assert (code, err) == (0, "")
    for text in told:
        assert text in out
