"""Entries in few bytes: gaps between indexes in as many bits as they need, or a bitmap; values in 32 or 16 bits.

The format is told in okrt.kernels.packed. Every message has a checksum: one that was cut off or changed on its way is
refused.
"""

from typing import Any

import numpy as np

from okrt.codec.base import UNLIMITED, Codec, Space
from okrt.errors import MessageError
from okrt.kernels.packed import KINDS, MAGIC, PLAIN_MASK, VERSION, room_words


class Packed(Codec):
    overhead_words = 1

    def __init__(self, kernels: Any, values: str) -> None:
        self._kernels, self._kind = kernels, KINDS[values]
        self._nothing = kernels.empty(0, np.float32)
        self.is_lossy = values != "fp32"

    def room(self, entries: int, has_values: bool = True, span: int = UNLIMITED) -> int:
        return room_words(entries, self._kind_of(has_values), span)

    def _kind_of(self, has_values: bool) -> int:
        return self._kind if has_values else KINDS["none"]

    def encode(self, index: Any, value: Any, out: Any, error: Any = None) -> Any:
        nothing, kind = self._nothing, self._kind_of(value is not None)
        value, error = (nothing if array is None else array for array in (value, error))
        return out[: self._kernels.pack(index, value, kind, out, error)]

    def entries(self, message: Any, sender: int, has_values: bool = True) -> int:
        if message.size == 0:
            raise MessageError(f"nothing is left of a message from rank {sender}")
        first, second, has, right = self._kernels.inspect_packed(message)
        if has != right:
            raise MessageError(
                f"a message of {message.size} words from rank {sender} was cut off or changed on its way: "
                f"its checksum is {has:#010x}, it should be {right:#010x}"
            )
        if first <= PLAIN_MASK:
            entries, rest = divmod(message.size - 1, 2 if has_values else 1)
        else:
            entries, rest = second, first & 0xFF00F0FF ^ (MAGIC << 24 | self._kind_of(has_values) << 12 | VERSION)
        if rest:
            raise MessageError(
                f"a message from rank {sender} is not of the format expected here (it begins with {first:#010x}): "
                "all ranks must run the same okrt"
            )
        return entries

    def decode(self, message: Any, entries: int, has_values: bool, space: Space) -> tuple[Any, Any]:
        index, value = space(entries)
        self._kernels.unpack(message, index, value if has_values else self._nothing)
        return index, value if has_values else None
