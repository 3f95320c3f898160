"""What a step cost: bytes, messages and seconds by phase."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

WORD_BYTES = 4


def log2_ceil(size: int) -> int:
    return (size - 1).bit_length()


@dataclass
class Entry:
    """One phase of one step on one rank."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts what this rank sends and receives between two calls of `begin`, under the current phase."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.phases: dict[str, Entry] = {}
        self._current = "other"

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds and traffic inside the block go to phase `name`; phases do not nest."""
        entry = self.phases.setdefault(name, Entry())
        before, self._current = self._current, name
        start = time.perf_counter()
        try:
            yield
        finally:
            entry.seconds += time.perf_counter() - start
            self._current = before

    def record(self, *, sent: int = 0, received: int = 0, messages: int = 0) -> None:
        """Adds bytes sent and received, and messages received."""
        entry = self.phases.setdefault(self._current, Entry())
        entry.bytes_sent += sent
        entry.bytes_received += received
        entry.messages += messages

    def record_allreduce(self, nbytes: int, size: int) -> None:
        """By recursive doubling."""
        rounds = log2_ceil(size)
        self.record(sent=nbytes * rounds, received=nbytes * rounds, messages=rounds)

    def record_allgather(self, nbytes: int, size: int) -> None:
        """nbytes from every rank, by recursive doubling."""
        self.record(sent=nbytes * (size - 1), received=nbytes * (size - 1), messages=log2_ceil(size))

    def record_allgatherv(self, own_bytes: int, total_bytes: int, size: int) -> None:
        """Around a ring."""
        self.record(sent=own_bytes * (size - 1), received=total_bytes - own_bytes, messages=size - 1)

    @property
    def bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.phases.values())

    @property
    def bytes_received(self) -> int:
        return sum(entry.bytes_received for entry in self.phases.values())

    @property
    def words_received(self) -> int:
        """4-byte words, payload and control, rounded up."""
        return -(-self.bytes_received // WORD_BYTES)

    @property
    def messages(self) -> int:
        return sum(entry.messages for entry in self.phases.values())

    @property
    def seconds(self) -> dict[str, float]:
        return {name: entry.seconds for name, entry in self.phases.items()}
