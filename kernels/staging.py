"""Between host and device memory: nothing else on the host reads or writes what a device array (CuPy) holds."""

from typing import Any

import numpy as np


def to_host(array: Any, out: np.ndarray | None = None) -> np.ndarray:
    """A copy of the array, in `out` if there is one; waits for the current stream."""
    return array.get(out=out) if array.size else np.empty(0, array.dtype) if out is None else out


def to_device(source: np.ndarray, out: Any) -> None:
    """Copies into the array; when this returns, the source may be used for something else."""
    if source.size:
        out.set(source)
        fence()


def fence() -> None:
    """Waits until all is done that was started on the current stream: MPI knows nothing of streams."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def pinned_bytes(length: int) -> np.ndarray:
    """Host memory that a device copies from and to at full speed."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(length), np.uint8, length)
