"""Sums of whole arrays over the ranks: every rank sums one part of them, then the parts go to all."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from okrt.reducers.merging import Words
from okrt.transport import Transport

PIECE = 1 << 22  # elements summed at a time, all ranks together: what other ranks send of them has to be held


class RankSum:
    """2n(P-1)/P elements sent and received by every rank, which is the least that any all-reduction can do.

    Each sum is taken by one rank in an order that never changes, so that all ranks get the same bits in every run.
    """

    def __init__(self, transport: Transport, kernels: Any) -> None:
        self._transport, self._kernels = transport, kernels
        self._mail, self._total = Words(kernels), Words(kernels)

    def __call__(self, array: Any, finish: Callable[[Any, Any], None] | None = None) -> None:
        """Overwrites the array by its sums over the ranks; those of 16-bit arrays, and any others that are not what
        is wanted, by what finish(float32 sums, part of the array that they are of) makes of them."""
        for start in range(0, array.size, PIECE):
            self._sum_piece(array[start : start + PIECE], finish)

    def own_parts(self, length: int) -> Iterator[slice]:
        """Which elements of an array of that length this rank sums, in the order in which it does."""
        rank, size = self._transport.rank, self._transport.size
        for start in range(0, length, PIECE):
            piece = min(PIECE, length - start)
            yield slice(start + piece * rank // size, start + piece * (rank + 1) // size)

    def _sum_piece(self, piece: Any, finish: Callable[[Any, Any], None] | None) -> None:
        rank, size = self._transport.rank, self._transport.size
        parts = [piece[piece.size * j // size : piece.size * (j + 1) // size] for j in range(size)]
        own, peers = parts[rank], [peer for peer in range(size) if peer != rank]
        words = -(-own.nbytes // 4)
        mail = self._mail(words * len(peers))
        rows = [mail[words * j : words * (j + 1)].view(piece.dtype)[: own.size] for j in range(len(peers))]
        with self._transport.ledger.phase("reduce"):
            total = own
            if own.dtype != np.float32:
                total = self._total(own.size).view(np.float32)
                self._kernels.clear(total)
                self._kernels.accumulate(total, own)
            incoming = dict(zip(peers, rows, strict=True))
            for _, message in self._transport.exchange({peer: parts[peer] for peer in peers}, incoming):
                self._kernels.accumulate(total, message)
            if finish:
                finish(total, own)
        with self._transport.ledger.phase("gather"):
            for _ in self._transport.exchange(dict.fromkeys(peers, own), {peer: parts[peer] for peer in peers}):
                pass
