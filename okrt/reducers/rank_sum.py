"""Sums of whole arrays over the ranks: every rank sums one part of them, then the parts go to all."""

from collections.abc import Callable

import numpy as np

from okrt.kernels.bits import widen
from okrt.reducers.merging import Words
from okrt.transport import Transport

PIECE = 1 << 22  # elements summed at a time, all ranks together: what other ranks send of them has to be held


class RankSum:
    """2n(P-1)/P elements sent and received by every rank, which is the least that any all-reduction can do.

    Each sum is taken by one rank in an order that never changes, so that all ranks get the same bits in every run.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._mail = Words()

    def __call__(self, array: np.ndarray, finish: Callable[[np.ndarray], np.ndarray]) -> None:
        """Overwrites each part of the array by finish(the float32 sums of that part over the ranks)."""
        for start in range(0, array.size, PIECE):
            self._sum_piece(array[start : start + PIECE], finish)

    def _sum_piece(self, piece: np.ndarray, finish: Callable[[np.ndarray], np.ndarray]) -> None:
        rank, size = self._transport.rank, self._transport.size
        parts = [piece[piece.size * j // size : piece.size * (j + 1) // size] for j in range(size)]
        own, peers = parts[rank], [peer for peer in range(size) if peer != rank]
        words = -(-own.nbytes // 4)
        mail = self._mail(words * len(peers)).reshape(len(peers), words).view(piece.dtype)
        incoming = {peer: row[: own.size] for peer, row in zip(peers, mail, strict=True)}
        with self._transport.ledger.phase("reduce"):
            total = np.array(widen(own))
            for _, message in self._transport.exchange({peer: parts[peer] for peer in peers}, incoming):
                total += widen(message)
            own[:] = finish(total)
        with self._transport.ledger.phase("gather"):
            for _ in self._transport.exchange(dict.fromkeys(peers, own), {peer: parts[peer] for peer in peers}):
                pass
