"""The reducers at more ranks than the machine may have cores."""

from collections.abc import Callable
from pathlib import Path

import pytest

SIZES = (5, 7, 8)
REDUCERS = 6
# Whether results are right, not what is refused: that does not depend on the number of ranks. Types, lengths,
# densities and gradients of all kinds are tried with ranks in one process, and with real ones up to four.
CASES = {
    "dense_is_the_mean and (70001-float32 or [1-float16)": 2,
    "density_1_is_the_mean and float32": REDUCERS - 1,
    "nothing_is_lost and (12001-0.01-float32 or 7-0.5-float16)": 2 * (REDUCERS - 1),
    "largest_of_each_rank": 2,
    "within_the_bound and 0.02 and (gradient or one_region or disjoint or jump)": 4,
}

# Eight ranks, of which the first five, seven and eight are in turn all that okrt and the tests see.
DRIVER = """
import os, sys, time
from pathlib import Path
import pytest
import okrt.kernels.cpu

# Ranks that wait in MPI take the cores from those that still load the kernels: here they sleep.
folder, cases, *sizes = sys.argv[1:]
Path(f"{folder}.loaded.{os.getpid()}").touch()
while len(list(Path(folder).parent.glob("*.loaded.*"))) < max(map(int, sizes)):
    time.sleep(0.05)

from mpi4py import MPI

ALL = MPI.COMM_WORLD

class Count:
    passed = 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed

for size in map(int, sizes):
    comm = ALL.Split(0 if ALL.rank < size else MPI.UNDEFINED, ALL.rank)
    if comm != MPI.COMM_NULL:
        MPI.COMM_WORLD = comm
        okrt.init.cache_clear()
        okrt.world.join.cache_clear()
        count = Count()
        sys.modules.pop("tests.mpi.test_reducers", None)
        options = ["--with-mpi", "-q", "-p", "no:cacheprovider", "-k", cases]
        code = pytest.main([*options, "tests/mpi/test_reducers.py"], [count])
        assert code == 0, code
        Path(folder, f"{size}.{comm.rank}").write_text(f"{okrt.init().size} ranks: {count.passed} passed")
    done = ALL.Ibarrier()
    while not done.Test():
        time.sleep(0.01)
"""


@pytest.mark.timeout(300)
def test_reducers(start: Callable, tmp_path: Path) -> None:
    script, told = tmp_path / "driver.py", tmp_path / "told"
    script.write_text(DRIVER)
    told.mkdir()
    cases = " or ".join(f"({case})" for case in CASES)
    done = start("python", script, told, cases, *SIZES, ranks=max(SIZES), limit_s=240)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    expected = {
        f"{size}.{rank}": f"{size} ranks: {sum(CASES.values())} passed" for size in SIZES for rank in range(size)
    }
    assert {file.name: file.read_text() for file in told.iterdir()} == expected
