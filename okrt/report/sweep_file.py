"""The file of a sweep, `sweep.h5`: every point of the grid from the start, filled in one after the other.

After each point the file is written anew beside the old one and takes its place at once: whatever is killed, it opens.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from okrt.errors import UsageError
from okrt.report.statistics import median_interval
from okrt.train.metrics import naming

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

PENDING, DONE, FAILED = "pending", "done", "failed"
SCHEMA_VERSION = 1
BASELINE = "dense"
UNITS = {
    "ranks": "1",
    "elements": "1",
    "density": "1",
    "k": "1",
    "repetitions": "1",
    "median_s": "s",
    "ci95_low_s": "s",
    "ci95_high_s": "s",
    "phase_s": "s",
    "words_over_k_median": "words/k",
    "words_over_k_max": "words/k",
    "bound_words_over_k": "words/k",
    "bytes_received": "bytes",
    "alpha_s": "s",
    "beta_s": "s/word",
    "alpha_beta_s": "s",
    "speedup_over_dense": "1",
    "seconds": "s",
    "words_over_k": "words/k",
}
COUNTS = ("repetitions", "k")
FIGURES = (
    *("median_s", "ci95_low_s", "ci95_high_s", "words_over_k_median", "words_over_k_max", "bytes_received"),
    *("bound_words_over_k", "alpha_s", "beta_s", "alpha_beta_s", "speedup_over_dense"),
)
TEXTS = ("status", "reason", "code", "measured_utc")
SAMPLES = ("seconds", "words_over_k", "bytes_received")


@dataclass(frozen=True)
class Measured:
    """One point; of each step the slowest rank, or the one that received most."""

    samples: dict[str, np.ndarray]
    """SAMPLES, by repetition"""
    phase_s: dict[str, float]
    """medians over the repetitions"""
    k: int
    bound_words_over_k: float
    alpha_s: float
    """latency, and seconds per word, of a ping-pong between two ranks"""
    beta_s: float
    alpha_beta_s: float
    """what that network allows a step of the algorithm; NaN if nobody can say"""


@dataclass
class Sweep:
    """The file in memory."""

    attributes: dict[str, Any]
    """of the root: what the sweep is, and what made it"""
    settings: tuple[str, ...]
    """names of the points' columns that tell what was measured, not what came of it"""
    phases: tuple[str, ...]
    points: dict[str, np.ndarray]
    """columns of one row a point; `phase_s` has a column a phase"""
    samples: dict[str, np.ndarray]
    """SAMPLES, each of (point, repetition), NaN where there is none"""

    @property
    def size(self) -> int:
        return len(self.points["status"])

    def numbers(self, status: str) -> list[int]:
        """The points that are in this state."""
        return [int(number) for number in np.flatnonzero(self.points["status"] == status)]

    def setting(self, number: int) -> dict[str, Any]:
        return {name: self.points[name].tolist()[number] for name in self.settings}

    def record(self, number: int, measured: Measured, code: str, measured_utc: str) -> None:
        """Puts a point that was measured in its place."""
        count = len(measured.samples["seconds"])
        for name, table in self.samples.items():
            if count > table.shape[1]:
                more = np.full((self.size, count - table.shape[1]), np.nan)
                self.samples[name] = table = np.concatenate([table, more], axis=1)
            table[number] = np.nan
            table[number, :count] = measured.samples[name]
        median, low, high = median_interval(measured.samples["seconds"])
        words = measured.samples["words_over_k"]
        row = {
            "k": measured.k,
            "repetitions": count,
            "median_s": median,
            "ci95_low_s": low,
            "ci95_high_s": high,
            "words_over_k_median": np.median(words),
            "words_over_k_max": words.max(),
            "bytes_received": np.median(measured.samples["bytes_received"]),
            "bound_words_over_k": measured.bound_words_over_k,
            "alpha_s": measured.alpha_s,
            "beta_s": measured.beta_s,
            "alpha_beta_s": measured.alpha_beta_s,
            "phase_s": [measured.phase_s[phase] for phase in self.phases],
        }
        for name, value in row.items():
            self.points[name][number] = value
        self._note(number, DONE, "", code, measured_utc)
        self._compare_with_dense()

    def fail(self, number: int, reason: str, code: str, measured_utc: str) -> None:
        """Notes a point that cannot be measured, and why."""
        self._note(number, FAILED, reason, code, measured_utc)

    def forget(self, number: int) -> None:
        """A point that failed is to be measured again."""
        self._note(number, PENDING, "", "", "")

    def _note(self, number: int, *texts: str) -> None:
        for name, text in zip(TEXTS, texts, strict=True):
            self.points[name][number] = text

    def _compare_with_dense(self) -> None:
        """Times as fast as the dense point that is alike in all else."""
        alike = [name for name in self.settings if name not in ("reducer", "density")]
        dense = {
            tuple(self.points[name][number] for name in alike): self.points["median_s"][number]
            for number in self.numbers(DONE)
            if self.points["reducer"][number] == BASELINE
        }
        for number in range(self.size):
            base = dense.get(tuple(self.points[name][number] for name in alike), np.nan)
            self.points["speedup_over_dense"][number] = base / self.points["median_s"][number]


def new(settings: Sequence[Mapping[str, Any]], phases: Sequence[str], attributes: Mapping[str, Any]) -> Sweep:
    """A sweep of these points, none of which has been measured; all have the same settings in the same order."""
    count = len(settings)
    names = tuple(settings[0])
    points = {name: column([point[name] for point in settings]) for name in names}
    points |= {name: np.full(count, 0, np.int64) for name in COUNTS}
    points |= {name: np.full(count, np.nan) for name in FIGURES}
    points["phase_s"] = np.full((count, len(phases)), np.nan)
    points |= {name: column([PENDING if name == "status" else ""] * count) for name in TEXTS}
    samples = {name: np.full((count, 0), np.nan) for name in SAMPLES}
    return Sweep(dict(attributes), names, tuple(phases), points, samples)


def column(values: list[Any]) -> np.ndarray:
    """Whole numbers, numbers or texts, whatever they all are."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, np.int64)
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return np.array(values, np.float64)
    return np.array([value if isinstance(value, str) else json.dumps(value) for value in values], object)


def write(path: Path, sweep: Sweep) -> None:
    """Replaces the file at once."""
    import h5py  # here: most commands and ranks do without it, and it takes a quarter of a second

    unfinished = path.with_name(f"{path.name}.new")
    try:
        with naming(path, "the sweep cannot be written"):
            with h5py.File(unfinished, "w", locking=False) as file:
                fill(file, sweep)
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def fill(file: "h5py.File", sweep: Sweep) -> None:
    """Dimension scales, units and the list of coordinates: what xarray needs to know."""
    file.attrs.update(sweep.attributes | {"settings": list(sweep.settings), "kind": "sweep"})
    repetitions = sweep.samples["seconds"].shape[1]
    scales = {
        "points/point": np.arange(sweep.size),
        "points/phase": np.array(sweep.phases, object),
        "samples/point": np.arange(sweep.size),
        "samples/repetition": np.arange(repetitions),
    }
    for name, values in scales.items():
        put(file, name, values).make_scale(name.split("/")[1])
    for name, values in sweep.points.items():
        dataset = put(file, f"points/{name}", values)
        dataset.dims[0].attach_scale(file["points/point"])
        if values.ndim == 2:
            dataset.dims[1].attach_scale(file["points/phase"])
        if name not in sweep.settings:
            dataset.attrs["coordinates"] = " ".join(sweep.settings)
    for name, values in sweep.samples.items():
        dataset = put(file, f"samples/{name}", values)
        dataset.dims[0].attach_scale(file["samples/point"])
        dataset.dims[1].attach_scale(file["samples/repetition"])


def put(file: "h5py.File", name: str, values: np.ndarray) -> "h5py.Dataset":
    import h5py

    texts = values.dtype == object
    dataset = file.create_dataset(name, data=values, dtype=h5py.string_dtype() if texts else None)
    if not texts:
        dataset.attrs["units"] = UNITS.get(name.split("/")[1], "1")
    return dataset


def read(path: Path) -> Sweep:
    """What `write` wrote; a file that is damaged or not a sweep is refused, and left as it is."""
    import h5py

    with naming(path, "the sweep cannot be read"), h5py.File(path, "r", locking=False) as file:
        if file.attrs.get("kind") != "sweep":
            raise UsageError(f"{path} is an HDF5 file, but not one of a sweep")
        if file.attrs["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has the layout {file.attrs['schema_version']}, this okrt knows {SCHEMA_VERSION}: "
                "use the okrt that wrote it, or another file"
            )
        attributes = dict(file.attrs)
        settings = tuple(attributes.pop("settings"))
        attributes.pop("kind")
        phases = tuple(file["points/phase"].asstr()[:])
        points = {name: values_of(data) for name, data in file["points"].items() if name not in ("point", "phase")}
        samples = {name: file["samples"][name][:] for name in SAMPLES}
    # In the order in which they were made, which HDF5 does not keep.
    ordered = (*settings, *COUNTS, *FIGURES, "phase_s", *TEXTS)
    return Sweep(attributes, settings, phases, {name: points[name] for name in ordered}, samples)


def values_of(dataset: "h5py.Dataset") -> np.ndarray:
    import h5py

    values: np.ndarray = dataset.asstr()[:] if h5py.check_string_dtype(dataset.dtype) else dataset[:]
    return values
