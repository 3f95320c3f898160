"""Ranks in one process: a second transport, so that any number of ranks runs without MPI.

They run in turn, each until it waits for another: as threads they would mostly fight for Python's lock.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from okrt.transport import Ledger


class Shared:
    """What the ranks have in common."""

    def __init__(self, size: int) -> None:
        self.swaps = [0] * size  # that each rank has begun
        self.slots: list[list[Any]] = [[None] * size, [None] * size]  # of even and of odd swaps
        self.mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)


class LocalTransport:
    """Every collective call is a swap of objects; counts traffic as the ledger says."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.size = rank, len(shared.swaps)
        self.ledger = Ledger()
        self.idle = iter(())
        self._shared = shared

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        if not there():
            getcurrent().parent.switch(there, what)

    def _swap(self, mine: Any) -> list[Any]:
        number, swaps = self._shared.swaps[self.rank], self._shared.swaps
        slots = self._shared.slots[number % 2]
        slots[self.rank] = mine
        swaps[self.rank] += 1
        self._wait(lambda: min(swaps) > number, f"call {number} of all ranks")
        return list(slots)

    def allreduce(self, array: np.ndarray, op: str) -> None:
        rows = np.stack(self._swap(array.copy()))
        array[:] = rows.sum(axis=0, dtype=array.dtype) if op == "sum" else rows.max(axis=0)
        self.ledger.record_allreduce(array.nbytes, self.size)

    def allgather(self, row: np.ndarray) -> np.ndarray:
        self.ledger.record_allgather(row.nbytes, self.size)
        return np.stack(self._swap(row.copy()))

    def alltoall(self, words: np.ndarray) -> np.ndarray:
        moved = words.itemsize * (self.size - 1)
        self.ledger.record(sent=moved, received=moved, messages=self.size - 1)
        return np.stack(self._swap(words.copy()))[:, self.rank].copy()

    def exchange(self, outgoing, incoming):
        everyone = self._swap({peer: message.copy() for peer, message in outgoing.items()})
        self.ledger.record(sent=sum(message.nbytes for message in outgoing.values()))
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            if source in incoming:
                sent = everyone[source].get(self.rank, incoming[source][:0])
                message = incoming[source][: sent.size]
                message[:] = sent
                self.ledger.record(received=message.nbytes, messages=int(message.size > 0))
                yield source, message

    def allgatherv(self, message: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
        everyone = self._swap(message.copy())
        assert [part.size for part in everyone] == list(sizes)
        out[: sum(sizes)] = np.concatenate(everyone)
        self.ledger.record_allgatherv(message.nbytes, message.itemsize * int(sum(sizes)), self.size)

    def gather_texts(self, text: str) -> list[str]:
        return self._swap(text)

    def send(self, peer: int, message: np.ndarray) -> None:
        self._shared.mail[self.rank, peer].append(message.copy())
        self.ledger.record(sent=message.nbytes)

    def receive(self, peer: int, out: np.ndarray) -> int:
        box = self._shared.mail[peer, self.rank]
        self._wait(lambda: bool(box), f"a message from rank {peer}")
        message = box.popleft()
        out[: message.size] = message
        self.ledger.record(received=message.nbytes, messages=1)
        return message.size


def run_ranks(size: int, body: Callable[[Any], Any], transport: type[LocalTransport] = LocalTransport) -> list[Any]:
    """body(transport) on each of `size` ranks; their results in the order of ranks. The first error ends them all."""
    shared = Shared(size)
    ranks = [greenlet(lambda rank=rank: body(transport(rank, shared))) for rank in range(size)]
    results: list[Any] = [None] * size
    waiting: dict[int, tuple[Callable[[], bool], str]] = {rank: (lambda: True, "its start") for rank in range(size)}
    while waiting:
        ready = [rank for rank, (there, _) in waiting.items() if there()]
        assert ready, f"every rank waits: {[f'{rank} for {what}' for rank, (_, what) in waiting.items()]}"
        for rank in ready:
            del waiting[rank]
            answer = ranks[rank].switch()
            if ranks[rank].dead:
                results[rank] = answer
            else:
                waiting[rank] = answer
    return results
