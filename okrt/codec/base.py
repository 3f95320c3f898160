"""What every codec offers."""

import abc
from collections.abc import Callable
from typing import Any

Space = Callable[[int], tuple[Any, Any]]
"""gives arrays for so many indexes and values"""


UNLIMITED = 2**31


class Codec(abc.ABC):
    """Turns sorted entries into messages, which are int32 arrays in the memory of the kernels, and back."""

    overhead_words = 0
    """the most that a message takes beyond that of coordinates"""

    is_lossy = False
    """whether values are rounded on their way"""

    @abc.abstractmethod
    def room(self, entries: int, has_values: bool = True, span: int = UNLIMITED) -> int:
        """The most words that a message of so many entries takes, all of them among `span` neighbouring indexes."""

    @abc.abstractmethod
    def encode(self, index: Any, value: Any, out: Any, error: Any = None) -> Any:
        """The message, in the front of `out`; without values if they are None.

        A codec that is lossy leaves in `value` what the receivers will get, and in `error` what is missing from it.
        """

    @abc.abstractmethod
    def entries(self, message: Any, sender: int, has_values: bool = True) -> int:
        """How many entries the message has; MessageError, with the rank of the sender, if it is damaged."""

    @abc.abstractmethod
    def decode(self, message: Any, entries: int, has_values: bool, space: Space) -> tuple[Any, Any]:
        """Indexes and values (None if it has none) of a message that `entries` has looked at: in what space(entries)
        gives, or as views into the message if it can be read as it is."""
