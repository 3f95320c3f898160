"""gTopk: pairwise merges up a tree that keep the k largest sums, then a broadcast down it. At most 4k log P words.

Any number of ranks. An index dropped on the way up by one branch may be in the final set through another one; the rank
that dropped it then keeps the partial sum in its residual, or its share of the gradient would be lost.
"""

import numpy as np

from okrt.kernels import cpu
from okrt.reducers.base import Cost
from okrt.reducers.merging import SortedSum, Words
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil


class GTopk(SparseReducer):
    name = "gtopk"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(2 * log2_ceil(size), 4 * k * log2_ceil(size))

    def _make_buffers(self) -> None:
        self._outgoing, self._incoming = Words(), Words()
        self._sum = SortedSum()

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        with self.transport.ledger.phase("reduce"):
            index, total, dropped = self._merge_up(selection)
        with self.transport.ledger.phase("gather"):
            index, total = self._broadcast_down(index, total)
        put_back = []
        for lost_index, lost_total in dropped:
            delivered = np.isin(lost_index, index, assume_unique=True)
            put_back.append((lost_index[delivered], lost_total[delivered]))
        return Delivered(index, total, selection.index, tuple(put_back))

    def _merge_up(self, selection: Selection) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """The top-k of the sums of this rank's subtree, and the sums dropped here on the way to it."""
        transport, k, codec = self.transport, self._stats.k, self._codec
        index, total = selection.index, selection.value
        dropped = []
        distance = 1
        while distance < transport.size:
            if transport.rank & distance:
                message = codec.encode(index, total, self._outgoing(2 * index.size))
                transport.send(transport.rank - distance, message)
                break
            if transport.rank + distance < transport.size:
                space = self._incoming(2 * k)
                length = transport.receive(transport.rank + distance, space)
                self._sum.add(index, total)
                self._sum.add(*codec.decode(space[:length]))
                index, total, lost = top_and_rest(*self._sum.total(), k)
                dropped.append(lost)
            distance *= 2
        return index, total, dropped

    def _broadcast_down(self, index: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The root's sum on every rank, along the same tree."""
        transport = self.transport
        lowest = transport.rank & -transport.rank or 1 << (transport.size - 1).bit_length()
        if transport.rank == 0:
            message = self._codec.encode(index, total, self._incoming(2 * index.size))
        else:
            space = self._incoming(2 * self._stats.k)
            message = space[: transport.receive(transport.rank - lowest, space)]
        distance = lowest // 2
        while distance:
            if transport.rank + distance < transport.size:
                transport.send(transport.rank + distance, message)
            distance //= 2
        return self._codec.decode(message)


def top_and_rest(
    index: np.ndarray, total: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The k largest sums, in place, and a copy of the others."""
    all_index, all_total = index.copy(), total.copy()
    kept = cpu.keep_top(index, total, k)
    others = np.isin(all_index, index[:kept], assume_unique=True, invert=True)
    return index[:kept], total[:kept], (all_index[others], all_total[others])
