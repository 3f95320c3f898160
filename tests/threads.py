"""Ranks as threads of one process: a second transport, so that any number of ranks runs without MPI."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from okrt.transport import Ledger

LIMIT_S = 30


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.slots: list[Any] = [None] * size


class ThreadTransport:
    """Every call is a swap of objects between two barriers; counts traffic as the ledger says."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size = rank, shared.size
        self.ledger = Ledger()
        self.idle = iter(())
        self._shared = shared

    def _swap(self, mine: Any) -> list[Any]:
        self._shared.slots[self.rank] = mine
        self._shared.barrier.wait()
        everyone = list(self._shared.slots)
        self._shared.barrier.wait()
        return everyone

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


class MailTransport(ThreadTransport):
    """Adds `send` and `receive`, through mailboxes between each pair of ranks."""

    def __init__(self, rank: int, shared: _Shared, mail: dict) -> None:
        super().__init__(rank, shared)
        self._mail = mail

    def send(self, peer: int, message: np.ndarray) -> None:
        self._mail[self.rank, peer].put(message.copy())
        self.ledger.record(sent=message.nbytes)

    def receive(self, peer: int, out: np.ndarray) -> int:
        message = self._mail[peer, self.rank].get(timeout=LIMIT_S)
        out[: message.size] = message
        self.ledger.record(received=message.nbytes, messages=1)
        return message.size


def run_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """body(transport) on each of `size` ranks; their results in the order of ranks."""
    import queue

    shared = _Shared(size)
    mail = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def run(rank: int) -> Any:
        try:
            return body(MailTransport(rank, shared, mail))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures if future.exception()]
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [future.result() for future in futures]
