"""Error feedback: what a step does not deliver is kept and added to the next gradient."""

from typing import Any

import numpy as np


class Residual:
    """float32, one element for each of the gradient; made at the first step, in the memory of the kernels."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.array: Any = None

    def move_to(self, kernels: Any) -> None:
        """From host memory."""
        self._kernels = kernels
        if self.array is not None:
            self.array = kernels.from_host(self.array)

    def of_length(self, length: int) -> Any:
        if self.array is None:
            self.array = self._kernels.empty(length, np.float32)
            self._kernels.clear(self.array)
        return self.array

    def clear_delivered(self, sent_index: Any, result_index: Any) -> None:
        """Zero where this rank sent an entry and the result holds it; all else stays for the next step."""
        assert self.array is not None
        self._kernels.clear_common(self.array, sent_index, result_index)

    def keep(self, index: Any, value: Any) -> None:
        """Adds what was taken from the result on its way (distinct indexes)."""
        assert self.array is not None
        self._kernels.scatter_add(self.array, index, value)

    def keep_lost(self, index: Any, value: Any, kept: Any, delivered: Any) -> None:
        """Adds what was lost on the way to the result, at indexes that were not kept (None: at all), though the result
        holds them."""
        assert self.array is not None
        self._kernels.keep_lost(self.array, index, value, index[:0] if kept is None else kept, delivered)
