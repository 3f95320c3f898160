"""TopkDSA, SparCML's split and allgather: regions of equal width, each summed by one rank, all sums to every rank.

4k(P-1)/P words if all ranks select the same entries; up to (2k+n)(P-1)/P as the sums fill in, since a region whose
entries would cost more than its dense form travels dense. Both for entries spread over the regions: the owner of one
that holds them all receives more.
"""

from itertools import pairwise

import numpy as np

from okrt.reducers.base import Cost
from okrt.reducers.merging import Words
from okrt.reducers.regions import RegionSum
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil


class TopkDSA(SparseReducer):
    name = "topkdsa"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(size + 2 * log2_ceil(size), (2 * k + n) * (size - 1) / size)

    def _make_buffers(self) -> None:
        self._region_sum = RegionSum(self.transport, self._codec)
        self._outgoing, self._incoming = Words(), Words()
        self._result = Words(), Words()

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        transport, size = self.transport, self.transport.size
        bounds = np.array([n * j // size for j in range(size + 1)], np.int64)
        cuts = np.searchsorted(selection.index, bounds)
        with transport.ledger.phase("split"):
            coming = transport.alltoall(np.diff(cuts).astype(np.int32))
            index, total = self._region_sum(selection, [slice(*ends) for ends in pairwise(cuts)], coming)
        with transport.ledger.phase("gather"):
            index, total = self._gather(index, total, bounds)
        return Delivered(index, total, selection.index)

    def _gather(self, index: np.ndarray, total: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        transport, rank = self.transport, self.transport.rank
        entries = transport.allgather(np.array([index.size], np.int32))[:, 0].astype(np.int64)
        widths = np.diff(bounds)
        dense = 2 * entries > widths
        sizes = np.where(dense, widths, 2 * entries)
        message = self._outgoing(int(sizes[rank]))
        if dense[rank]:
            message[:] = 0
            message.view(np.float32)[index - bounds[rank]] = total
        else:
            self._codec.encode(index, total, message)
        gathered = self._incoming(int(sizes.sum()))
        transport.allgatherv(message, sizes, gathered)
        room = int(entries.sum())
        all_index, all_total = self._result[0](room), self._result[1](room).view(np.float32)
        at, ends = 0, np.cumsum(sizes)
        for region, end in enumerate(ends):
            part = gathered[end - sizes[region] : end]
            if dense[region]:
                found = np.flatnonzero(part)
                part_index, part_total = found + bounds[region], part.view(np.float32)[found]
            else:
                part_index, part_total = self._codec.decode(part)
            all_index[at : at + part_index.size] = part_index
            all_total[at : at + part_index.size] = part_total
            at += part_index.size
        return all_index[:at], all_total[:at]
