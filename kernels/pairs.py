"""Lists of entries whose length may be known only where they are."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pairs:
    """Sorted indexes and their values."""

    index: Any
    value: Any
    length: Any = None
    """on a device, the word of its memory that tells how many there are; None if the arrays hold no others"""
