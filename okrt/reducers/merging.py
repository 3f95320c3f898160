"""Sums of sorted lists of entries, in buffers that grow to what is needed and stay."""

from collections import defaultdict

import numpy as np

from okrt.codec import Coo
from okrt.kernels import cpu
from okrt.select import Selection
from okrt.transport import Transport


class Words:
    """An int32 buffer that is made longer when more is asked for, and never shorter."""

    def __init__(self) -> None:
        self._array = np.empty(0, np.int32)

    def __call__(self, length: int) -> np.ndarray:
        if self._array.size < length:
            self._array = np.empty(length + length // 8, np.int32)
        return self._array[:length]


class SortedSum:
    """The sum of lists sorted by index, merged in pairs as they come: m entries of P lists take m log P steps.

    The order of merges depends on the number of lists alone, so that equal lists give equal bits.
    """

    def __init__(self) -> None:
        self._spaces: defaultdict[tuple[int, int], tuple[Words, Words]] = defaultdict(lambda: (Words(), Words()))
        self._turns: defaultdict[int, int] = defaultdict(int)
        self._pending: list[tuple[int, np.ndarray, np.ndarray]] = []

    def add(self, index: np.ndarray, value: np.ndarray) -> None:
        """Takes one list, which must stay as it is until `total`."""
        level = 0
        while self._pending and self._pending[-1][0] == level:
            index, value = self._merged(level, index, value)
            level += 1
        self._pending.append((level, index, value))

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Indexes and sums of all lists (at least one) since the last call; good until the next call."""
        level, index, value = self._pending.pop()
        while self._pending:
            level = self._pending[-1][0]
            index, value = self._merged(level, index, value)
        return index, value

    def _merged(self, level: int, index: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sum of the last pending list and this one, in one of two spaces of the next level."""
        _, earlier_index, earlier_value = self._pending.pop()
        room = earlier_index.size + index.size
        self._turns[level] ^= 1
        index_space, value_space = self._spaces[level, self._turns[level]]
        index_out, value_out = index_space(room), value_space(room).view(np.float32)
        length = cpu.merge_add(earlier_index, earlier_value, index, value, index_out, value_out)
        return index_out[:length], value_out[:length]


class GatheredSum:
    """Every rank gets all entries of all ranks and sums them in the order of ranks: 2(P-1) words an entry."""

    def __init__(self, transport: Transport, codec: Coo) -> None:
        self._transport, self._codec = transport, codec
        self._outgoing, self._incoming = Words(), Words()
        self._sum = SortedSum()

    def __call__(self, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
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
