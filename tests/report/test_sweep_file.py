"""sweep.h5: what is written is read back, opens in xarray, and is whole whatever happens."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr

from okrt.errors import UsageError
from okrt.report import sweep_file
from okrt.report.sweep_file import DONE, FAILED, PENDING, SAMPLES, Measured, Sweep

PHASES = ("select", "exchange")
POINTS = [
    {"ranks": ranks, "lab": lab, "reducer": reducer, "density": density}
    for ranks in (2, 4)
    for lab in ("", "1gbit")
    for reducer, density in (("dense", 1.0), ("oktopk", 0.01), ("oktopk", 0.1))
]


def measured(seconds: list[float]) -> Measured:
    count = len(seconds)
    samples = {"seconds": seconds, "words_over_k": [3.0, *[4.0] * (count - 1)], "bytes_received": [8.0] * count}
    arrays = {name: np.array(samples[name]) for name in SAMPLES}
    return Measured(arrays, dict.fromkeys(PHASES, 0.5), 100, 4.5, 1e-5, 1e-8, 0.25)


def half_done() -> Sweep:
    """Points 0 to 4 done, the others not, but for the last."""
    sweep = sweep_file.new(POINTS, PHASES, {"schema_version": 1, "config": "{}", "seed": 7})
    for number in range(5):
        sweep.record(number, measured([number + 1.0, number + 2.0, number + 4.0][: 3 - number % 2]), "abc", "now")
    sweep.fail(11, "no such host", "abc", "now")
    return sweep


def check_same(one: Sweep, other: Sweep) -> None:
    assert (one.attributes, one.settings, one.phases) == (other.attributes, other.settings, other.phases)
    for mine, theirs in ((one.points, other.points), (one.samples, other.samples)):
        assert list(mine) == list(theirs)
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, sweep = tmp_path / "sweep.h5", half_done()
    for state in (sweep_file.new(POINTS, PHASES, {"schema_version": 1}), sweep):
        sweep_file.write(path, state)
        check_same(sweep_file.read(path), state)
    assert [sweep.numbers(status) for status in (DONE, FAILED, PENDING)] == [[*range(5)], [11], [*range(5, 11)]]
    assert [sweep.setting(number) for number in range(12)] == POINTS
    assert os.listdir(tmp_path) == ["sweep.h5"]


def test_figures_of_a_point() -> None:
    sweep = half_done()
    row = {name: column[0] for name, column in sweep.points.items()}
    assert (row["median_s"], row["ci95_low_s"], row["ci95_high_s"], row["repetitions"]) == (2.0, 1.0, 4.0, 3)
    assert (row["words_over_k_median"], row["words_over_k_max"], row["bytes_received"]) == (4.0, 4.0, 8.0)
    assert np.isnan(sweep.samples["seconds"][1, 2]) and sweep.samples["seconds"][0, 2] == 4.0
    # The dense points 0 and 3 have medians of 2 and 4.5; there is none for 4 ranks yet.
    medians = np.array([2.0, 2.5, 4.0, 4.5, 6.0])
    np.testing.assert_allclose(sweep.points["speedup_over_dense"][:5], [2, 2, 2, 4.5, 4.5] / medians)
    assert np.isnan(sweep.points["speedup_over_dense"][5:]).all()


def test_a_failed_point_measured_again() -> None:
    sweep = half_done()
    sweep.forget(11)
    assert sweep.numbers(FAILED) == [] and 11 in sweep.numbers(PENDING)
    assert sweep.points["reason"][11] == ""
    sweep.record(11, measured([1.0]), "def", "later")
    assert (sweep.points["median_s"][11], sweep.points["code"][11]) == (1.0, "def")


def test_xarray_finds_dimensions_coordinates_and_units(tmp_path: Path) -> None:
    path, sweep = tmp_path / "sweep.h5", half_done()
    sweep_file.write(path, sweep)
    with xr.open_dataset(path, group="points", engine="h5netcdf") as points:
        assert dict(points.sizes) == {"point": 12, "phase": 2}
        assert set(points.coords) == {"point", "phase", "ranks", "lab", "reducer", "density"}
        assert points.median_s.dims == ("point",) and points.phase_s.dims == ("point", "phase")
        assert [points[name].attrs["units"] for name in ("median_s", "bytes_received", "ranks")] == ["s", "bytes", "1"]
        chosen = points.median_s.where((points.reducer == "oktopk") & (points.ranks == 2), drop=True)
        np.testing.assert_array_equal(chosen, sweep.points["median_s"][[1, 2, 4, 5]])
    with xr.open_dataset(path, group="samples", engine="h5netcdf") as samples:
        assert samples.seconds.dims == ("point", "repetition") and samples.seconds.shape == (12, 3)
        np.testing.assert_array_equal(samples.seconds, sweep.samples["seconds"])


# Forks of one process, which takes longer to start than to be killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.report.test_sweep_file import check_same, half_done
from okrt.report import sweep_file

sweep, path = half_done(), Path(sys.argv[1])
for moment in range(5):
    reading, writing = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            sweep_file.write(path, sweep)
            os.write(writing, b"begun")
            while True:
                sweep_file.write(path, sweep)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 5) == b"begun"
    os.close(reading)
    for _ in range(3 * moment):  # reading takes some milliseconds
        check_same(sweep_file.read(path), sweep)
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL
    check_same(sweep_file.read(path), sweep)
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    """Whatever the moment, the file is whole."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "sweep.h5")], check=True, timeout=60)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path, old = tmp_path / "sweep.h5", half_done()
    sweep_file.write(path, old)
    large = half_done()
    large.record(5, measured([1.0] * 100_000), "abc", "now")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="the sweep cannot be written: File too large"):
            sweep_file.write(path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    check_same(sweep_file.read(path), old)
    assert os.listdir(tmp_path) == ["sweep.h5"]


@pytest.mark.parametrize("content", [b"", b"text\n", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_a_file_that_is_no_hdf5(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sweep.h5"
    path.write_bytes(content)
    with pytest.raises(OSError, match="the sweep cannot be read"):
        sweep_file.read(path)
    assert path.read_bytes() == content


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.h5"
    sweep_file.write(path, half_done())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(OSError, match="the sweep cannot be read"):
        sweep_file.read(path)


def test_hdf5_of_something_else_or_of_another_okrt(tmp_path: Path) -> None:
    path = tmp_path / "sweep.h5"
    with h5py.File(path, "w") as file:
        file["steps/loss"] = [1.0]
    with pytest.raises(UsageError, match="not one of a sweep"):
        sweep_file.read(path)
    sweep_file.write(path, half_done())
    with h5py.File(path, "a") as file:
        file.attrs["schema_version"] = 99
    with pytest.raises(UsageError, match="has the layout 99, this okrt knows 1"):
        sweep_file.read(path)
