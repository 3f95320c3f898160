"""A mistake of the user's is told once, however many ranks find it, and ends them all."""

import contextlib
from collections.abc import Iterator

from okrt.cli.tally import named
from okrt.errors import UsageError, exit_code
from okrt.transport import Transport


class KnownToAll(Exception):
    """What every rank has heard of: rank 0 tells it, and each ends with that code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@contextlib.contextmanager
def checking(transport: Transport) -> Iterator[None]:
    """A user's mistake or trouble with files within, on any rank, is an error on all; every rank must come here."""
    complaint, code = "", 0
    try:
        yield
    except (UsageError, OSError) as error:
        complaint, code = str(error) or type(error).__name__, exit_code(error)
    complaints = transport.gather_texts(complaint)
    codes = transport.gather_texts(str(code))
    if any(complaints):
        raise KnownToAll(told_by(complaints), max(map(int, codes)))


def told_by(complaints: list[str]) -> str:
    """The first of them, and by which ranks if not by all."""
    who = [rank for rank, text in enumerate(complaints) if text]
    return ("" if len(who) == len(complaints) else f"{named(who)}: ") + complaints[who[0]]
