"""A mistake of the user's is told once, however many ranks find it, and ends them all."""

import contextlib
from collections.abc import Iterator

from okrt.cli.tally import named
from okrt.errors import UsageError
from okrt.transport import Transport


class KnownToAll(UsageError):
    """Of a mistake that every rank has heard of: rank 0 tells it, and each ends with its exit code."""


@contextlib.contextmanager
def checking(transport: Transport) -> Iterator[None]:
    """What is wrong within, on any rank, is an error on all of them; every rank must come here."""
    complaint = ""
    try:
        yield
    except UsageError as error:
        complaint = str(error)
    complaints = transport.gather_texts(complaint)
    if any(complaints):
        raise KnownToAll(told_by(complaints))


def told_by(complaints: list[str]) -> str:
    """The first of them, and by which ranks if not by all."""
    who = [rank for rank, text in enumerate(complaints) if text]
    return ("" if len(who) == len(complaints) else f"{named(who)}: ") + complaints[who[0]]
