"""gTopk: pairwise merges up a tree that keep the k largest sums, then a broadcast down it. At most 4k log P words.

Any number of ranks. An index dropped on the way up by one branch may be in the final set through another one; the rank
that dropped it then keeps the partial sum in its residual, or its share of the gradient would be lost.
"""

from typing import Any

import numpy as np

from okrt.reducers.base import Cost
from okrt.reducers.merging import Inbox, Lost, SortedSum, Words
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil


class GTopk(SparseReducer):
    name = "gtopk"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(2 * log2_ceil(size), 4 * k * log2_ceil(size))

    def _make_buffers(self) -> None:
        super()._make_buffers()
        kernels = self._kernels
        self._outgoing, self._incoming = Words(kernels), Words(kernels)
        self._inbox = Inbox(self._codec, kernels)
        self._sum = SortedSum(kernels)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        self._inbox.begin()
        with self.transport.ledger.phase("reduce"):
            index, total, lost = self._merge_up(selection)
        with self.transport.ledger.phase("gather"):
            index, total, rounded = self._broadcast_down(index, total)
        return Delivered(index, total, selection.index, (*lost, *rounded))

    def _encode(self, index: Any, total: Any) -> tuple[Any, list[Lost]]:
        """The message, and what rounding takes from the sums."""
        error = self._kernels.empty(index.size if self._codec.is_lossy else 0, np.float32)
        message = self._codec.encode(index, total, self._outgoing(self._codec.room(index.size)), error)
        return message, [Lost(index, error)] if error.size else []

    def _merge_up(self, selection: Selection) -> tuple[Any, Any, list[Lost]]:
        """The top-k of the sums of this rank's subtree, and what this rank has left out of them."""
        transport, k = self.transport, self._stats.k
        index, total = selection.index, selection.value
        lost: list[Lost] = []
        distance = 1
        while distance < transport.size:
            if transport.rank & distance:
                message, rounded = self._encode(index, total)
                transport.send(transport.rank - distance, message)
                return index, total, lost + rounded
            if transport.rank + distance < transport.size:
                peer = transport.rank + distance
                space = self._incoming(self._codec.room(k))
                length = transport.receive(peer, space)
                self._sum.add(index, total)
                self._sum.add(*self._inbox.read(space[:length], peer))
                all_index, all_total = self._sum.total()
                # Copies: the next sum is made in the same memory.
                index, total = all_index.copy(), all_total.copy()
                kept = self._kernels.keep_top(index, total, k)
                index, total = index[:kept], total[:kept]
                lost.append(Lost(all_index.copy(), all_total.copy(), index))
            distance *= 2
        return index, total, lost

    def _broadcast_down(self, index: Any, total: Any) -> tuple[Any, Any, list[Lost]]:
        """The root's sum on every rank, along the same tree."""
        transport = self.transport
        lowest = transport.rank & -transport.rank or 1 << (transport.size - 1).bit_length()
        lost: list[Lost] = []
        if transport.rank == 0:
            message, lost = self._encode(index, total)
        else:
            space = self._incoming(self._codec.room(self._stats.k))
            message = space[: transport.receive(transport.rank - lowest, space)]
            index, total = self._inbox.read(message, transport.rank - lowest)
        distance = lowest // 2
        while distance:
            if transport.rank + distance < transport.size:
                transport.send(transport.rank + distance, message)
            distance //= 2
        return index, total, lost
