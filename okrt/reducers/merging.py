"""Sums of sorted lists of entries, in buffers that grow to what is needed and stay."""

import itertools

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
    """The running sum of lists sorted by index: two pairs of buffers that take turns."""

    def __init__(self) -> None:
        self._spaces = [(Words(), Words()), (Words(), Words())]
        self.start(np.empty(0, np.int32), np.empty(0, np.float32))

    def start(self, index: np.ndarray, value: np.ndarray) -> None:
        """The sum is this list, which must stay as it is until the next `add`."""
        self.index, self.value = index, value

    def add(self, index: np.ndarray, value: np.ndarray) -> None:
        room = self.index.size + index.size
        index_space, value_space = self._spaces[0]
        index_out, value_out = index_space(room), value_space(room).view(np.float32)
        length = cpu.merge_add(self.index, self.value, index, value, index_out, value_out)
        self.index, self.value = index_out[:length], value_out[:length]
        self._spaces.reverse()


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
            sizes = transport.allgather(np.array([message.size], np.int32))[:, 0]
            gathered = self._incoming(int(sizes.sum(dtype=np.int64)))
            transport.allgatherv(message, sizes, gathered)
        with transport.ledger.phase("reduce"):
            ends = np.cumsum(sizes, dtype=np.int64)
            self._sum.start(*codec.decode(gathered[: ends[0]]))
            for start, end in itertools.pairwise(ends):
                self._sum.add(*codec.decode(gathered[start:end]))
        return self._sum.index, self._sum.value
