"""TopkA: the local top-k of every rank goes to every rank, which sums them. 2k(P-1) words."""

from okrt.reducers.base import Cost
from okrt.reducers.merging import GatheredSum
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil


class TopkA(SparseReducer):
    name = "topka"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(log2_ceil(size), 2 * k * (size - 1))

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self._gathered_sum = GatheredSum(self.transport, self._codec, self._kernels)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        index, total, lost = self._gathered_sum(selection)
        return Delivered(index, total, selection.index, lost)
