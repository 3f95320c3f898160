"""How entries become bytes."""

from typing import Any

from okrt.codec.base import Codec
from okrt.codec.coo import Coo
from okrt.codec.packed import Packed

CODECS = ("coo", "packed")
VALUES = ("fp32", "fp16", "bf16")


def codec(name: str, values: str, kernels: Any) -> Codec:
    """The codec of that name, for arrays in the memory of these kernels."""
    return Packed(kernels, values) if name == "packed" else Coo()


__all__ = ["CODECS", "VALUES", "Codec", "Coo", "Packed", "codec"]
