"""Every kernel against its oracle, bit for bit, in whatever memory it works on."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from okrt.kernels import reference
from okrt.perf.kernel_inputs import ARGUMENTS, KINDS, TYPES, Inputs

GUARD = 9  # elements; odd, so that kernels also start where nothing is aligned
BLOCK = 2048
MILLION = 1_000_003
# How many pairs these keep, by result and arguments; what they leave behind those is not specified.
KEPT: dict[str, Callable[[Any, tuple], int]] = {
    "keep_reaching": lambda result, arguments: result,
    "keep_top": lambda result, arguments: result,
    "cut_to_top": lambda result, arguments: arguments[2],
}
MESSAGE = 2  # which of the arrays that `pack` takes; what is behind the words that it returns is not specified either


def make_inputs(largest: int) -> list[Inputs]:
    """Of all kinds around the block that the kernels work in, and large ones, of at most that many elements."""
    small = [size for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1) if size < largest]
    large = [Inputs(min(largest, MILLION), kind) for kind in ("normal", "ties")]
    return [Inputs(size, kind) for size in small for kind in KINDS] + large


def names(kernels: Any) -> list[str]:
    """The functions that these kernels have an oracle for."""
    return [name for name, _ in inspect.getmembers(reference, inspect.isfunction) if hasattr(kernels, name)]


def check_kernel(kernels: Any, name: str, inputs: Sequence[Inputs]) -> Iterator[str]:
    """For each call what is wrong with its outcome; empty if nothing is."""
    if name not in ARGUMENTS:
        yield "there is no case for it in okrt.perf.kernel_inputs"
        return
    for x in inputs:
        for type_name in TYPES if takes_gradients(name) else ["fp32"]:
            for arguments in ARGUMENTS[name](x, x.gradients[type_name]):
                wrong = difference(kernels, name, arguments)
                yield wrong and f"{x.size} elements, {x.kind}, {type_name}: {wrong}"


def takes_gradients(name: str) -> bool:
    """Of 16 bits as well."""
    none = Inputs(0)
    calls = ARGUMENTS[name](none, none.gradients["fp16"])
    return any(isinstance(argument, np.ndarray) and argument.dtype == np.uint16 for call in calls for argument in call)


def difference(kernels: Any, name: str, arguments: tuple) -> str:
    """Between what the kernel and its oracle return and leave in their arrays, memory around those included."""
    result, arrays = outcome(kernels, name, arguments)
    expected, expected_arrays = outcome(None, name, arguments)
    if not np.array_equal(result, expected):
        return f"returned {result} instead of {expected}"
    for place, (array, other) in enumerate(zip(arrays, expected_arrays, strict=True)):
        differing = np.flatnonzero(array != other)
        if differing.size:
            return f"array {place} is wrong at {differing.size} elements, the first is {differing[0] - GUARD}"
    return ""


def outcome(kernels: Any, name: str, arguments: tuple) -> tuple[Any, list[np.ndarray]]:
    """What a call returns, and the bits of all its arrays and their guards; kernels: None for the oracle."""
    held, given = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            array = guarded(argument)
            if kernels is not None and array.dtype != np.int64:
                array = kernels.from_host(array)
            held.append(array)
            argument = array[GUARD : GUARD + argument.size]
        given.append(argument)
    result = getattr(reference if kernels is None else kernels, name)(*given)
    arrays = [array if isinstance(array, np.ndarray) else kernels.to_host(array) for array in held]
    words = [array.view(f"u{array.itemsize}") for array in arrays]
    if name in KEPT:
        for array in words:
            array[GUARD + KEPT[name](result, arguments) : array.size - GUARD] = 0
    if name == "pack":
        words[MESSAGE][GUARD + result : -GUARD] = 0
    return result, words


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy with bytes of 0xFF before and after: a read or write past an end shows."""
    held = np.full((array.size + 2 * GUARD) * array.itemsize, 0xFF, np.uint8).view(array.dtype)
    held[GUARD : GUARD + array.size] = array
    return held
