"""TopkDSA, SparCML's split and allgather: regions of equal width, each summed by one rank, all sums to every rank.

4k(P-1)/P words if all ranks select the same entries; up to (2k+n)(P-1)/P as the sums fill in, since a region whose
entries would cost more than its dense form travels dense. Both for entries spread over the regions: the owner of one
that holds them all receives more.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from okrt.reducers.base import Cost
from okrt.reducers.merging import Words
from okrt.reducers.regions import RegionSum
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil

NOT_ZERO = 1  # the lowest threshold


class TopkDSA(SparseReducer):
    name = "topkdsa"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(size + 2 * log2_ceil(size), (2 * k + n) * (size - 1) / size)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        kernels = self._kernels
        self._region_sum = RegionSum(self.transport, self._codec, kernels)
        self._outgoing, self._incoming = Words(kernels), Words(kernels)
        self._result = Words(kernels), Words(kernels)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        transport, size = self.transport, self.transport.size
        bounds = np.array([n * j // size for j in range(size + 1)], np.int64)
        cuts = self._kernels.cuts(selection.index, bounds)
        with transport.ledger.phase("split"):
            coming = transport.alltoall(np.diff(cuts).astype(np.int32))
            index, total = self._region_sum(selection, [slice(*ends) for ends in pairwise(cuts)], coming)
        with transport.ledger.phase("gather"):
            index, total = self._gather(index, total, bounds)
        return Delivered(index, total, selection.index)

    def _gather(self, index: Any, total: Any, bounds: np.ndarray) -> tuple[Any, Any]:
        transport, rank = self.transport, self.transport.rank
        entries = transport.allgather(np.array([index.size], np.int32))[:, 0].astype(np.int64)
        widths = np.diff(bounds)
        dense = 2 * entries > widths
        sizes = np.where(dense, widths, 2 * entries)
        message = self._outgoing(int(sizes[rank]))
        if dense[rank]:
            self._kernels.clear(message)
            self._kernels.put(message.view(np.float32), int(bounds[rank]), index, total)
        else:
            self._codec.encode(index, total, message)
        gathered = self._incoming(int(sizes.sum()))
        transport.allgatherv(message, sizes, gathered)
        room = int(entries.sum())
        all_index, all_total = self._result[0](room), self._result[1](room).view(np.float32)
        at, ends = 0, np.cumsum(sizes)
        for region, end in enumerate(ends):
            part = gathered[end - sizes[region] : end]
            to = slice(at, at + int(entries[region]))
            if dense[region]:
                first = int(bounds[region])
                at += self._kernels.select(part.view(np.float32), NOT_ZERO, first, all_index[to], all_total[to])
            else:
                all_index[to], all_total[to] = self._codec.decode(part)
                at = to.stop
        return all_index[:at], all_total[:at]
