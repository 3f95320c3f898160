"""The report as files: a page that holds all it shows, the same for the same input, all of it or nothing."""

import os
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from okrt.report import page, plots
from okrt.report.page import Report
from okrt.report.sweep_page import report_on
from tests.report import examples

NASTY = "<script>alert('1')</script> & \"$\\frac{$ 数"


@pytest.fixture(scope="module")
def nasty() -> Report:
    """A sweep whose texts would break a page that trusts them."""
    made = examples.sweep(ranks=[4], reducer=["dense", "oktopk"], title=NASTY, job=NASTY, **{NASTY: [NASTY, "b"]})
    made.fail(1, NASTY, NASTY, "")
    made.attributes["command"] = NASTY
    return report_on(made)


@pytest.fixture(scope="module")
def files(nasty: Report) -> dict[str, bytes]:
    return page.rendered(nasty)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else(files: dict[str, bytes]) -> None:
    html = files["report.html"].decode()
    reader = Links()
    reader.feed(html)
    assert "script" not in {tag for tag, _, _ in reader.found} and NASTY in reader.text
    sources = [value for _, name, value in reader.found if name in ("src", "href", "srcset", "data", "style")]
    assert len(sources) == len([name for name in files if name.endswith(".svg")]) >= 5
    assert all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style and "//" not in style


def test_pictures_are_sharp_and_not_empty(files: dict[str, bytes]) -> None:
    names = [name for name in files if name.endswith(".png")]
    assert len(names) >= 5
    for name in names:
        width, height = struct.unpack(">II", files[name][16:24])
        assert width == 1350 and 150 < height < 2000
        parts = re.findall(rb"IDAT(.*?)....IEND", files[name], re.DOTALL)
        assert parts and len(files[name]) > 8000, name
        svg = ElementTree.fromstring(files[name.replace(".png", ".svg")])
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 20
        assert not list(svg.iter("{http://www.w3.org/2000/svg}image"))


def test_the_same_input_gives_the_same_bytes(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    again, once_more = (page.rendered(report_on(examples.sweep(ranks=[4], reducer=["oktopk"]))) for _ in range(2))
    assert again == once_more
    assert again["time.svg"] != files["time.svg"]


def one_picture(text: str = "") -> Report:
    with plots.styled():
        figure, (axis,) = plots.canvas(height=2)
        axis.plot([1, 2], [3, 4])
        plots.finish(figure, "title", text)
    picture = page.Picture("time", figure, "title", "caption")
    return Report("title", [text], [], [], [], [], [("a", "b"), (1, float("nan"))], [picture])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


NAMES = ["report.html", "summary.csv", "time.png", "time.svg"]


def test_a_new_folder(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        written = page.write(one_picture(), tmp_path / "out")
    finally:
        os.umask(old)
    assert names_in(tmp_path) == ["out"] and names_in(tmp_path / "out") == NAMES
    assert sorted(path.name for path in written) == NAMES
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out/summary.csv").read_text() == "a,b\n1,\n"


def test_an_earlier_report_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    page.write(one_picture("first"), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    page.write(one_picture("second"), tmp_path)
    assert names_in(tmp_path) == sorted([*NAMES, "notes.txt", "sub"])
    assert (tmp_path / "notes.txt").read_text() == "mine"
    html = (tmp_path / "report.html").read_text()
    assert "second" in html and "first" not in html


def test_a_failure_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write(one_picture("first"), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    made = one_picture("second")
    full = OSError(28, "No space left on device")
    calls: list[int] = []

    def fail_at_the_third(number: int) -> None:
        calls.append(number)
        if len(calls) % 3 == 0:
            raise full

    monkeypatch.setattr(os, "fsync", fail_at_the_third)
    for folder in ("out", "new"):
        with pytest.raises(OSError, match="No space"):
            page.write(made, tmp_path / folder)
    assert names_in(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_in_the_way_of_a_picture(tmp_path: Path) -> None:
    (tmp_path / "time.png").mkdir()
    with pytest.raises(IsADirectoryError, match=r"time\.png"):
        page.write(one_picture(), tmp_path)
    assert names_in(tmp_path) == ["time.png"]


@pytest.mark.parametrize(
    ("values", "scale", "top"), [([1, 2, 3.9], "linear", 3.9), ([1, 4], "log", 4), ([2, np.nan], "linear", 2)]
)
def test_axes_are_logarithmic_where_that_helps(values: list[Any], scale: str, top: float) -> None:
    _, axes = plots.canvas()
    plots.scale_y(axes, np.array(values))
    assert axes[0].get_yscale() == scale and axes[0].get_ylim()[1] > top


def test_no_label_covers_another(nasty: Report) -> None:
    """Ticks, titles and legends of the plots that have most of them."""
    crowded = examples.sweep(
        ranks=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], reducer=[*examples.ALL, "a", "b", "c", "d", "e"]
    )
    wanted = ("time", "words", "phases")
    shown = [picture for picture in report_on(crowded).pictures if picture.name in wanted] + nasty.pictures[:1]
    assert len(shown) == 4
    for picture in shown:
        with plots.styled():
            picture.figure.draw_without_rendering()
        boxes = []
        for axis in picture.figure.axes:
            for line in (axis.xaxis, axis.yaxis):
                low, high = sorted(line.get_view_interval())
                ticks = [tick for tick in line.get_major_ticks() if low <= tick.get_loc() <= high]
                boxes += [tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()]
        boxes += [text.get_window_extent() for text in picture.figure.texts]
        boxes += [legend.get_window_extent() for legend in picture.figure.legends]
        boxes += [axis.title.get_window_extent() for axis in picture.figure.axes]
        seen = [box.padded(-1) for box in boxes if box.width > 2]
        for i, box in enumerate(seen):
            assert not any(box.overlaps(other) for other in seen[i + 1 :]), picture.name
