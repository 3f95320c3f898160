"""Mistakes that some ranks find, or all."""

import pytest

from okrt.cli.mistakes import KnownToAll, checking
from okrt.errors import UsageError
from tests.ranks import LocalTransport, run_ranks


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (["no file"] * 3, "no file"),
        (["no file"], "no file"),
        (["", "no file", ""], "rank 1: no file"),
        (["no file", "", "no file"], "rank 0, 2: no file"),
        (["", "", ""], None),
    ],
)
def test_a_mistake_is_known_to_all(found: list[str], told: str | None) -> None:
    def body(transport: LocalTransport) -> str | None:
        try:
            with checking(transport):
                if found[transport.rank]:
                    raise UsageError(found[transport.rank])
        except KnownToAll as error:
            return str(error)
        return None

    assert run_ranks(len(found), body) == [told] * len(found)


def test_other_errors_are_not_held_back() -> None:
    def body(transport: LocalTransport) -> None:
        with checking(transport):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, body)
