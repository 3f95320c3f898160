"""Split and reduce: entries go to the rank that owns their region, which sums them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from okrt.codec import Codec
from okrt.reducers.merging import Inbox, Lost, SortedSum, Words
from okrt.transport import Transport


class RegionSum:
    """One message a peer; a message is summed while the next ones are in flight, in an order that never changes."""

    def __init__(self, transport: Transport, codec: Codec, kernels: Any) -> None:
        self._transport, self._codec, self._kernels = transport, codec, kernels
        self._outgoing, self._incoming, self._error = (Words(kernels) for _ in range(3))
        self._inbox = Inbox(codec, kernels)
        self._sum = SortedSum(kernels)

    def __call__(
        self, index: Any, value: Any, parts: Sequence[slice], coming: np.ndarray
    ) -> tuple[Any, Any, tuple[Lost, ...]]:
        """Indexes and sums of this rank's region, good until the next call, and what rounding took from the entries.

        parts[i] of the entries go to rank i; coming[i] entries will come from it.
        """
        rank, codec = self._transport.rank, self._codec
        error = self._error(index.size if codec.is_lossy else 0).view(np.float32)
        self._kernels.clear(error[parts[rank]])
        going = [codec.room(part.stop - part.start) if part.stop > part.start else 0 for part in parts]
        rooms = [codec.room(int(number)) if number else 0 for number in coming]
        going[rank] = rooms[rank] = 0
        space, mail = self._outgoing(sum(going)), self._incoming(sum(rooms))
        outgoing, incoming, sent, came = {}, {}, 0, 0
        for peer, part in enumerate(parts):
            if going[peer]:
                outgoing[peer] = codec.encode(index[part], value[part], space[sent:], error[part])
                sent += going[peer]
            if rooms[peer]:
                incoming[peer] = mail[came : came + rooms[peer]]
                came += rooms[peer]
        self._inbox.begin()
        self._sum.add(index[parts[rank]], value[parts[rank]])
        for peer, message in self._transport.exchange(outgoing, incoming):
            self._sum.add(*self._inbox.read(message, peer, int(coming[peer])))
        return *self._sum.total(), (Lost(index, error),) if codec.is_lossy else ()
