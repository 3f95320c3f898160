"""A stand-in for CuPy where there is no GPU: arrays in host memory that the host cannot touch.

Only what a GPU or its driver would do is allowed: slices, views, copies from array to array, kernels (in Numba's
simulator, which finds the memory through __cuda_array_interface__), MPI, and the copies to and from the host that
okrt.kernels.staging asks for. Whatever else reads or writes an element raises HostTouch. That CuPy itself has these
names and arguments is tested beside it.
"""

import contextlib
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

STAGING = "okrt.kernels.staging"


class HostTouch(AssertionError):
    """The host has read or written device memory."""


log: list[str] = []  # what was done, in its order: fences, copies


class ndarray:
    """One-dimensional; `_held` is its memory."""

    def __init__(self, held: np.ndarray) -> None:
        assert held.ndim == 1
        self._held = held
        self.dtype, self.size, self.nbytes, self.itemsize = held.dtype, held.size, held.nbytes, held.itemsize
        self.ndim, self.shape = 1, held.shape
        self.flags = SimpleNamespace(c_contiguous=held.flags.c_contiguous)
        self.device = SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict:
        pointer = self._held.__array_interface__["data"][0]
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (pointer, False), "version": 3, "strides": None}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, where) -> "ndarray":
        if not isinstance(where, slice):
            raise HostTouch(f"element {where!r} of a device array")
        return ndarray(self._held[where])

    def __setitem__(self, where, value) -> None:
        if not isinstance(where, slice) or not isinstance(value, (ndarray, int, float)):
            raise HostTouch(f"{value!r} written to {where!r} of a device array")
        self._held[where] = value._held if isinstance(value, ndarray) else value

    def view(self, dtype) -> "ndarray":
        return ndarray(self._held.view(dtype))

    def copy(self) -> "ndarray":
        return ndarray(self._held.copy())

    def astype(self, dtype) -> "ndarray":
        return ndarray(self._held.astype(dtype))

    def get(self, stream=None, order="C", out=None, blocking=True) -> np.ndarray:
        self._check_caller()
        log.append(f"to host {self.nbytes}")
        if out is None:
            return self._held.copy()
        out[:] = self._held
        return out

    def set(self, arr, stream=None) -> None:
        self._check_caller()
        log.append(f"to device {self.nbytes}")
        self._held[:] = arr

    @staticmethod
    def _check_caller() -> None:
        caller = sys._getframe(2).f_globals["__name__"]
        if caller not in (STAGING, __name__):
            raise HostTouch(f"{caller} copies device memory")

    def _refuse(self, *_, **__):
        raise HostTouch("the host works on a device array")

    __array__ = __iter__ = __bool__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __iadd__ = __imul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = tolist = sum = max = any = all = item = _refuse
    __array_ufunc__ = _refuse

    def __array_function__(self, *_):
        self._refuse()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._held.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._held.__dlpack_device__()


def empty(shape, dtype=float, order="C") -> ndarray:
    held = np.empty(shape, dtype)
    held.view(np.uint8)[:] = 0xFF  # what was never written shows: NaN, and indexes of -1
    return ndarray(held)


def from_dlpack(x, /, *, device=None, copy=None) -> ndarray:
    return ndarray(np.from_dlpack(x))


def on_device(host: np.ndarray) -> ndarray:
    """For tests: a device array with these elements."""
    return ndarray(host.copy())


def on_host(array: ndarray) -> np.ndarray:
    """For tests: what a device array holds."""
    return array._held.copy()


class Stream:
    ptr = 0

    def synchronize(self) -> None:
        log.append("fence")


class ExternalStream(Stream):
    def __init__(self, ptr, device_id=-1) -> None:
        self.ptr = ptr

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


class Device(contextlib.nullcontext):
    """A GPU of its own for each rank of a job."""

    bus = os.environ.get("PMI_RANK", "0")

    def __init__(self, device=None) -> None:
        super().__init__()
        self.pci_bus_id = f"0000:0{self.bus}:00.0"


def install(monkeypatch) -> ModuleType:
    """This module as `cupy`, for one test."""
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "cupy", module)
    log.clear()
    return module


cuda = SimpleNamespace(
    Stream=Stream,
    ExternalStream=ExternalStream,
    get_current_stream=lambda device_id=-1: Stream(),
    Device=Device,
    alloc_pinned_memory=lambda size: bytearray(size),
)
