"""gTopk: pairwise merges up a tree that keep the k largest sums, then a broadcast down it. At most 4k log P words.

Any number of ranks. An index dropped on the way up by one branch may be in the final set through another one; the rank
that dropped it then keeps the partial sum in its residual, or its share of the gradient would be lost.
"""

from typing import Any

from okrt.reducers.base import Cost
from okrt.reducers.merging import SortedSum, Words
from okrt.reducers.sparse import Delivered, Merged, SparseReducer
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
        self._sum = SortedSum(kernels)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        with self.transport.ledger.phase("reduce"):
            index, total, merged = self._merge_up(selection)
        with self.transport.ledger.phase("gather"):
            index, total = self._broadcast_down(index, total)
        return Delivered(index, total, selection.index, tuple(merged))

    def _merge_up(self, selection: Selection) -> tuple[Any, Any, list[Merged]]:
        """The top-k of the sums of this rank's subtree, and the sums that they were chosen from."""
        transport, k, codec = self.transport, self._stats.k, self._codec
        index, total = selection.index, selection.value
        merged = []
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
                all_index, all_total = self._sum.total()
                # Copies: the next sum is made in the same memory.
                index, total = all_index.copy(), all_total.copy()
                kept = self._kernels.keep_top(index, total, k)
                index, total = index[:kept], total[:kept]
                merged.append(Merged(all_index.copy(), all_total.copy(), index))
            distance *= 2
        return index, total, merged

    def _broadcast_down(self, index: Any, total: Any) -> tuple[Any, Any]:
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
