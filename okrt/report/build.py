"""From a file to its report: a sweep and a run each have their own."""

import errno
from pathlib import Path

from okrt.errors import UsageError
from okrt.report import run_file, run_page, sweep_file, sweep_page
from okrt.report.page import Report
from okrt.train.metrics import naming, open_live

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def report_of(path: Path) -> Report:
    """The report on a sweep.h5 or run.h5; a file that is neither is refused, one that is damaged is an OSError."""
    try:
        if kind_of(path) == "sweep":
            return sweep_page.report_on(sweep_file.read(path))
        return run_page.report_on(run_file.read(path))
    except (UsageError, OSError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # What is in there is of another kind or shape than either would write.
        why = " ".join(str(error).split())
        raise OSError(errno.EIO, f"the file is damaged: {why}", str(path)) from error


def kind_of(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(len(SIGNATURE))
    if not start:
        raise OSError(errno.EIO, "the file is empty", str(path))
    if start != SIGNATURE[: len(start)]:
        raise UsageError(f"{path} is not an HDF5 file: okrt report takes a sweep.h5 or a run.h5")
    with naming(path, "the file cannot be read"), open_live(path) as file:
        if file.attrs.get("kind") == "sweep":
            return "sweep"
        if all(name in file for name in ("steps/step", "ranks/step")):
            return "run"
    raise UsageError(f"{path} is an HDF5 file, but neither of a sweep nor of a run: okrt report takes these two")
