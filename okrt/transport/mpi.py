"""The transport over MPI: non-blocking calls only, so that every wait has a time limit."""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from okrt.buffers import Wire
from okrt.errors import StallError
from okrt.transport.ledger import Ledger

_OPS = {"sum": MPI.SUM, "max": MPI.MAX}
_SPIN_S = 50e-6  # how long a wait keeps its core before it starts to give way to others
# A rank that waits long leaves its core to those that compute. Its naps are a share of the time waited so far, in short
# waits a larger one; they are limited, since MPI moves data only when it is asked whether it has come.
_FIRST_NAP_S, _SHORT_NAP_S, _LONGEST_NAP_S = 20e-6, 200e-6, 5e-3
_SHORT_NAP_SHARE, _NAP_SHARE = 1 / 16, 1 / 500
_IN_FLIGHT = 8  # peers an exchange talks to at once: enough to fill a link, few enough to spare a switch
_TAG_EXCHANGE, _TAG_TREE = 1, 2


@functools.cache
def may_touch_device_memory() -> bool:
    """Whether MPI can send from and receive into the memory of a GPU; a warning, once, if it is not known to."""
    from okrt.transport.cuda_aware import verdict

    found = verdict()
    if not found.aware:
        warnings.warn(
            f"MPI is {'not' if found.aware is False else 'not known to be'} CUDA-aware ({found.reason}): messages go "
            f"through pinned host memory. {found.remedy}",
            stacklevel=2,
        )
    return bool(found.aware)


def library_name() -> str:
    """The MPI library and its version, in one line."""
    return " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())


def thread_level() -> str:
    """What threads may do with MPI, by the standard's name for it."""
    names = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    return {getattr(MPI, name.removeprefix("MPI_")): name for name in names}[MPI.Query_thread()]


def nap_s(waited_s: float) -> float:
    """How long to sleep in a wait that has lasted so long."""
    short = min(max(_FIRST_NAP_S, _SHORT_NAP_SHARE * waited_s), _SHORT_NAP_S)
    return min(max(short, _NAP_SHARE * waited_s), _LONGEST_NAP_S)


class MpiTransport:
    def __init__(self, comm: MPI.Intracomm, timeout_s: float, is_cuda_aware: Callable[[], bool] | None = None) -> None:
        """is_cuda_aware: whether device memory goes to MPI as it is; by default where MPI is known to take it."""
        self._timeout_s = timeout_s
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.ledger = Ledger()
        self.idle: Iterator[None] = iter(())
        # A communicator of our own: messages of the user's cannot be mistaken for ours.
        self._wire = Wire(is_cuda_aware or may_touch_device_memory)
        self._comm, request = comm.Idup()
        self._wait([request], "all ranks to start")

    def _wait(self, requests: list[MPI.Request], what: str, status: MPI.Status | None = None) -> None:
        start = time.monotonic()
        statuses = None if status is None else [status]
        while not MPI.Request.Testall(requests, statuses):
            waited = time.monotonic() - start
            if waited > self._timeout_s:
                raise StallError(
                    f"rank {self.rank} of {self.size} waited {waited:.0f} s for {what}; "
                    "a rank has died, is far behind or took another path (limit: OKRT_TIMEOUT_S)"
                )
            if next(self.idle, True):
                if waited > _SPIN_S:
                    time.sleep(nap_s(waited))
                else:
                    os.sched_yield()

    def allreduce(self, array: np.ndarray, op: str) -> None:
        self._wait([self._comm.Iallreduce(MPI.IN_PLACE, array, _OPS[op])], f"an all-reduction of {array.size} words")
        self.ledger.record_allreduce(array.nbytes, self.size)

    def allgather(self, row: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, row.size), row.dtype)
        self._wait([self._comm.Iallgather(row, rows)], f"a gather of {row.size} words from every rank")
        self.ledger.record_allgather(row.nbytes, self.size)
        return rows

    def alltoall(self, words: np.ndarray) -> np.ndarray:
        received = words.copy()
        peers = {peer: slice(peer, peer + 1) for peer in range(self.size) if peer != self.rank}
        outgoing = {peer: words[at] for peer, at in peers.items()}
        for _ in self.exchange(outgoing, {peer: received[at] for peer, at in peers.items()}):
            pass
        return received

    def exchange(self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        sends: list[MPI.Request] = []
        receives: dict[int, MPI.Request] = {}
        lent_out, lent_in = self._wire.lend(list(outgoing.values()), list(incoming.values()))
        going, coming = dict(zip(outgoing, lent_out, strict=True)), dict(zip(incoming, lent_in, strict=True))

        def post(distance: int) -> None:
            source, dest = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if source in coming and coming[source].size:
                receives[source] = self._comm.Irecv(coming[source], source, _TAG_EXCHANGE)
            if dest in going and going[dest].size:
                sends.append(self._comm.Isend(going[dest], dest, _TAG_EXCHANGE))
                self.ledger.record(sent=going[dest].nbytes)

        status = MPI.Status()
        for distance in range(1, min(_IN_FLIGHT + 1, self.size)):
            post(distance)
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            length = 0
            if source in receives:
                room = incoming[source]
                self._wait([receives[source]], f"a message of up to {room.nbytes} bytes from rank {source}", status)
                length = self._take(room, coming[source], status)
            if distance + _IN_FLIGHT < self.size:
                post(distance + _IN_FLIGHT)
            if source in incoming:
                yield source, incoming[source][:length]
        self._wait(sends, f"{len(sends)} messages to be taken by their receivers")

    def allgatherv(self, message: Any, sizes: np.ndarray, out: Any) -> None:
        total = int(sizes.sum())
        (going,), (coming,) = self._wire.lend([message], [out[:total]])
        request = self._comm.Iallgatherv(going, [coming, sizes])
        self._wait([request], f"a gather of {message.itemsize * total} bytes from all ranks")
        self._wire.arrived(out[:total], coming)
        self.ledger.record_allgatherv(message.nbytes, message.itemsize * total, self.size)

    def send(self, peer: int, message: Any) -> None:
        (going,), _ = self._wire.lend([message], [])
        self._wait([self._comm.Isend(going, peer, _TAG_TREE)], f"rank {peer} to take {message.nbytes} bytes")
        self.ledger.record(sent=message.nbytes)

    def receive(self, peer: int, out: Any) -> int:
        _, (coming,) = self._wire.lend([], [out])
        status = MPI.Status()
        self._wait([self._comm.Irecv(coming, peer, _TAG_TREE)], f"a message from rank {peer}", status)
        return self._take(out, coming, status)

    def _take(self, room: Any, lent: Any, status: MPI.Status) -> int:
        """How many elements have come; they are in the room now."""
        received_bytes = status.Get_count(MPI.BYTE)
        length: int = received_bytes // room.itemsize
        self._wire.arrived(room[:length], lent[:length])
        self.ledger.record(received=received_bytes, messages=1)
        return length

    def gather_texts(self, text: str) -> list[str]:
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = self.allgather(np.array([data.size], np.int64))[:, 0]
        out = np.empty(int(sizes.sum()), np.uint8)
        self.allgatherv(data, sizes, out)
        ends = np.cumsum(sizes)
        return [bytes(out[end - size : end]).decode() for size, end in zip(sizes, ends, strict=True)]
