"""One view over NumPy, CuPy and torch arrays: what is let in, how a result leaves as the same kind, and what MPI may
touch of it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from okrt.errors import DtypeError, UsageError
from okrt.kernels.staging import fence, pinned_bytes, to_device, to_host

INDEX_LIMIT = 2**31 - 1  # indexes travel as int32

HOST_DTYPES = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
HOST = "host"


@dataclass(frozen=True)
class View:
    """A checked array: `data` (NumPy or CuPy) shares its memory, 16-bit floats as their bits (see okrt.kernels)."""

    data: Any
    dtype: str
    library: str
    """whose array it is: numpy, cupy or torch"""
    place: str
    """host, or the device, such as cuda:0"""
    stream: int | None = None
    """on a device, the address of the stream that the caller works on"""

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def memory(self) -> str:
        """host or cuda"""
        return self.place.partition(":")[0]

    @property
    def number(self) -> int:
        """of the device"""
        return int(self.place.partition(":")[2])

    @property
    def is_writeable(self) -> bool:
        return self.memory != HOST or self.data.flags.writeable

    def result(self, data: Any) -> Any:
        """`data` (of the view's bits type) as an array of the user's kind, without a copy."""
        if self.library == "torch":
            torch = sys.modules["torch"]
            tensor = self._tensor(data.view(np.float16) if self.dtype == "float16" else data)
            return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor
        return data.view(np.float16) if self.dtype == "float16" else data

    def index(self, index: Any) -> Any:
        """A copy of int32 indexes as int64, of the user's kind."""
        wide = index.astype(np.int64)
        return self._tensor(wide) if self.library == "torch" else wide

    def _tensor(self, data: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.from_numpy(data) if self.memory == HOST else torch.from_dlpack(data)


def is_on_gpu(tensor: Any) -> bool:
    """Of a torch tensor."""
    return tensor.device.type == "cuda"


def stream_of(tensor: Any) -> int:
    """The address of the stream that the caller works on, on the GPU of the tensor."""
    address: int = sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    return address


def view(x: Any) -> View:
    """The view of a 1-D contiguous float32, float16 or (torch) bfloat16 array; an error says what else it is."""
    library = library_of(x)
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in HOST_DTYPES:
        raise DtypeError(f"cannot reduce dtype {dtype}: use one of {', '.join(HOST_DTYPES)}")
    if x.ndim != 1:
        raise UsageError(f"cannot reduce an array of shape {tuple(x.shape)}: pass it flat, x.reshape(-1)")
    if library == "torch":
        check_tensor(x)
    if not (x.is_contiguous() if library == "torch" else x.flags.c_contiguous):
        raise UsageError("cannot reduce a non-contiguous array: pass a contiguous copy of it")
    if len(x) > INDEX_LIMIT:
        raise UsageError(f"cannot reduce {len(x)} elements at once: at most {INDEX_LIMIT}, split it into buckets")
    place, stream = HOST, None
    if library == "cupy":
        place, stream = f"cuda:{x.device.id}", need_cupy().cuda.get_current_stream().ptr
    elif library == "torch":
        torch = sys.modules["torch"]
        plain = x.detach()
        plain = plain.view(torch.int16) if dtype == "bfloat16" else plain
        if is_on_gpu(x):
            place, stream = f"cuda:{x.device.index or 0}", stream_of(x)
            x = need_cupy().from_dlpack(plain)
        else:
            x = plain.numpy()
    return View(x.view(HOST_DTYPES[dtype]), dtype, library, place, stream)


def library_of(x: Any) -> str:
    for library, kind in (("numpy", "ndarray"), ("torch", "Tensor"), ("cupy", "ndarray")):
        module = sys.modules.get(library)
        if module is not None and isinstance(x, getattr(module, kind)):
            return library
    raise DtypeError(f"cannot reduce a {type(x).__name__}: pass a NumPy or CuPy array or a torch tensor")


def check_tensor(x: Any) -> None:
    if x.layout is not sys.modules["torch"].strided:
        raise UsageError(f"cannot reduce a tensor of layout {x.layout}: pass x.to_dense()")
    if x.device.type not in ("cpu", "cuda"):
        raise UsageError(f"cannot reduce a tensor on {x.device}: pass it on cuda or cpu")
    if x.is_neg():
        raise UsageError("cannot reduce a lazily negated tensor: pass x.resolve_neg()")


def need_cupy() -> Any:
    """CuPy, which device arrays need."""
    try:
        import cupy
        import numba_cuda  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"cannot reduce an array on a GPU: {error.name} is missing, pip install 'okrt[cuda12]' (or cuda13)"
        ) from None
    return cupy


def gpu_name(source: View) -> str:
    """The address of its GPU on the bus: numbers of devices mean another one in each process."""
    address: str = need_cupy().cuda.Device(source.number).pci_bus_id
    return address


def device_kernels(source: View) -> Any:
    """The kernels for the GPU that an array is on."""
    from okrt.kernels.cuda import Device

    return Device(source.number)


class Wire:
    """What MPI is given of arrays: host memory as it is, and device memory too where MPI can touch it; where it cannot,
    pinned host memory that stands in for it."""

    def __init__(self, is_cuda_aware: Callable[[], bool]) -> None:
        self._is_cuda_aware = is_cuda_aware
        self._pinned = np.empty(0, np.uint8)

    def lend(self, outgoing: Sequence[Any], incoming: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What to send and to receive into, instead of these; good until the next call."""
        arrays = [*outgoing, *incoming]
        if not any(map(is_device_array, arrays)):
            return list(outgoing), list(incoming)
        fence()
        if self._is_cuda_aware():
            return list(outgoing), list(incoming)
        sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
        if self._pinned.size < sum(sizes):
            self._pinned = pinned_bytes(sum(sizes) + sum(sizes) // 8)
        ends = np.cumsum(sizes)
        lent = [
            self._pinned[end - size : end - size + array.nbytes].view(array.dtype)
            for array, size, end in zip(arrays, sizes, ends, strict=True)
        ]
        for array, copy in zip(outgoing, lent, strict=False):
            to_host(array, copy)
        return lent[: len(outgoing)], lent[len(outgoing) :]

    def arrived(self, array: Any, lent: Any) -> None:
        """What MPI has written is now in the array."""
        if is_device_array(array) and not is_device_array(lent):
            to_device(lent, array)


def is_device_array(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__")
