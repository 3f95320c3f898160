"""Split and reduce: entries go to the rank that owns their region, which sums them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from okrt.codec import Coo
from okrt.reducers.merging import SortedSum, Words
from okrt.select import Selection
from okrt.transport import Transport


class RegionSum:
    """One message a peer; a message is summed while the next ones are in flight, in an order that never changes."""

    def __init__(self, transport: Transport, codec: Coo, kernels: Any) -> None:
        self._transport, self._codec = transport, codec
        self._outgoing, self._incoming = Words(kernels), Words(kernels)
        self._sum = SortedSum(kernels)

    def __call__(self, selection: Selection, parts: Sequence[slice], coming: np.ndarray) -> tuple[Any, Any]:
        """Indexes and sums of this rank's region, good until the next call.

        parts[i] of the selection go to rank i; coming[i] entries will come from it.
        """
        rank, codec = self._transport.rank, self._codec
        space = self._outgoing(2 * selection.index.size)
        outgoing, incoming, at = {}, {}, 0
        mail = self._incoming(2 * int(coming.sum(dtype=np.int64)))
        for peer, part in enumerate(parts):
            if peer == rank:
                continue
            outgoing[peer] = codec.encode(selection.index[part], selection.value[part], space[2 * part.start :])
            incoming[peer] = mail[at : at + 2 * int(coming[peer])]
            at += 2 * int(coming[peer])
        self._sum.add(selection.index[parts[rank]], selection.value[parts[rank]])
        for _, message in self._transport.exchange(outgoing, incoming):
            self._sum.add(*codec.decode(message))
        return self._sum.total()
