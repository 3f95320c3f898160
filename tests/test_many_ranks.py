"""The reducers and the transport at more ranks than the machine may have cores."""

import re
from collections.abc import Callable

import pytest

# Whether results are right, not what is refused: that does not depend on the number of ranks.
NUMBERS = "(mean or lost or bound or identical or largest) and not bfloat16"


def passed_on_each_rank(start: Callable, ranks: int, file: str, chosen: str) -> int:
    """How many of the chosen tests of a file pass, which must be the same on every rank."""
    options = ["--with-mpi", "-q", "-p", "no:cacheprovider", "-k", chosen]
    done = start("python", "-m", "pytest", *options, file, ranks=ranks, limit_s=240)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    # Every rank passed, or the exit code were another; their lines may be mixed up.
    (passed,) = {int(count) for count in re.findall(r"(\d+) passed", done.stdout)}
    return passed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [5, 7, 8])
def test_reducers(start: Callable, ranks: int) -> None:
    assert passed_on_each_rank(start, ranks, "tests/mpi/test_reducers.py", NUMBERS) > 100


@pytest.mark.timeout(300)
def test_an_exchange_with_more_peers_than_are_served_at_once(start: Callable) -> None:
    assert passed_on_each_rank(start, 10, "tests/mpi/test_transport.py", "more_peers_than_are_served") == 1
