"""The file of a run, `run.h5`, whether it is still being written, was cut off, or has ended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from okrt.errors import UsageError
from okrt.train.metrics import MISSING, SCHEMA_VERSION, UNITS, naming, open_live, read_columns

WORD_BYTES = 4
COMPLETE, STOPPED, OPEN, UNKNOWN = "complete", "stopped", "open", "unknown"
"""all steps; ended early, but in order; going on, or killed; the file does not say how many steps there should be"""


@dataclass(frozen=True)
class Run:
    attributes: dict[str, Any]
    config: dict[str, Any]
    steps: dict[str, np.ndarray]
    """columns with a row per step"""
    ranks: dict[str, np.ndarray]
    """columns of (step, rank); NaN where a rank took no part"""
    size: int
    """ranks"""
    state: str

    @property
    def rows(self) -> int:
        return len(self.steps["step"])

    @property
    def reducer(self) -> str:
        return str(self.config.get("reducer", {}).get("name", "an unknown reducer"))

    @property
    def is_exact(self) -> np.ndarray:
        """Steps in which everything is sent."""
        reducer = self.config.get("reducer", {})
        until = np.inf if reducer.get("name") == "dense" else reducer.get("dense_steps", 0)
        return self.steps["step"] <= until

    @property
    def k(self) -> np.ndarray:
        """Entries that the density stands for, step by step; NaN where nothing was sent.

        The file has words/k and the bytes, of the rank that received most; the few bytes that no reducer counts make
        this a little high.
        """
        words = self.steps["bytes_received"] / WORD_BYTES
        per_k = self.steps["words_over_k"]
        return np.divide(words, per_k, out=np.full(self.rows, np.nan), where=(per_k > 0) & (words > 0))


def read(path: Path) -> Run:
    """The rows that are complete; a file of another layout is refused."""
    with naming(path, "metrics cannot be read"):
        with open_live(path) as file:
            attributes = dict(file.attrs)
            size = file["ranks/rank"].size
        if attributes.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has the layout {attributes['schema_version']}, this okrt knows {SCHEMA_VERSION}: "
                "use the okrt that wrote it, or another file"
            )
        columns = read_columns(path, UNITS)
    config = json.loads(attributes.get("config", "{}"))
    parts: dict[str, dict[str, np.ndarray]] = {"steps": {}, "ranks": {}}
    for name, values in columns.items():
        group, column = name.split("/")
        is_missing = (
            values == MISSING if values.dtype.kind == "i" and values.ndim == 2 else np.zeros(values.shape, bool)
        )
        parts[group][column] = np.where(is_missing, np.nan, values) if values.ndim == 2 else values
    last = int(parts["steps"]["step"][-1]) if len(parts["steps"]["step"]) else 0
    return Run(attributes, config, parts["steps"], parts["ranks"], size, state_of(path, last, config.get("steps")))


def state_of(path: Path, last: int, planned: int | None) -> str:
    """How far the run is, as far as its file can tell."""
    if planned is not None and last >= planned:
        return COMPLETE
    try:
        # A writer that is at work, or was killed, has left its mark: only a file that was closed opens like this.
        h5py.File(path, "r", locking=False).close()
    except OSError:
        return OPEN
    return STOPPED if planned is not None else UNKNOWN
