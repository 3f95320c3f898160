"""`make demo` at a small size, as a user starts it, and what it says about numbers made up for it."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import h5py
import matplotlib.image
import numpy as np
import pytest

from okrt.perf.demo import Result, main, verdict

SMALL = ["--steps", "6", "--ranks", "2", "--set", "batch=2", "--set", "eval_every=2", "--set", "reducer.dense_steps=2"]
for setting in ("width=16", "layers=1", "text_mb=0.1", "eval_samples=8"):
    SMALL += ["--set", f"task.{setting}"]
DENSE = Result(steps=600, exact_steps=600, loss=2.0, received_bytes=2.4e9, step_s=0.100, words_over_k=None, ranks=4)
OKTOPK = Result(
    steps=600, exact_steps=30, loss=2.0, received_bytes=1.5e8, step_s=0.100, words_over_k=(3.0, 3.4), ranks=4
)


def cells(printed: str, row: str) -> list[str]:
    """Of the columns dense and oktopk."""
    (line,) = (line for line in printed.splitlines() if line.strip().startswith(row))
    return line.split()[-2:]


def check(printed: str, out: Path) -> None:
    """The table against the files of both runs."""
    runs = {}
    for name in ("dense", "oktopk"):
        with h5py.File(out / name / "run.h5") as file:
            runs[name] = {key: column[()] for key, column in file["steps"].items()}
            assert f'"name": "{name}"' in file.attrs["config"]
    received = [run["bytes_received"].sum() for run in runs.values()]
    words = runs["oktopk"]["words_over_k"][2:]
    expected = {
        "held-out loss": [run["eval_loss"][-1] for run in runs.values()],
        "MB received by a rank": [total / 1e6 for total in received],
        "MB received a step": [total / 6e6 for total in received],
        "ms a step, median": [1e3 * np.median(run["step_s"]) for run in runs.values()],
        "ms a step on a wire of 100 Mbit/s": [1e3 * total / 6 * 8 / 100e6 for total in received],
        "ms a step on a wire of 1 Gbit/s": [1e3 * total / 6 * 8 / 1e9 for total in received],
    }
    for row, figures in expected.items():
        assert [float(cell) for cell in cells(printed, row)] == pytest.approx(figures, rel=6e-3), row
    assert cells(printed, "times fewer") == ["1.0", f"{received[0] / received[1]:.1f}"]
    assert cells(printed, "words/k a step, median, after 2 exact") == ["–", f"{np.median(words):.2f}"]  # noqa: RUF001
    largest = cells(printed, "words/k a step, max; the bound 6(P-1)/P is 3.00")
    assert largest == ["–", f"{words.max():.2f}"]  # noqa: RUF001


@pytest.mark.timeout(300)
def test_a_demo_in_place_of_an_older_run(start: Callable, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    older = out / "dense" / "checkpoints" / "step_00000009"
    older.mkdir(parents=True)
    (out / "dense" / "run.h5").write_text("of an older run: okrt train refuses to begin here")
    (out / "dense" / "notes.txt").write_text("not of a run")
    demo = start("python", "-m", "okrt.perf.demo", "--out", out, *SMALL, limit_s=180)
    assert demo.returncode == 0, demo.stderr
    check(demo.stdout, out)
    assert [folder.name for folder in (out / "dense" / "checkpoints").iterdir()] == ["step_00000006"]
    assert (out / "dense" / "notes.txt").exists()
    picture, drawing = out / "demo.png", out / "demo.svg"
    assert f"Picture: {picture} and {drawing}" in demo.stdout
    height, width, _ = matplotlib.image.imread(picture).shape
    assert 1000 <= width <= 3000 and 400 <= height <= 1500
    assert ElementTree.parse(drawing).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_run_that_fails_ends_the_demo(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), *SMALL, "--set", "batch=0"]) == 64
    out, err = capfd.readouterr()
    assert "--set batch=0" in err and "1 of 2" in out and "2 of 2" not in out
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("wrong", [["--set", "reducer.name=topka"], ["--ranks", "1"]])
def test_what_is_no_comparison_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path), *wrong])
    complaint = capsys.readouterr().err
    assert end.value.code == 64
    assert complaint.startswith(wrong[0]) and wrong[1] in complaint and complaint.count("\n") == 1
    assert not any(tmp_path.iterdir())


def says(lab: str | None = None, **changes: object) -> str:
    return verdict(DENSE, dataclasses.replace(OKTOPK, **changes), lab)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (2.05, "a held-out loss 2.5 % above that of dense"),
        (1.9, "a held-out loss 5.0 % below that of dense"),
        (2.0002, "the same held-out loss as dense"),
    ],
)
def test_the_verdict_on_the_loss(loss: float, expected: str) -> None:
    assert expected in says(loss=loss)


def test_the_verdict_on_the_bytes() -> None:
    assert "16.0 times fewer bytes than dense" in says()
    assert "at most 3.40 words/k in a step, within the bound of 4.50" in says()
    assert "at most 4.60 words/k in a step, above the bound of 4.50" in says(words_over_k=(3.0, 4.6))
    exact = says(received_bytes=2.4e9, words_over_k=None, exact_steps=600, step_s=0.2)
    assert "no fewer bytes than dense" in exact and "All its steps were exact" in exact
    assert "bound" not in exact and "would make up for" not in exact


def test_the_verdict_on_the_time() -> None:
    slower = says(step_s=0.130)
    assert "1.30 times as long as with dense on this machine" in slower
    assert "no network here" in slower and "30 ms more a step" in slower
    # 3.75 MB a step fewer: 30 Mbit in 30 ms.
    assert "networks slower than about 1 Gbit/s" in slower
    assert "networks slower than about 300 Mbit/s" in says(step_s=0.200)
    faster = says(step_s=0.080)
    assert "1.25 times faster than with dense on this machine" in faster and "would make up for" not in faster
    assert "as long as with dense on this machine" in says()


def test_the_verdict_in_the_lab() -> None:
    text = says("100mbit", step_s=0.025)
    assert "4.00 times faster than with dense at 100mbit between the ranks" in text
    assert not re.search("no network|arithmetic", text)
