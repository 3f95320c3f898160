"""Entries as coordinates: all int32 indexes, then all float32 values, two words an entry."""

import numpy as np


class Coo:
    """Messages are int32 arrays; encoding copies, decoding only looks."""

    entry_words = 2

    def encode(self, index: np.ndarray, value: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The message, in the front of `out`."""
        m = index.size
        out[:m] = index
        out[m : 2 * m] = value.view(np.int32)
        return out[: 2 * m]

    def decode(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indexes and values, as views into the message."""
        m = message.size // 2
        return message[:m], message[m:].view(np.float32)
