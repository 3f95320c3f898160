"""The metrics file `run.h5`: written by rank 0, readable while the job runs and after it was killed.

It is HDF5 in SWMR mode: a run that is going on or was killed opens with `h5py.File(path, "r", swmr=True)` or
`xarray.open_dataset(path, group="steps", engine="h5netcdf", driver_kwds={"swmr": True})`, one that has ended without
these options too.
"""

import ctypes
import errno
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import okrt

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

SCHEMA_VERSION = 1
UNITS = {
    "steps/step": "1",
    "steps/loss": "1",
    "steps/eval_loss": "1",
    "steps/lr": "1",
    "steps/samples": "1",
    "steps/step_s": "s",
    "steps/compute_s": "s",
    "steps/comm_s": "s",
    "steps/bytes_received": "bytes",
    "steps/words_over_k": "words/k",
    "ranks/step": "1",
    "ranks/step_s": "s",
    "ranks/comm_s": "s",
    "ranks/idle_s": "s",
    "ranks/selected": "1",
    "ranks/bytes_received": "bytes",
}
SCALES = ("steps/step", "ranks/step")
COLUMNS = tuple(name for name in UNITS if name not in SCALES)
INTEGERS = {"step", "samples", "selected", "bytes_received"}
MISSING = -1
"""stands for NaN in columns of integers; xarray shows it as NaN"""
BLOCK_ROWS = 50
BLOCK_S = 1.0
CHUNK_ROWS = 1024
CHUNK_ELEMENTS = 16384
READ_ATTEMPTS = 27
"""after each the wait doubles, from 1 ns: a tenth of a second in all"""
PACKAGES = ("h5py", "mpi4py", "numba", "numpy", "safetensors", "torch")

Columns = dict[str, np.ndarray]


class Metrics:
    """Writes one row a step, in blocks of up to 50 rows or one second.

    A new file replaces what is at `path` as soon as it can be read. Rows of steps below `keep_below` are carried over:
    ranks that the old file does not have get NaN (MISSING in columns of integers), ranks that are no more are left out.
    """

    def __init__(self, path: Path, ranks: int, attributes: Mapping[str, Any], keep_below: int = 0) -> None:
        import h5py  # here: most commands and ranks do without it, and it takes a quarter of a second

        self._path = path
        self._written = self._waiting = 0
        self._flushed_at = time.monotonic()
        self._block: Columns = {name: np.empty(shape_of(name, BLOCK_ROWS, ranks), dtype_of(name)) for name in UNITS}
        carried = {name: rows[:0] for name, rows in self._block.items()}
        if keep_below > 0 and path.exists():
            with naming(path, "metrics cannot be carried over (without this file the run resumes with new ones)"):
                carried = rows_below(keep_below, ranks, read_columns(path, UNITS))
        unfinished = path.with_name(f"{path.name}.new")
        try:
            with naming(path, "metrics cannot be written"):
                # No locks: SWMR readers need none, and some parallel file systems have none.
                self._file = h5py.File(unfinished, "w", libver=("v110", "v110"), locking=False)
            with self._writing():
                self._datasets = create_datasets(self._file, ranks)
                self._file.attrs.update(attributes)
                # A writer killed before SWMR leaves a file that does not open, so the file gets its name afterwards.
                self._file.swmr_mode = True
                self._append(carried)
                os.fsync(self._file.id.get_vfd_handle())
                os.replace(unfinished, path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def write(self, step: Mapping[str, float], ranks: Mapping[str, np.ndarray]) -> None:
        """One row: a value for every column of `steps`, an array with one element per rank for every one of `ranks`."""
        for name, rows in self._block.items():
            group, column = name.split("/")
            rows[self._waiting] = ranks[column] if group == "ranks" and column != "step" else step[column]
        self._waiting += 1
        if self._waiting == BLOCK_ROWS or time.monotonic() - self._flushed_at >= BLOCK_S:
            self.flush()

    def flush(self) -> None:
        """From here on readers see every row, whatever becomes of this process."""
        if self._waiting:
            with self._writing():
                self._append({name: rows[: self._waiting] for name, rows in self._block.items()})
        self._waiting = 0
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Writes what is left; from here on the file opens without SWMR too."""
        if self._file:
            self.flush()
            with self._writing():
                self._file.close()

    def _append(self, columns: Columns) -> None:
        """The scales come last: as many rows as `step` has are complete in all columns."""
        for names in (COLUMNS, SCALES):
            for name in names:
                self._datasets[name].resize(self._written + len(columns[name]), axis=0)
                self._datasets[name][self._written :] = columns[name]
            self._file.flush()
        self._written += len(columns["steps/step"])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A failure closes the file and leaves what is on disk as it is."""
        try:
            with naming(self._path, "metrics cannot be written"):
                yield
        except Exception:
            # HDF5 crashes when the process ends if it cannot write what it still holds: let it write to memory.
            memory = os.memfd_create("metrics")
            os.dup2(memory, self._file.id.get_vfd_handle())
            os.close(memory)
            self._file.close()
            raise


def shape_of(name: str, rows: int, ranks: int) -> tuple[int, ...]:
    return (rows, ranks) if name.startswith("ranks/") and name not in SCALES else (rows,)


def dtype_of(name: str) -> type:
    return np.int64 if name.split("/")[1] in INTEGERS else np.float64


def missing_of(name: str) -> float:
    return MISSING if dtype_of(name) is np.int64 else np.nan


def create_datasets(file: "h5py.File", ranks: int) -> "dict[str, h5py.Dataset]":
    """All columns, without rows; made before SWMR starts, for then it is too late."""
    rank = file.create_dataset("ranks/rank", data=np.arange(ranks))
    rank.attrs["units"] = "1"
    rank.make_scale("rank")
    datasets = {}
    for name in SCALES + COLUMNS:
        shape = shape_of(name, 0, ranks)
        chunk_rows = max(1, min(CHUNK_ROWS, CHUNK_ELEMENTS // ranks)) if len(shape) == 2 else CHUNK_ROWS
        column = datasets[name] = file.create_dataset(
            name,
            shape,
            dtype_of(name),
            maxshape=(None, *shape[1:]),
            chunks=(chunk_rows, *shape[1:]),
            fillvalue=missing_of(name),
        )
        column.attrs["units"] = UNITS[name]
        if name in SCALES:
            column.make_scale("step")
            continue
        column.dims[0].attach_scale(datasets[f"{name.split('/')[0]}/step"])
        if len(shape) == 2:
            column.dims[1].attach_scale(rank)
            if dtype_of(name) is np.int64:
                column.attrs["_FillValue"] = np.int64(MISSING)
    return datasets


def open_live(path: Path) -> "h5py.File":
    """For reading, while it is written or not; a damaged file is an OSError."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, False)
    # Of a checksum that is wrong HDF5 hopes that the writer will soon put it right: it waits, twice as long each time,
    # and never ends if nobody does. h5py has no name for the setting.
    hdf5 = ctypes.CDLL(h5py.h5p.__file__)
    hdf5.H5Pset_metadata_read_attempts(ctypes.c_int64(access.id), ctypes.c_uint(READ_ATTEMPTS))
    # A file that was closed needs no patience, and its damage shows at once.
    live = h5py.h5f.ACC_SWMR_READ if is_marked_open(path) else 0
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY | live, access))


def is_marked_open(path: Path) -> bool:
    """A writer is at work, or was killed: flags in the first bytes of the file, from version 3 of these on."""
    with path.open("rb") as file:
        start = file.read(12)
    return len(start) == 12 and start[8] >= 3 and start[11] != 0


def read_columns(path: Path, names: Iterable[str]) -> Columns:
    """The rows that are complete, of a file that is being written or not."""
    with open_live(path) as file:
        # Of a row that a full disk kept out the scale may be there, but not the step.
        rows = min(np.count_nonzero(file[scale][:] != MISSING) for scale in SCALES)
        return {name: file[name][:rows] for name in names}


def rows_below(step: int, ranks: int, columns: Columns) -> Columns:
    """The rows of earlier steps, for this number of ranks."""
    earlier = np.flatnonzero(columns["steps/step"] < step)
    kept: Columns = {}
    for name, old in columns.items():
        kept[name] = np.full(shape_of(name, len(earlier), ranks), missing_of(name), dtype_of(name))
        if old.ndim == 2:
            kept[name][:, : old.shape[1]] = old[earlier, :ranks]
        else:
            kept[name][:] = old[earlier]
    return kept


@contextmanager
def naming(path: Path, trouble: str) -> Iterator[None]:
    """What HDF5 or the system says becomes an OSError of one line with the trouble, the reason and the path."""
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        inner = re.search(r"errno = (\d+)", str(error))
        code = int(inner[1]) if inner else getattr(error, "errno", None)
        reason = os.strerror(code) if code else " ".join(str(error).split())
        raise OSError(code or errno.EIO, f"{trouble}: {reason}", str(path)) from error


def read_steps(path: Path) -> dict[str, np.ndarray]:
    """The columns of the `steps` group of a run that is going on, has ended, or was killed."""
    with naming(path, "metrics cannot be read"):
        columns = read_columns(path, [name for name in UNITS if name.startswith("steps/")])
    return {name.removeprefix("steps/"): values for name, values in columns.items()}


def run_attributes(
    command: str | Sequence[str], config: Mapping[str, Any], seed: int, hostnames: Sequence[str]
) -> dict[str, Any]:
    """What a metrics file says about its run: code, command, settings, hosts and libraries."""
    from okrt.transport.mpi import library_name

    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "schema_version": SCHEMA_VERSION,
        "okrt_version": okrt.__version__,
        "git_sha": git_sha(Path(okrt.__file__)),
        "command": command if isinstance(command, str) else shlex.join(command),
        "config": json.dumps(config, default=str),
        "seed": seed,
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hostnames": list(hostnames),
        "mpi_library": library_name(),
        "packages": json.dumps({"python": platform.python_version(), **versions}),
    }


def git_sha(file: Path) -> str:
    """The commit that is checked out where the file is; empty if that commit does not have the file."""
    command = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.split()[0] if found.returncode == 0 else ""
