"""What is counted, against closed forms."""

import math

import pytest

from okrt.transport import Ledger
from okrt.transport.ledger import log2_ceil

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 1000]


@pytest.mark.parametrize("size", SIZES)
def test_log2_ceil(size: int) -> None:
    assert log2_ceil(size) == math.ceil(math.log2(size))


def test_starts_empty() -> None:
    ledger = Ledger()
    assert (ledger.bytes_sent, ledger.bytes_received, ledger.words_received, ledger.messages) == (0, 0, 0, 0)
    assert ledger.seconds == {}


@pytest.mark.parametrize(("nbytes", "words"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_words_are_rounded_up(nbytes: int, words: int) -> None:
    ledger = Ledger()
    ledger.record(received=nbytes)
    assert ledger.words_received == words


def test_phases_add_up_and_begin_forgets() -> None:
    ledger = Ledger()
    ledger.record(sent=1)
    for _ in range(2):
        with ledger.phase("split"):
            ledger.record(sent=10, received=20, messages=1)
    with pytest.raises(ZeroDivisionError), ledger.phase("gather"):
        ledger.record(received=300)
        raise ZeroDivisionError
    ledger.record(sent=2)
    assert {name: (entry.bytes_sent, entry.bytes_received) for name, entry in ledger.phases.items()} == {
        "other": (3, 0),
        "split": (20, 40),
        "gather": (0, 300),
    }
    assert (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (23, 340, 2)
    assert ledger.seconds.keys() == {"other", "split", "gather"}
    assert ledger.seconds["split"] > 0
    ledger.begin()
    assert ledger.phases == {}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nbytes", [0, 4, 12, 4000])
def test_collectives(nbytes: int, size: int) -> None:
    def counted(method: str, *arguments: int) -> tuple[int, int, int]:
        ledger = Ledger()
        getattr(ledger, method)(*arguments, size)
        return ledger.bytes_sent, ledger.bytes_received, ledger.messages

    rounds = math.ceil(math.log2(size))
    assert counted("record_allreduce", nbytes) == (rounds * nbytes, rounds * nbytes, rounds)
    assert counted("record_allgather", nbytes) == ((size - 1) * nbytes, (size - 1) * nbytes, rounds)
    assert counted("record_allgatherv", nbytes, nbytes + 80) == ((size - 1) * nbytes, 80, size - 1)
