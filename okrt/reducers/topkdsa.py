"""TopkDSA, SparCML's split and allgather: regions of equal width, each summed by one rank, all sums to every rank.

4k(P-1)/P words if all ranks select the same entries; up to (2k+n)(P-1)/P as the sums fill in, since a region whose
entries would cost more than its dense form travels dense. Both for entries spread over the regions: the owner of one
that holds them all receives more.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from okrt.reducers.base import Cost
from okrt.reducers.merging import Gather, Lost, Words
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
        self._gather = Gather(self.transport, self._codec, kernels)
        self._full_regions = Words(kernels)
        self._result = Words(kernels), Words(kernels)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        transport, size = self.transport, self.transport.size
        bounds = np.array([n * j // size for j in range(size + 1)], np.int64)
        cuts = self._kernels.cuts(selection.index, bounds)
        with transport.ledger.phase("split"):
            coming = transport.alltoall(np.diff(cuts).astype(np.int32))
            parts = [slice(*ends) for ends in pairwise(cuts)]
            index, total, lost = self._region_sum(selection.index, selection.value, parts, coming)
        with transport.ledger.phase("gather"):
            index, total, rounded = self._gather_regions(index, total, bounds)
        return Delivered(index, total, selection.index, (*lost, *rounded))

    def _gather_regions(self, index: Any, total: Any, bounds: np.ndarray) -> tuple[Any, Any, tuple[Lost, ...]]:
        transport, rank = self.transport, self.transport.rank
        entries = transport.allgather(np.array([index.size], np.int32))[:, 0].astype(np.int64)
        widths = np.diff(bounds)
        rooms = [self._codec.room(int(m), span=int(width)) for m, width in zip(entries, widths, strict=True)]
        dense = np.array(rooms) > widths
        own = slice(0) if dense[rank] else slice(None)
        lists, lost = self._gather(index[own], total[own], np.where(dense, 0, entries))
        full = self._gather_dense(index, total, bounds, dense)
        room = int(entries.sum())
        all_index, all_total = self._result[0](room), self._result[1](room).view(np.float32)
        at = 0
        for region, number in enumerate(entries):
            to = slice(at, at + int(number))
            if dense[region]:
                first = int(bounds[region])
                at += self._kernels.select(full[region], NOT_ZERO, first, all_index[to], all_total[to])
            else:
                all_index[to], all_total[to] = lists[region]
                at = to.stop
        return all_index[:at], all_total[:at], lost

    def _gather_dense(self, index: Any, total: Any, bounds: np.ndarray, dense: np.ndarray) -> dict[int, Any]:
        """The values of each full region, zeros included, on every rank."""
        transport, rank, widths = self.transport, self.transport.rank, np.diff(bounds)
        regions = np.flatnonzero(dense)
        mail = self._full_regions(int(widths[regions].sum())).view(np.float32)
        starts = np.cumsum(widths[regions]) - widths[regions]
        full = {
            int(region): mail[start : start + widths[region]] for region, start in zip(regions, starts, strict=True)
        }
        outgoing = {}
        if dense[rank]:
            self._kernels.clear(full[rank])
            self._kernels.put(full[rank], int(bounds[rank]), index, total)
            outgoing = {peer: full[rank] for peer in range(transport.size) if peer != rank}
        for _ in transport.exchange(outgoing, {region: mail for region, mail in full.items() if region != rank}):
            pass
        return full
