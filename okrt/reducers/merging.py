"""Sums of sorted lists of entries, in buffers that grow to what is needed and stay."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.codec import Codec
from okrt.errors import MessageError
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


@dataclass(frozen=True)
class Lost:
    """What was taken from sums on this rank, by leaving them out or by rounding them: at those of the indexes that are
    delivered all the same (and that this rank has not kept), it is this rank's to keep."""

    index: Any
    value: Any
    kept: Any = None


class Inbox:
    """Reads the messages of a step; what is read of each stays until the next `begin`."""

    def __init__(self, codec: Codec, kernels: Any) -> None:
        self._codec, self._kernels = codec, kernels
        self._places: list[tuple[Words, Words]] = []

    def begin(self) -> None:
        self._used = 0

    def read(self, message: Any, sender: int, expected: int | None = None, has_values: bool = True) -> tuple[Any, Any]:
        """Its indexes and values (None if it has none); `expected`: how many entries the sender has announced."""
        entries = self._codec.entries(message, sender, has_values)
        if expected not in (None, entries):
            raise MessageError(f"a message from rank {sender} has {entries} entries instead of {expected}")
        return self._codec.decode(message, entries, has_values, self._next_place)

    def _next_place(self, length: int) -> tuple[Any, Any]:
        if self._used == len(self._places):
            self._places.append((Words(self._kernels), Words(self._kernels)))
        index, value = self._places[self._used]
        self._used += 1
        return index(length), value(length).view(np.float32)


class Gather:
    """The entries of every rank to every rank: one message to each, read while the next ones are in flight."""

    def __init__(self, transport: Transport, codec: Codec, kernels: Any) -> None:
        self._transport, self._codec = transport, codec
        self._outgoing, self._incoming, self._error = (Words(kernels) for _ in range(3))
        self._inbox = Inbox(codec, kernels)

    def __call__(self, index: Any, value: Any, entries: np.ndarray) -> tuple[list[tuple[Any, Any]], tuple[Lost, ...]]:
        """Indexes and values of each rank, good until the next call, and what rounding took from this rank's.

        entries[i] is how many rank i has; value is None where only indexes are wanted.
        """
        transport, codec, has_values = self._transport, self._codec, value is not None
        lists: list[tuple[Any, Any]] = [(index, value)] * transport.size
        lost: tuple[Lost, ...] = ()
        outgoing, incoming, at = {}, {}, 0
        if index.size:
            error = self._error(index.size if codec.is_lossy and has_values else 0).view(np.float32)
            message = codec.encode(index, value, self._outgoing(codec.room(index.size, has_values)), error)
            lost = (Lost(index, error),) if error.size else ()
            outgoing = {peer: message for peer in range(transport.size) if peer != transport.rank}
        rooms = [codec.room(int(number), has_values) if number else 0 for number in entries]
        mail = self._incoming(sum(rooms))
        for peer, room in enumerate(rooms):
            if peer != transport.rank:
                incoming[peer] = mail[at : at + room]
                at += room
        self._inbox.begin()
        for peer, message in transport.exchange(outgoing, incoming):
            if entries[peer]:
                lists[peer] = self._inbox.read(message, peer, int(entries[peer]), has_values)
            else:
                lists[peer] = index[:0], None if value is None else value[:0]
        return lists, lost


class GatheredSum:
    """Every rank gets all entries of all ranks and sums them in the order of ranks: 2(P-1) words an entry."""

    def __init__(self, transport: Transport, codec: Codec, kernels: Any) -> None:
        self._transport = transport
        self._gather = Gather(transport, codec, kernels)
        self._sum = SortedSum(kernels)

    def __call__(self, selection: Selection) -> tuple[Any, Any, tuple[Lost, ...]]:
        """Indexes and sums, good until the next call, and what rounding took from this rank's."""
        transport = self._transport
        with transport.ledger.phase("gather"):
            entries = transport.allgather(np.array([selection.index.size], np.int32))[:, 0]
            lists, lost = self._gather(selection.index, selection.value, entries)
        with transport.ledger.phase("reduce"):
            for index, value in lists:
                self._sum.add(index, value)
            return *self._sum.total(), lost
