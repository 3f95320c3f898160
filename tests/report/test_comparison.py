"""Efficiency, speed-ups, losses and bounds, against plain loops over the arrays of the file."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from okrt.report import sweep_file
from okrt.report.comparison import Comparison
from okrt.report.grid import Grid
from okrt.report.sweep_file import Sweep
from tests.report import examples


def compare(sweep: Sweep) -> Comparison:
    return Comparison(Grid(sweep))


def columns_of(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: data.asstr()[:] if data.dtype == object else data[:] for name, data in file["points"].items()}


@pytest.mark.parametrize("scaling", ["strong", "weak"])
@pytest.mark.parametrize("job", [None, "gpt_bytes"])
def test_efficiency(tmp_path: Path, scaling: str, job: str | None) -> None:
    sizes = {} if job else {"elements": [100_000, 4_000_000]}
    sweep_file.write(tmp_path / "sweep.h5", examples.sweep(scaling, job, ranks=[1, 2, 6], density=[0.01, 0.1], **sizes))
    found = compare(sweep_file.read(tmp_path / "sweep.h5"))
    base_ranks = 1 if job else 2
    assert found.base_ranks == base_ranks
    points = columns_of(tmp_path / "sweep.h5")
    checked = 0
    for i, ranks in enumerate(points["ranks"]):
        if ranks < base_ranks:
            assert np.isnan(found.efficiency[i])
            continue
        for base in np.flatnonzero(points["ranks"] == base_ranks):
            grows = ranks / base_ranks if scaling == "weak" else 1
            same = points["reducer"][i] == points["reducer"][base] and points["density"][i] == points["density"][base]
            if same and (job or points["elements"][i] == grows * points["elements"][base]):
                # Samples per second and rank, or elements that each rank has reduced per second.
                more = grows / (ranks / base_ranks) if job else grows
                expected = more * points["median_s"][base] / points["median_s"][i]
                assert found.efficiency[i] == pytest.approx(expected, rel=1e-12)
                checked += 1
    assert checked == np.count_nonzero(points["ranks"] >= base_ranks)


def test_without_its_base_a_point_has_no_efficiency() -> None:
    sweep = examples.sweep(ranks=[2, 4], reducer=["dense", "oktopk"])
    sweep.fail(0, "out of memory", "", "")
    found = compare(sweep)
    assert np.isnan(found.efficiency[[0, 2]]).all() and found.efficiency[1] == 1
    assert np.isfinite(found.efficiency[3])


def test_best_other(tmp_path: Path) -> None:
    made = examples.sweep(ranks=[2, 4], reducer=["gloo", "dense", "topka", "oktopk"], density=[0.001, 0.2], left=3)
    made.fail(3, "lost a rank", "", "")
    sweep_file.write(tmp_path / "sweep.h5", made)
    found = compare(sweep_file.read(tmp_path / "sweep.h5"))
    points = columns_of(tmp_path / "sweep.h5")
    exact = np.isin(points["reducer"], ["gloo", "dense"])
    for i in range(len(exact)):
        alike = (points["ranks"] == points["ranks"][i]) & (points["reducer"] != points["reducer"][i])
        alike &= (points["density"] == points["density"][i]) | exact | exact[i]
        others = np.flatnonzero(alike & (points["status"] == "done"))
        if points["status"][i] != "done" or not others.size:
            assert found.best_other[i] == -1 and np.isnan(found.speedup_over_best_other[i])
            continue
        best = others[np.argmin(points["median_s"][others])]
        assert found.best_other[i] == best
        assert found.speedup_over_best_other[i] == points["median_s"][best] / points["median_s"][i]
    assert {points["reducer"][i] for i in found.best_other if i >= 0} >= {"topka", "oktopk"}


def test_losses_to_dense(tmp_path: Path) -> None:
    grid = {"ranks": [1, 2, 4], "reducer": ["gloo", "dense", "topka", "oktopk"], "density": [0.01, 0.5]}
    sweep_file.write(tmp_path / "sweep.h5", examples.sweep(**grid))
    found = compare(sweep_file.read(tmp_path / "sweep.h5"))
    points = columns_of(tmp_path / "sweep.h5")
    expected = {}
    for i, reducer in enumerate(points["reducer"]):
        (dense,) = np.flatnonzero((points["reducer"] == "dense") & (points["ranks"] == points["ranks"][i]))
        if reducer in ("topka", "oktopk") and points["median_s"][i] > points["median_s"][dense]:
            apart = points["ci95_low_s"][i] > points["ci95_high_s"][dense]
            expected[i] = (pytest.approx(points["median_s"][i] / points["median_s"][dense]), apart)
    assert {loss.number: (loss.times_as_long, loss.is_certain) for loss in found.losses} == expected
    times = [loss.times_as_long for loss in found.losses]
    assert times == sorted(times, reverse=True) and 4 < len(times) < 12


@pytest.mark.parametrize(("excess_words", "over"), [(-1, False), (0, False), (8 * 4 + 64, False), (8 * 4 + 65, True)])
def test_a_bound_is_exceeded_by_more_than_control_words(excess_words: int, over: bool) -> None:
    sweep = examples.sweep(ranks=[4], reducer=["dense", "oktopk"])
    k = int(sweep.points["k"][1])
    sweep.points["words_over_k_max"][:] = sweep.points["bound_words_over_k"] + excess_words / k
    # Dense has a bound too, but no scheme to keep it.
    assert compare(sweep).over_bound == ([1] if over else [])
