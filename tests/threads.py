"""Ranks as threads of one process: a second transport, so that any number of ranks runs without MPI.

One rank runs at a time, until it waits for another: threads that ran at once would mostly fight for Python's lock.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from okrt.transport import Ledger

LIMIT_S = 30


class OthersFailed(Exception):
    """A rank ends because another has failed, or because all of them wait."""


class Turns:
    """Who runs: the ranks in turn, each until it waits."""

    def __init__(self, size: int) -> None:
        self._locks = [threading.Lock() for _ in range(size)]  # that of the rank whose turn it is is free
        for lock in self._locks[1:]:
            lock.acquire()
        self._running = list(range(size))
        self._failed = False
        self._in_vain = 0  # turns in a row that brought nobody on

    def begin(self, rank: int) -> None:
        if not self._locks[rank].acquire(timeout=LIMIT_S):
            raise TimeoutError(f"rank {rank} has waited {LIMIT_S} s for its turn")

    def wait(self, rank: int, there: Callable[[], bool], what: str) -> None:
        while not there():
            self._in_vain += 1
            if self._in_vain > 2 * len(self._running):
                raise OthersFailed(f"rank {rank} waits for {what}, and every other rank waits, too, or has ended")
            self._pass_on(rank)
            self.begin(rank)
            if self._failed:
                raise OthersFailed(f"rank {rank} waits for {what}, another rank has failed")
        self._in_vain = 0

    def end(self, rank: int, failed: bool) -> None:
        self._failed |= failed
        self._in_vain = 0
        self._pass_on(rank)
        self._running.remove(rank)

    def _pass_on(self, rank: int) -> None:
        after = self._running[(self._running.index(rank) + 1) % len(self._running)]
        self._locks[after].release()


class Shared:
    """What the ranks have in common."""

    def __init__(self, size: int) -> None:
        self.turns = Turns(size)
        self.swaps = [0] * size  # that each rank has begun
        self.slots: list[list[Any]] = [[None] * size, [None] * size]  # of even and of odd swaps
        self.mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)


class ThreadTransport:
    """Every collective call is a swap of objects; counts traffic as the ledger says."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.size = rank, len(shared.swaps)
        self.ledger = Ledger()
        self.idle = iter(())
        self._shared = shared

    def _swap(self, mine: Any) -> list[Any]:
        number, swaps = self._shared.swaps[self.rank], self._shared.swaps
        slots = self._shared.slots[number % 2]
        slots[self.rank] = mine
        swaps[self.rank] += 1
        self._shared.turns.wait(self.rank, lambda: min(swaps) > number, f"all ranks in swap {number}")
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
        self._shared.turns.wait(self.rank, lambda: bool(box), f"a message from rank {peer}")
        message = box.popleft()
        out[: message.size] = message
        self.ledger.record(received=message.nbytes, messages=1)
        return message.size


def run_ranks(size: int, body: Callable[[Any], Any], transport: type[ThreadTransport] = ThreadTransport) -> list[Any]:
    """body(transport) on each of `size` ranks; their results in the order of ranks."""
    shared = Shared(size)

    def run(rank: int) -> Any:
        failed = True
        shared.turns.begin(rank)
        try:
            result = body(transport(rank, shared))
            failed = False
            return result
        finally:
            shared.turns.end(rank, failed)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, OthersFailed)), errors[0])
    return [future.result() for future in futures]
