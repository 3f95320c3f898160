"""The reducers at more ranks than the machine may have cores."""

import re
from collections.abc import Callable

import pytest

# Whether results are right, not what is refused: that does not depend on the number of ranks.
NUMBERS = "(mean or lost or bound or identical or largest) and not bfloat16"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [5, 7, 8])
def test_reducers(start: Callable, ranks: int) -> None:
    options = ["--with-mpi", "-q", "-p", "no:cacheprovider", "-k", NUMBERS]
    done = start("python", "-m", "pytest", *options, "tests/mpi/test_reducers.py", ranks=ranks, limit_s=240)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    # Every rank passed, or the exit code were another; their lines may be mixed up.
    passed = {int(count) for count in re.findall(r"(\d+) passed", done.stdout)}
    assert len(passed) == 1
    assert passed.pop() > 100
