"""A sweep in words, tables and CSV, and which plots it gets."""

import csv
from pathlib import Path

import numpy as np
import pytest

from okrt.report import sweep_file
from okrt.report.comparison import Comparison
from okrt.report.grid import Grid
from okrt.report.page import csv_of
from okrt.report.sweep_file import FIGURES, Sweep
from okrt.report.sweep_page import (
    bounds_exceeded,
    bounds_kept,
    headlines,
    losses,
    measured,
    progress,
    report_on,
    summary,
    warnings,
)
from tests.report import examples


def parts(sweep: Sweep) -> tuple[Grid, Comparison]:
    grid = Grid(sweep)
    return grid, Comparison(grid)


def with_times(sweep: Sweep, seconds: dict[str, float]) -> Sweep:
    """The medians of each reducer, with narrow intervals."""
    for number in range(sweep.size):
        median = seconds[sweep.points["reducer"][number]]
        sweep.points["median_s"][number] = median
        sweep.points["ci95_low_s"][number], sweep.points["ci95_high_s"][number] = 0.99 * median, 1.01 * median
    sweep._compare_with_dense()
    return sweep


def test_the_loser_is_named_with_where_and_by_how_much() -> None:
    sweep = with_times(examples.sweep(ranks=[4]), {"dense": 0.1, "topka": 0.25, "oktopk": 0.05})
    assert losses(*parts(sweep)) == ["topka on 4 ranks: 2.5 times as long as dense."]
    (line,) = headlines(Grid(sweep))
    assert line.startswith("On 4 ranks, oktopk is fastest: 50 ms a step, 2 times as fast as the best other, dense.")


def test_a_loss_that_may_be_chance() -> None:
    sweep = with_times(examples.sweep(ranks=[4]), {"dense": 0.1, "topka": 0.101, "oktopk": 0.1005})
    assert [text.partition(":")[0] for text in losses(*parts(sweep))] == ["topka on 4 ranks", "oktopk on 4 ranks"]
    assert all("may be chance" in text for text in losses(*parts(sweep)))
    (line,) = headlines(Grid(sweep))
    assert line.startswith("On 4 ranks, dense is fastest: 100 ms a step") and "may be chance" in line


def test_what_varies_is_said_with_a_loss() -> None:
    sweep = examples.sweep(ranks=[2], reducer=["dense", "topka"], density=[0.01, 0.9], lab=["1gbit", "10gbit"])
    assert losses(*parts(sweep))[0].startswith("topka on 2 ranks, 10 Gbit/s between the ranks, density 90 %: ")


def test_on_one_rank_there_is_nothing_to_gain() -> None:
    sweep = with_times(examples.sweep(ranks=[1]), {"dense": 0.1, "topka": 0.3, "oktopk": 0.2})
    (line,) = losses(*parts(sweep))
    assert line.endswith("Times as long as dense: topka 3, oktopk 2.")


def test_no_loss_no_list() -> None:
    assert losses(*parts(with_times(examples.sweep(ranks=[4]), {"dense": 1, "topka": 0.5, "oktopk": 0.1}))) == []
    assert losses(*parts(examples.sweep(ranks=[4], reducer=["topka"]))) == []


def test_the_fastest_is_compared_at_its_own_density() -> None:
    sweep = examples.sweep(ranks=[4], reducer=["dense", "topka"], density=[0.01, 0.9], lab=["10gbit"])
    sparse, most = headlines(Grid(sweep))
    assert sparse.startswith("On 4 ranks, density 1 %, topka is fastest: ")
    assert most.startswith("On 4 ranks, density 90 %, dense is fastest: ")
    ratio = sweep.points["median_s"][2] / sweep.points["median_s"][0]
    assert f" {ratio:.3g} times as fast as the best other, topka" in most and ratio > 2


def test_bounds() -> None:
    sweep = examples.sweep(ranks=[2, 4])
    kept = ["No sparse scheme received more words in any step than its bound, control words aside."]
    assert bounds_kept(*parts(sweep)) == kept and bounds_exceeded(*parts(sweep)) == []
    sweep.points["words_over_k_max"][5] = 4.9
    assert bounds_kept(*parts(sweep)) == []
    assert bounds_exceeded(*parts(sweep)) == ["The bound was EXCEEDED: oktopk on 4 ranks: 4.9 words/k, bound 4.5."]
    assert bounds_kept(*parts(examples.sweep(reducer=["dense"]))) == []


def test_how_far_it_is() -> None:
    sweep = examples.sweep(left=4)
    assert progress(Grid(sweep)) == "5 of 9 points so far; 4 are pending."
    sweep.fail(5, "a stall", "", "")
    assert progress(Grid(sweep)) == "5 of 9 points so far; 1 failed; 3 are pending."
    assert progress(Grid(examples.sweep())) == "9 of 9 points measured."


def test_what_was_measured() -> None:
    text = measured(Grid(examples.sweep(density=[0.01, 0.02])))
    assert text.startswith("Allreduces on 1, 2 and 4 ranks with dense, topka and oktopk; 4,194,304 elements; ")
    assert "density 1 % and 2 %" in text and "1 Gbit/s between the ranks" in text and "Strong scaling" in text
    weak = examples.sweep("weak", elements=[1000])
    assert "1,000 elements a rank" in measured(Grid(weak)) and "Weak scaling" in measured(Grid(weak))
    job = examples.sweep(job="gpt_bytes", **{"optimizer.lr": [2e-3, 4e-3]})
    assert measured(Grid(job)).startswith("Training steps of gpt_bytes on 1, 2")
    assert "optimizer.lr 0.002 and 0.004" in measured(Grid(job))


def test_two_versions_of_the_code_are_noticed() -> None:
    sweep = examples.sweep()
    assert warnings(Grid(sweep)) == []
    sweep.points["code"][3] = "0.1.0 abcdef0"
    (line,) = warnings(Grid(sweep))
    assert "2 versions of the code: 0.1.0 0deb6e8, 0.1.0 abcdef0" in line


def test_the_csv_holds_every_point_with_all_digits(tmp_path: Path) -> None:
    made = examples.sweep(left=2, **{'a "key"': [0.1, 0.2]}, reducer=["dense", "oktopk"], job="cnn_digits")
    made.fail(1, 'rank 1, said:\n"no"', "0.1.0", "2026-11-18")
    sweep_file.write(tmp_path / "sweep.h5", made)
    sweep = sweep_file.read(tmp_path / "sweep.h5")
    (tmp_path / "summary.csv").write_text(csv_of(summary(*parts(sweep))))
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sweep.size == 12
    for name in (*sweep.settings, "status", "reason", "k", "repetitions", *FIGURES):
        read = [row[name] for row in rows]
        if sweep.points[name].dtype == object:
            assert read == sweep.points[name].tolist()
        else:
            np.testing.assert_array_equal([float(text or "nan") for text in read], sweep.points[name], name)
    for at, phase in enumerate(sweep.phases):
        read = [float(row[f"{phase}_s"] or "nan") for row in rows]
        np.testing.assert_array_equal(read, sweep.points["phase_s"][:, at])
    comparison = parts(sweep)[1]
    for name in ("efficiency", "speedup_over_best_other"):
        np.testing.assert_array_equal([float(row[name] or "nan") for row in rows], getattr(comparison, name))
    assert [row["best_other"] for row in rows[:4]] == ["oktopk", "", "dense", ""]


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ({}, "time efficiency speedup_over_dense speedup_over_best_other words phases"),
        ({"reducer": ["oktopk"], "ranks": [4]}, "time words phases"),
        ({"reducer": ["dense"], "ranks": [1]}, "time phases"),
        (
            {"density": [0.01, 0.02], "ranks": [4], "lab": ["1gbit", ""]},
            "time speedup_over_dense speedup_over_best_other words over_density phases",
        ),
        (
            {"job": "gpt_bytes", "optimizer.lr": [1, 2], "reducer": ["dense", "oktopk"]},
            "time efficiency speedup_over_dense speedup_over_best_other words over_optimizer_lr phases",
        ),
    ],
)
def test_which_plots(grid: dict, names: str) -> None:
    report = report_on(examples.sweep(**grid))
    assert [picture.name for picture in report.pictures] == names.split()


def test_what_the_plots_show() -> None:
    sweep = examples.sweep(ranks=[1, 2, 4, 8], reducer=["dense", "oktopk"])
    pictures = {picture.name: picture for picture in report_on(sweep).pictures}
    (axis,) = pictures["time"].figure.axes
    drawn = [line.get_ydata() for line in axis.lines]
    for first in (0, 1):
        assert any(np.array_equal(y, 1e3 * sweep.points["median_s"][first::2]) for y in drawn)
        model = 1e3 * sweep.points["alpha_beta_s"][first::2]
        assert any(np.array_equal(y, model, equal_nan=True) for y in drawn)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "4", "8"]
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert "2 ranks" in pictures["efficiency"].title and "2 ranks" in pictures["efficiency"].caption
    (axis,) = pictures["speedup_over_dense"].figure.axes
    (line,) = (line for line in axis.lines if len(line.get_xdata()) == 3)
    np.testing.assert_array_equal(line.get_ydata(), sweep.points["speedup_over_dense"][3::2])
    assert "1 rank, where nothing is sent, is left out" in pictures["speedup_over_dense"].caption
    assert "dense would be far off this chart" in pictures["words"].caption
    (axis,) = pictures["words"].figure.axes
    (band,) = axis.collections
    for ranks, (low, high) in zip((2, 4, 8), ((1, 3), (1.5, 4.5), (1.75, 5.25)), strict=True):
        edges = band.get_paths()[0].vertices
        assert set(edges[edges[:, 0] == ranks][:, 1]) == {low, high}


def test_a_reducer_has_one_colour_in_all_plots() -> None:
    from okrt.report.plots import look

    names = [*examples.ALL, "cgx", "one", "two", "three", "four", "five"]
    looks = [tuple(look(name, names).values()) for name in names]
    assert len(set(looks)) == len(names)
    assert look("two", ["two", "dense"])["color"] != look("dense", ["two", "dense"])["color"]


def test_nothing_measured() -> None:
    sweep = examples.sweep(left=9)
    report = report_on(sweep)
    assert report.pictures == report.tables == report.headlines == report.losses == []
    assert "0 of 9 points so far; 9 are pending. Nothing was measured" in report.lead[-1]
    for number in range(9):
        sweep.fail(number, "no route to host <b>", "", "")
    report = report_on(sweep)
    assert "0 of 9 points measured; 9 failed. Nothing was measured" in report.lead[-1]
    (table,) = report.tables
    assert len(table.rows) == 9 and table.rows[3] == ["dense", "2 ranks", "no route to host <b>"]
