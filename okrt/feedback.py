"""Error feedback: what a step does not deliver is kept and added to the next gradient."""

import numpy as np

from okrt.kernels import cpu


class Residual:
    """float32, one element for each of the gradient; made at the first step."""

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def of_length(self, length: int) -> np.ndarray:
        if self.array is None:
            self.array = np.zeros(length, np.float32)
        return self.array

    def clear_delivered(self, sent_index: np.ndarray, result_index: np.ndarray) -> None:
        """Zero where this rank sent an entry and the result holds it; all else stays for the next step."""
        assert self.array is not None
        cpu.clear_common(self.array, sent_index, result_index)

    def keep(self, index: np.ndarray, value: np.ndarray) -> None:
        """Adds what was taken from the result on its way (distinct indexes)."""
        assert self.array is not None
        cpu.scatter_add(self.array, index, value)
