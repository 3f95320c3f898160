"""Mistakes that some ranks find, or all."""

import pytest

from okrt.cli.mistakes import KnownToAll, checking
from okrt.errors import UsageError
from tests.ranks import LocalTransport, run_ranks


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([UsageError("no such job")] * 3, ("no such job", 64)),
        ([OSError("no disk")], ("no disk", 74)),
        ([None, UsageError("no such job"), None], ("rank 1: no such job", 64)),
        ([OSError("no disk"), None, OSError("no disk")], ("rank 0, 2: no disk", 74)),
        ([None, OSError()], ("rank 1: OSError", 74)),
        ([None, None, None], None),
    ],
)
def test_a_mistake_is_known_to_all(found: list[Exception | None], told: tuple[str, int] | None) -> None:
    def body(transport: LocalTransport) -> tuple[str, int] | None:
        try:
            with checking(transport):
                error = found[transport.rank]
                if error:
                    raise error
        except KnownToAll as known:
            return str(known), known.code
        return None

    assert run_ranks(len(found), body) == [told] * len(found)


def test_other_errors_are_not_held_back() -> None:
    def body(transport: LocalTransport) -> None:
        with checking(transport):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, body)
