"""Messages around the ring of ranks, in the memory of the kernels."""

from collections.abc import Iterator
from typing import Any

import numpy as np

MESSAGE_WORDS = (1, 1 << 10, 1 << 20)  # some that MPI sends at once, and one for which it asks first


def message(rank: int, words: int) -> np.ndarray:
    return np.arange(words, dtype=np.int32) + np.int32(1000 * rank)


def check_ring(transport: Any, kernels: Any) -> Iterator[str]:
    """Every rank sends to the next one, then to the one before; for each message what is wrong, empty if nothing."""
    rank, size = transport.rank, transport.size
    for words in MESSAGE_WORDS:
        for way in (1, -1):
            to, source = (rank + way) % size, (rank - way) % size
            outgoing = kernels.from_host(message(rank, words))
            incoming = kernels.from_host(np.full(words, -1, np.int32))
            for _ in transport.exchange({to: outgoing}, {source: incoming}):
                pass
            differing = np.count_nonzero(kernels.to_host(incoming) != message(source, words))
            yield f"{differing} of {words} words from rank {source} are wrong" if differing else ""
