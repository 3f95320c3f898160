"""One view over NumPy and torch arrays: what is let in, and how a result leaves as the same kind."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.errors import DtypeError, UsageError
from okrt.kernels.bits import narrow

INDEX_LIMIT = 2**31 - 1  # indexes travel as int32

HOST_DTYPES = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}


@dataclass(frozen=True)
class View:
    """A checked array: `data` shares its memory, 16-bit floats as their bits (see okrt.kernels)."""

    data: np.ndarray
    dtype: str
    is_torch: bool

    @property
    def size(self) -> int:
        return self.data.size

    def result(self, data: np.ndarray) -> Any:
        """`data` (of the view's bits type) as an array of the user's kind, without a copy."""
        if self.is_torch:
            torch = sys.modules["torch"]
            if self.dtype == "float16":
                return torch.from_numpy(data.view(np.float16))
            tensor = torch.from_numpy(data)
            return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor
        return data.view(np.float16) if self.dtype == "float16" else data

    def narrowed(self, values: np.ndarray) -> np.ndarray:
        """float32 values rounded to the view's bits type."""
        return narrow(values, self.data.dtype)


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def view(x: Any) -> View:
    """The view of a 1-D contiguous float32, float16 or (torch) bfloat16 array; an error says what else it is."""
    is_torch = _is_torch(x)
    if not is_torch and not isinstance(x, np.ndarray):
        raise DtypeError(f"cannot reduce a {type(x).__name__}: pass a NumPy array or a torch tensor")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in HOST_DTYPES:
        raise DtypeError(f"cannot reduce dtype {dtype}: use one of {', '.join(HOST_DTYPES)}")
    if x.ndim != 1:
        raise UsageError(f"cannot reduce an array of shape {tuple(x.shape)}: pass it flat, x.reshape(-1)")
    if is_torch and x.layout is not sys.modules["torch"].strided:
        raise UsageError(f"cannot reduce a tensor of layout {x.layout}: pass x.to_dense()")
    if is_torch and x.device.type != "cpu":
        raise UsageError(f"cannot reduce a tensor on {x.device}: this version reduces host memory, pass x.cpu()")
    if is_torch and x.is_neg():
        raise UsageError("cannot reduce a lazily negated tensor: pass x.resolve_neg()")
    if not (x.is_contiguous() if is_torch else x.flags.c_contiguous):
        raise UsageError("cannot reduce a non-contiguous array: pass a contiguous copy of it")
    if len(x) > INDEX_LIMIT:
        raise UsageError(f"cannot reduce {len(x)} elements at once: at most {INDEX_LIMIT}, split it into buckets")
    if is_torch:
        torch = sys.modules["torch"]
        plain = x.detach()
        data = plain.view(torch.int16).numpy() if dtype == "bfloat16" else plain.numpy()
    else:
        data = x
    return View(data.view(HOST_DTYPES[dtype]), dtype, is_torch)
