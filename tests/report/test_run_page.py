"""A run in words and figures: complete, going on, killed, stopped, with one row and with none."""

import inspect
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from okrt.report import run_file
from okrt.report.page import csv_of
from okrt.report.run_page import figures, headlines, progress, report_on, summary_rows
from okrt.report.run_plots import MOST_POINTS, breakdown_s, thinned
from tests.report import examples


def values(run: run_file.Run) -> dict[str, Any]:
    return {name: value for name, value, _ in figures(run)}


def test_figures_of_a_complete_run(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    examples.run(path, 60, steps=60, dense_steps=5)
    run = run_file.read(path)
    assert run.state == run_file.COMPLETE and progress(run) == "60 of 60 steps. The run is complete."
    found = values(run)
    with h5py.File(path) as file:
        steps = {name: column[:] for name, column in file["steps"].items()}
        ranks = {name: column[:] for name, column in file["ranks"].items()}
    assert found["loss_last"] == steps["loss"][-1]
    assert found["eval_loss_last"] == steps["eval_loss"][-1]
    assert found["eval_loss_best"] == min(loss for loss in steps["eval_loss"] if loss == loss)
    assert found["bytes_received"] == sum(steps["bytes_received"])
    assert found["words_over_k_max"] == max(steps["words_over_k"][5:]) < 4.5 < max(steps["words_over_k"])
    assert found["words_over_k_median"] == np.median(steps["words_over_k"][5:])
    assert found["exact_steps"] == 5
    assert found["samples_per_s"] == pytest.approx(32 * 59 / sum(steps["step_s"][1:]))
    # The parts of every rank add up to the time of the slowest one.
    parts = breakdown_s(run)
    assert parts.shape == (4, 4)
    np.testing.assert_allclose(parts.sum(axis=1), steps["step_s"][1:].mean())
    np.testing.assert_allclose(parts[:, 2], ranks["idle_s"][1:].mean(axis=0))
    hidden = np.maximum(0, ranks["comm_s"] - ranks["idle_s"])[1:].mean(axis=0)
    np.testing.assert_allclose(parts[:, 1], hidden)
    np.testing.assert_allclose(run.k, 30_000, rtol=1e-12)


def test_the_report_of_a_complete_run(tmp_path: Path) -> None:
    examples.run(tmp_path / "run.h5", 60, steps=60, dense_steps=5)
    run = run_file.read(tmp_path / "run.h5")
    report = report_on(run)
    pictures = {picture.name: picture for picture in report.pictures}
    assert list(pictures) == ["loss", "selected", "words", "breakdown", "lr"]
    assert report.title == "gpt_bytes on 4 ranks, oktopk" and not report.warnings
    over_steps, over_time, over_bytes = pictures["loss"].figure.axes
    np.testing.assert_array_equal(over_steps.lines[0].get_ydata(), run.steps["loss"])
    np.testing.assert_allclose(over_time.lines[0].get_xdata(), np.cumsum(run.steps["step_s"]))
    np.testing.assert_allclose(over_bytes.lines[0].get_xdata(), np.cumsum(run.steps["bytes_received"]) / 1e6)
    assert over_steps.lines[1].get_xdata().tolist() == [20, 40, 60]
    (axis,) = pictures["selected"].figure.axes
    np.testing.assert_allclose(axis.lines[0].get_ydata(), run.ranks["selected"][5:].mean(axis=1) / 30_000)
    assert "k is about 30,000" in pictures["selected"].caption and "first 5 steps" in pictures["selected"].caption
    (axis,) = pictures["words"].figure.axes
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), run.steps["words_over_k"][5:])
    assert csv_of(summary_rows(run)).splitlines()[:3] == ["figure,value,unit", "state,complete,", "ranks,4,1"]
    assert f"loss_last,{float(run.steps['loss'][-1])!r},1\n" in csv_of(summary_rows(run))


def test_a_bound_that_was_exceeded_is_a_warning(tmp_path: Path) -> None:
    examples.run(tmp_path / "run.h5", 9)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["steps/words_over_k"][6] = 4.51
        file["steps/bytes_received"][6] = 4 * 4.51 * 30_000
    (line,) = report_on(run_file.read(tmp_path / "run.h5")).warnings
    assert line == "The bound was EXCEEDED in 1 steps, first in step 7."


# Writes runs of no, one and some rows, says so, and waits to be killed.
WRITER = """
import sys
from pathlib import Path
from tests.report import examples

runs = [examples.run(Path(sys.argv[1]) / f"{rows}.h5", rows, close=False) for rows in (0, 1, 70)]
print("written", flush=True)
sys.stdin.read()
"""


def test_runs_that_go_on_and_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    root = Path(inspect.getfile(examples)).parents[2]
    with subprocess.Popen(command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout and writer.stdout.readline() == "written\n"
            going = {rows: report_on(run_file.read(tmp_path / f"{rows}.h5")) for rows in (0, 1, 70)}
        finally:
            writer.kill()
    assert writer.returncode == -signal.SIGKILL
    for rows, report in going.items():
        start = f"{rows} of 400 steps." if rows else "No step of 400 has been recorded yet: there is nothing to show."
        assert report.lead[0] == f"{start} The run is still going, or it was killed: its file has not been closed."
        assert len(report.pictures) == (5 if rows else 0)
        killed = run_file.read(tmp_path / f"{rows}.h5")
        assert report.lead[0] == progress(killed)
        assert report.summary == summary_rows(killed) and report.headlines == headlines(killed)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    examples.run(tmp_path / "run.h5", 7)
    run = run_file.read(tmp_path / "run.h5")
    assert progress(run).startswith("7 of 400 steps. The run ended before its last step and closed its file")


def test_one_rank_sends_nothing_and_k_is_not_known(tmp_path: Path) -> None:
    examples.run(tmp_path / "run.h5", 30, ranks=1)
    run = run_file.read(tmp_path / "run.h5")
    pictures = {picture.name: picture for picture in report_on(run).pictures}
    assert list(pictures) == ["loss", "selected", "breakdown", "lr"]
    (axis,) = pictures["selected"].figure.axes
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), run.ranks["selected"][:, 0])
    assert axis.lines[1].get_ydata()[0] == np.median(run.ranks["selected"])
    assert "does not tell k" in pictures["selected"].caption
    assert len(pictures["loss"].figure.axes) == 2
    assert values(run)["words_over_k_max"] is None and not any("words/k" in text for text in headlines(run))


def test_ranks_that_joined_later(tmp_path: Path) -> None:
    """As after a resume on more ranks: the early rows of the new ones are missing."""
    path = tmp_path / "run.h5"
    examples.run(path, 40)
    with h5py.File(path, "r+") as file:
        for name in ("step_s", "comm_s", "idle_s"):
            file["ranks"][name][:20, 3] = np.nan
        for name in ("selected", "bytes_received"):
            file["ranks"][name][:20, 3] = -1
    run = run_file.read(path)
    assert np.isnan(run.ranks["selected"][:20, 3]).all() and np.isfinite(breakdown_s(run)).all()
    (axis,) = {picture.name: picture for picture in report_on(run).pictures}["selected"].figure.axes
    expected = np.append(run.ranks["selected"][:20, :3].mean(axis=1), run.ranks["selected"][20:].mean(axis=1)) / 30_000
    np.testing.assert_allclose(axis.lines[0].get_ydata(), expected)


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_long_lines_are_thinned_to_means(count: int) -> None:
    x, y = np.arange(count), np.random.default_rng(count).standard_normal(count)
    few_x, few_y = thinned(x, y)
    each = int(np.ceil(count / MOST_POINTS))
    assert len(few_x) == len(few_y) == np.ceil(count / each) <= MOST_POINTS
    for at in (0, len(few_x) - 1):
        assert few_x[at] == x[at * each : (at + 1) * each].mean()
        assert few_y[at] == pytest.approx(y[at * each : (at + 1) * each].mean())
