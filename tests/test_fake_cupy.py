"""The stand-in for CuPy has names and arguments of CuPy itself, which imports without a GPU."""

import inspect

import pytest

from tests import fake_cupy

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'okrt[cuda12]'")


@pytest.mark.parametrize("name", ["view", "copy", "astype", "get", "set", "size", "nbytes", "itemsize", "device"])
def test_arrays_have_it(name):
    assert hasattr(cupy.ndarray, name)


@pytest.mark.parametrize(
    "name", ["ExternalStream", "get_current_stream", "Device", "alloc_pinned_memory", "Stream.synchronize"]
)
def test_the_runtime_has_it(name):
    theirs, ours = cupy.cuda, fake_cupy.cuda
    for part in name.split("."):
        theirs, ours = getattr(theirs, part), getattr(ours, part)


def test_devices_tell_their_place_on_the_bus():
    assert hasattr(cupy.cuda.Device, "pci_bus_id")


def test_parameters_of_what_is_called():
    assert list(inspect.signature(fake_cupy.empty).parameters) == list(inspect.signature(cupy.empty).parameters)[:3]
    assert callable(cupy.from_dlpack)
    # Compiled functions tell theirs in the first line of their documentation.
    for name, arguments in (("get", ("stream", "order", "out", "blocking")), ("set", ("arr", "stream"))):
        line = getattr(cupy.ndarray, name).__doc__.splitlines()[0]
        assert all(argument in line for argument in arguments), line
