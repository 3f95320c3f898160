"""How entries become bytes."""

from okrt.codec.coo import Coo

CODECS: dict[str, type[Coo]] = {"coo": Coo}

__all__ = ["CODECS", "Coo"]
