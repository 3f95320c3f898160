"""The report as a folder: a page that holds all it shows, its pictures, and a table for other programs."""

import base64
import csv
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from okrt.report import plots

PAGE, SUMMARY = "report.html", "summary.csv"


@dataclass(frozen=True)
class Picture:
    name: str
    """of its files"""
    figure: Figure
    title: str
    caption: str


@dataclass(frozen=True)
class Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[bool] = ()
    """rows that deserve a look"""
    texts: int = 1
    """columns from the left that are not numbers"""


@dataclass
class Report:
    """All that is to be said; plain text throughout."""

    title: str
    lead: list[str]
    """what was measured, and how far it is"""
    headlines: list[str]
    """results"""
    losses: list[str]
    """where a scheme loses to dense"""
    warnings: list[str]
    facts: list[tuple[str, str]]
    """where the file comes from"""
    summary: list[Sequence[Any]]
    """rows of summary.csv, the headings first"""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    losses_title: str = "Slower than dense"


def write(report: Report, folder: Path) -> list[Path]:
    """Puts the report into the folder, which is made if need be; either all of it or nothing. Other files stay."""
    files = rendered(report)
    check(folder, files)
    # In the folder itself if there is one: renaming works within a file system only.
    place = folder if folder.is_dir() else folder.parent
    unfinished = Path(tempfile.mkdtemp(prefix=".report.", suffix=".new", dir=place))
    try:
        for name, content in files.items():
            with (unfinished / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        unfinished.chmod(0o777 & ~umask())
        if not folder.is_dir():
            unfinished.rename(folder)
        else:
            # The page last: once it is new, so are its pictures.
            for name in files:
                (unfinished / name).replace(folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return [folder / name for name in files]


def check(folder: Path, files: Iterable[str]) -> None:
    """What can be seen to go wrong before anything is written."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: --out takes a folder")
    if not folder.is_dir() and not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder} cannot be made: there is no folder {folder.parent}")
    for name in files:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a folder, and in the way of the report")


def umask() -> int:
    """Of this process; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def rendered(report: Report) -> dict[str, bytes]:
    """The files by name, the page last."""
    files = {}
    shown = []
    with plots.styled():
        for picture in report.pictures:
            svg = plots.saved(picture.figure, "svg")
            files[f"{picture.name}.png"] = plots.saved(picture.figure, "png")
            files[f"{picture.name}.svg"] = svg
            data = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
            shown.append({"title": picture.title, "caption": picture.caption, "data": data})
    files[SUMMARY] = csv_of(report.summary).encode()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(report=report, pictures=shown)
    files[PAGE] = page.encode()
    return files


def csv_of(rows: Iterable[Sequence[Any]]) -> str:
    """Numbers with all their digits; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if value is None or value != value else value for value in row])
    return text.getvalue()
