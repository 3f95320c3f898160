"""The look of all plots: colours that mean the same everywhere, axes with sensible ticks, files that compare."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

INK, FAINT, GRID, LOSS = "#333333", "#777777", "#e6e6e6", "#b3261e"
NOTHING = "–"  # noqa: RUF001
SHARE = "(P−1)/P"  # noqa: RUF001
WIDTH = 9.0
LEFT = 0.012
DPI = 150
# Of Okabe and Ito, told apart by the colour-blind too; what they do not name follows in dashes.
LOOKS = {
    "dense": ("#0072B2", "s"),
    "oktopk": ("#D55E00", "o"),
    "topka": ("#009E73", "^"),
    "topkdsa": ("#CC79A7", "v"),
    "gtopk": ("#E69F00", "D"),
    "gaussiank": ("#56B4E9", "P"),
    "gloo": ("#555555", "X"),
    "cgx": ("#7A4B2A", "<"),
}
MORE_COLOURS = ("#6A3D9A", "#1B7837", "#8C2D04", "#01665E", "#AA4499", "#332288")
MORE_MARKERS = (">", "p", "h", "*", "d", "8")
PHASES = ("#17405c", "#4f93a3", "#a8d0c0", "#dddddd")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    # A setting or title may hold a dollar sign.
    "text.parse_math": False,
    # The same file for the same figures.
    "svg.hashsalt": "okrt",
}


def look(reducer: str, reducers: Sequence[str]) -> dict[str, Any]:
    """Line and marker of a reducer; the same in every plot."""
    if reducer in LOOKS:
        colour, marker = LOOKS[reducer]
        return {"color": colour, "marker": marker, "ls": "-"}
    at = [name for name in reducers if name not in LOOKS].index(reducer)
    return {
        "color": MORE_COLOURS[at % len(MORE_COLOURS)],
        "marker": MORE_MARKERS[at % len(MORE_MARKERS)],
        "ls": (0, (6, 1.5)),
    }


@contextmanager
def styled() -> Iterator[None]:
    """Figures are made and saved in here."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A title in a script that the font does not have shows boxes: no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def saved(figure: Figure, kind: str) -> bytes:
    """The figure as "png" or "svg", without the time or the maker."""
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        # Once is enough for both kinds, and takes longer than drawing.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    file = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
    return file.getvalue()


def canvas(rows: int = 1, columns: int = 1, height: float | None = None, **share: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, of this height in inches without what `finish` puts above them."""
    tall = height or {1: 3.7, 2: 3.2, 3: 2.8}[columns] * (1 if rows == 1 else 0.85 * rows)
    figure = Figure(figsize=(WIDTH, tall))
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for axis in axes:
        axis.grid(axis="y", color=GRID, lw=0.8)
        axis.tick_params(length=3)
    return figure, axes


def finish(figure: Figure, title: str, subtitle: str, handles: Sequence[Any] = (), most: int = 8) -> Figure:
    """Title, what is alike throughout, and the legend, in lines above the panels, where they cover nothing."""
    lines = math.ceil(len(handles) / most)
    above = 0.38 + 0.27 * bool(subtitle) + 0.25 * lines
    panels = figure.get_size_inches()[1]
    tall = panels + above
    figure.set_size_inches(WIDTH, tall)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, rect=(0, 0, 1, panels / tall)))
    figure.text(LEFT, 1 - 0.08 / tall, title, va="top", fontsize=13, fontweight="bold")
    figure.text(LEFT, 1 - 0.37 / tall, subtitle, va="top", fontsize=9.5, color=FAINT)
    if handles:
        figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(LEFT, 1 - (above - 0.25 * lines - 0.03) / tall),
            ncols=math.ceil(len(handles) / lines),
            fontsize=9.5,
            handlelength=1.8,
            columnspacing=1.4,
            labelspacing=0.35,
            borderaxespad=0,
            borderpad=0,
        )
    return figure


def arrange(count: int) -> tuple[int, int]:
    """Rows and columns of that many panels."""
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(count, 3)
    return math.ceil(count / columns), columns


def key(text: str, **line: Any) -> Line2D:
    return Line2D([], [], label=text, **line)


def time_unit(seconds: np.ndarray) -> tuple[float, str]:
    """Factor and name of the unit in which these are read best."""
    finite = seconds[np.isfinite(seconds) & (seconds > 0)]
    typical = float(np.median(finite)) if finite.size else 1.0
    if typical < 1e-3:
        return 1e6, "µs"
    return (1e3, "ms") if typical < 10 else (1.0, "s")


def scale_y(axes: Sequence[Axes], values: np.ndarray, is_linear: bool = False) -> None:
    """Logarithmic where values differ by a factor of four or more, else linear from 0."""
    finite = values[np.isfinite(values) & (values > 0)]
    wide = not is_linear and finite.size > 1 and finite.max() / finite.min() >= 4
    for axis in axes:
        if wide:
            axis.set_yscale("log")
            log_ticks(axis.yaxis, finite.max() / finite.min())
            axis.set_ylim(finite.min() / 1.3, finite.max() * 1.3)
        elif finite.size:
            axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
            axis.set_ylim(0, finite.max() * 1.12)


def log_ticks(axis: Any, ratio: float) -> None:
    """Few enough to read, many enough to compare."""
    subs = (1.0, 2.0, 5.0) if ratio < 300 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def scale_x(axes: Sequence[Axes], places: Sequence[float], labels: Sequence[str], is_log: bool) -> None:
    """Ticks at the places that were measured, as many as there is room for."""
    room = max(2, 9 if len(axes) == 1 else 6)
    step = math.ceil(len(places) / room)
    shown = [i for i in range(len(places)) if (len(places) - 1 - i) % step == 0]
    for axis in axes:
        if is_log:
            axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator([places[i] for i in shown]))
        axis.xaxis.set_minor_locator(NullLocator())
        texts = {round(float(places[i]), 12): labels[i] for i in shown}
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _, t=texts: t.get(round(float(value), 12), "")))
        low, high = min(places), max(places)
        if low == high:
            axis.set_xlim(low - 1, low + 1)
        elif is_log:
            margin = (high / low) ** 0.05
            axis.set_xlim(low / margin, high * margin)
        else:
            axis.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def short(figure: float, digits: int = 3) -> str:
    """Three digits, and no exponent."""
    if not np.isfinite(figure):
        return NOTHING
    return np.format_float_positional(figure, digits, unique=False, fractional=False, trim="-")


def time_text(seconds: float) -> str:
    factor, unit = time_unit(np.array([seconds]))
    return f"{short(factor * seconds)} {unit}"
