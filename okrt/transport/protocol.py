"""How bytes move: all that a reducer may ask of a network."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from okrt.transport.ledger import Ledger


class Transport(Protocol):
    """Every call is collective over the ranks, but for `send` and `receive`; arrays are contiguous. Those of
    `exchange`, `allgatherv`, `send` and `receive` may be on a GPU, with the current stream of CuPy as theirs.

    A call that waits longer than the transport's time limit raises StallError. Traffic is recorded in `ledger` as
    what this rank receives: for `allgather` and `exchange` exactly; an all-reduction of m words counts as
    m * ceil(log2 P), the most that recursive doubling takes.
    """

    rank: int
    size: int
    ledger: Ledger
    idle: Iterator[None]
    """Work in small pieces that may be done while a call waits; whatever sets it does what is left of it."""

    def allreduce(self, array: np.ndarray, op: str) -> None:
        """In place, of a few words; op is "sum" or "max"."""

    def allgather(self, row: np.ndarray) -> np.ndarray:
        """Row i of the result is what rank i gave."""

    def alltoall(self, words: np.ndarray) -> np.ndarray:
        """words[j] goes to rank j; element i of the result came from rank i."""

    def exchange(self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """One message to each peer of `outgoing`, one from each of `incoming`, which have room for it and may have more
        (where there is none, nothing is sent). Yields (peer, message) in the fixed order rank-1, rank-2, …, each as
        soon as it is there."""

    def allgatherv(self, message: Any, sizes: np.ndarray, out: Any) -> None:
        """The messages of all ranks (sizes[i] elements of rank i), one after the other, into `out`."""

    def send(self, peer: int, message: Any) -> None: ...

    def receive(self, peer: int, out: Any) -> int:
        """Returns how many elements came; at most out.size."""

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank; for error messages."""
