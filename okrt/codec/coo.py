"""Entries as coordinates: all int32 indexes, then all float32 values, two words an entry."""

from typing import Any

import numpy as np

from okrt.codec.base import UNLIMITED, Codec, Space
from okrt.errors import MessageError


class Coo(Codec):
    """Encoding copies, decoding only looks."""

    def room(self, entries: int, has_values: bool = True, span: int = UNLIMITED) -> int:
        return (2 if has_values else 1) * entries

    def encode(self, index: Any, value: Any, out: Any, error: Any = None) -> Any:
        m = index.size
        out[:m] = index
        if value is None:
            return out[:m]
        out[m : 2 * m] = value.view(np.int32)
        return out[: 2 * m]

    def entries(self, message: Any, sender: int, has_values: bool = True) -> int:
        entries, rest = divmod(message.size, 2 if has_values else 1)
        if rest:
            raise MessageError(f"a message of {message.size} words from rank {sender} is not a list of coordinates")
        return int(entries)

    def decode(self, message: Any, entries: int, has_values: bool, space: Space) -> tuple[Any, Any]:
        return message[:entries], message[entries:].view(np.float32) if has_values else None
