"""Trees of arrays and scalars as safetensors files: written as a stream, read by the library."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from okrt.errors import UsageError

Array = torch.Tensor | np.ndarray
MAX_HEADER_BYTES = 100_000_000  # the library reads no more
CHUNK_BYTES = 1 << 20
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def flatten(tree: Mapping[str, Any]) -> tuple[Any, dict[str, Array]]:
    """The tree as plain JSON in which each array is a name, and the arrays by these names."""
    arrays: dict[str, Array] = {}

    def plain(value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": plain(list(value), where)}
        if isinstance(value, Mapping):
            for key in value:
                if type(key) not in (str, int):
                    raise UsageError(f"{where} has the key {key!r}: keys in a checkpoint are strings or integers")
            return {"dict": [[key, plain(item, f"{where}[{key!a}]")] for key, item in value.items()]}
        if isinstance(value, torch.Tensor):
            kind = "torch"
        elif type(value) is np.ndarray:
            kind = "numpy"
        elif isinstance(value, np.generic):
            kind, value = "scalar", np.asarray(value)
        else:
            raise UsageError(
                f"{where} is a {type(value).__name__}: a checkpoint holds dicts, lists, tuples, torch tensors, "
                "NumPy arrays, numbers, strings and None"
            )
        arrays[where] = value
        return {kind: where}

    return plain(tree, "own"), arrays


def unflatten(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again. Tensors are on the CPU and need no gradient; every mapping is a dict."""
    if isinstance(plain, list):
        return [unflatten(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(unflatten(content, tensors))
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    if kind == "torch":
        return tensors[content]
    array = tensors[content].numpy()
    return array if kind == "numpy" else array[()]


class TensorFile:
    """A safetensors file yet to be written; `size` in bytes is known already."""

    def __init__(self, arrays: Mapping[str, Array], metadata: dict[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": metadata}
        codes = {name: _code(name, array) for name, array in arrays.items()}
        # Wide types first: so every array lies aligned.
        self._arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
        end = 0
        for name, array in self._arrays.items():
            start, end = end, end + array.nbytes
            header[name] = {"dtype": codes[name], "shape": list(array.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise UsageError(
                f"names and scalars take {len(text):,} bytes in a checkpoint, of {MAX_HEADER_BYTES:,} allowed: "
                "keep long lists of numbers as arrays"
            )
        self._head = struct.pack("<Q", len(text)) + text
        self.size = len(self._head) + end

    def write(self, path: Path) -> str:
        """Writes and syncs it; returns the sha256 of what was to be written."""
        digest = hashlib.sha256(self._head)
        with open(path, "xb") as file:
            file.write(self._head)
            for array in self._arrays.values():
                content = _bytes(array)
                file.write(content.data)
                digest.update(content.data)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The arrays of a safetensors file as tensors of their own memory, and its metadata."""
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def plain_json(shared: Mapping[str, Any]) -> str:
    """As JSON that gives the very same when it is read; a UsageError if there is none."""
    complaint = "tuples, keys that are not strings and the like would come back as something else"
    try:
        text = json.dumps(shared, allow_nan=False)
        if json.loads(text) == shared:
            return text
    except (TypeError, ValueError) as error:
        complaint = str(error)
    raise UsageError(f"what the ranks share in a checkpoint must be plain JSON: {complaint} ({shared!r:.200})")


def _code(name: str, array: Array) -> str:
    if isinstance(array, torch.Tensor):
        kind = str(array.dtype).removeprefix("torch.")
        fits = array.layout is torch.strided
    else:
        kind = array.dtype.name
        fits = array.dtype.isbuiltin == 1 and array.dtype.isnative
    if not fits or kind not in CODES:
        what = f"a {type(array).__name__} of {array.dtype}" + ("" if fits else ", not dense or not native")
        raise UsageError(f"{name} is {what}: a checkpoint holds dense arrays of {', '.join(CODES)}")
    return CODES[kind]


def _bytes(array: Array) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        # Not reshape(-1): the stride of no or one element may be 0, which cannot be viewed as bytes.
        return array.detach().cpu().contiguous().as_strided((array.numel(),), (1,)).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
