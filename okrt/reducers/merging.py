"""Sums of sorted lists of entries, in buffers that grow to what is needed and stay."""

from collections import defaultdict
from typing import Any

import numpy as np

from okrt.codec import Coo
from okrt.kernels.pairs import Pairs
from okrt.select import Selection
from okrt.transport import Transport


class Words:
    """An int32 buffer that is made longer when more is asked for, and never shorter."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._array = kernels.empty(0, np.int32)

    def __call__(self, length: int) -> Any:
        if self._array.size < length:
            self._array = self._kernels.empty(length + length // 8, np.int32)
        return self._array[:length]


class Space:
    """Where `SortedSum` puts one list."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._index, self._value = Words(kernels), Words(kernels)
        self._room: Pairs | None = None

    def __call__(self, length: int) -> Pairs:
        if self._room is None or self._room.index.size < length:
            self._room = self._kernels.room(self._index(length), self._value(length).view(np.float32))
        return self._room


class SortedSum:
    """The sum of lists sorted by index, merged in pairs as they come: m entries of P lists take m log P steps.

    The order of merges depends on the number of lists alone, so that equal lists give equal bits.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._spaces: defaultdict[tuple[int, int], Space] = defaultdict(lambda: Space(kernels))
        self._turns: defaultdict[int, int] = defaultdict(int)
        self._pending: list[tuple[int, Pairs]] = []

    def add(self, index: Any, value: Any) -> None:
        """Takes one list, which must stay as it is until `total`."""
        level, pairs = 0, Pairs(index, value)
        while self._pending and self._pending[-1][0] == level:
            pairs = self._merged(level, pairs)
            level += 1
        self._pending.append((level, pairs))

    def total(self) -> tuple[Any, Any]:
        """Indexes and sums of all lists (at least one) since the last call; good until the next call."""
        level, pairs = self._pending.pop()
        while self._pending:
            level = self._pending[-1][0]
            pairs = self._merged(level, pairs)
        return self._kernels.settled(pairs)

    def _merged(self, level: int, later: Pairs) -> Pairs:
        """The sum of the last pending list and this one, in one of two spaces of the next level."""
        _, earlier = self._pending.pop()
        self._turns[level] ^= 1
        space = self._spaces[level, self._turns[level]]
        return self._kernels.merge(earlier, later, space(earlier.index.size + later.index.size))


class GatheredSum:
    """Every rank gets all entries of all ranks and sums them in the order of ranks: 2(P-1) words an entry."""

    def __init__(self, transport: Transport, codec: Coo, kernels: Any) -> None:
        self._transport, self._codec = transport, codec
        self._outgoing, self._incoming = Words(kernels), Words(kernels)
        self._sum = SortedSum(kernels)

    def __call__(self, selection: Selection) -> tuple[Any, Any]:
        """Indexes and sums, good until the next call."""
        transport, codec = self._transport, self._codec
        with transport.ledger.phase("gather"):
            message = codec.encode(selection.index, selection.value, self._outgoing(2 * selection.index.size))
            entries = transport.allgather(np.array([selection.index.size], np.int32))[:, 0]
            sizes = 2 * entries.astype(np.int64)
            gathered = self._incoming(int(sizes.sum()))
            transport.allgatherv(message, sizes, gathered)
        with transport.ledger.phase("reduce"):
            for end, size in zip(np.cumsum(sizes), sizes, strict=True):
                self._sum.add(*codec.decode(gathered[end - size : end]))
            return self._sum.total()
