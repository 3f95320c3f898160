"""A figure of all points of a sweep: lines over a setting, in small multiples, or one row for each reducer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from okrt.report import plots
from okrt.report.grid import EXACT, Grid, Setting
from okrt.report.plots import FAINT, LOSS, SHARE, look
from okrt.report.scale import Scale

MODEL: dict[str, Any] = {"ls": (0, (1.5, 1.5)), "lw": 1.2}
BAND: dict[str, Any] = {"color": "#dcebdc", "lw": 0}


@dataclass(frozen=True)
class Quantity:
    """Something to plot: a value for each point, NaN where there is none."""

    name: str
    """of the files"""
    title: str
    unit: str
    values: np.ndarray
    caption: str
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    model: np.ndarray | None = None
    """what the values would be by arithmetic"""
    guide: float | None = None
    """a value to compare with"""
    guide_text: str = ""
    is_loss_below: bool = False
    """of the guide"""
    is_linear: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    """beside a point"""
    band: tuple[float, float] | None = None
    """times (P-1)/P"""

    def extent(self, numbers: Sequence[int], ranks: np.ndarray) -> np.ndarray:
        """All that must be on the chart."""
        parts = [
            column[list(numbers)] for column in (self.values, self.model, self.low, self.high) if column is not None
        ]
        if self.guide is not None:
            parts.append(np.array([self.guide]))
        if self.band:
            parts += [edge * share(ranks[list(numbers)]) for edge in self.band]
        return np.concatenate(parts)


def share(ranks: np.ndarray) -> np.ndarray:
    return (ranks - 1) / ranks


class Lines:
    """Draws quantities of one sweep."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.ranks = grid.sweep.points["ranks"].astype(float)
        self.reducers = [name for name in grid.reducers if grid.select(reducer=name)]

    def over(self, x: str, quantity: Quantity) -> tuple[Figure, str]:
        """Small multiples over x, and a note on what they leave out."""
        panels, note = self.grid.panels(x)
        rows, columns = plots.arrange(len(panels))
        figure, axes = plots.canvas(rows, columns, sharey=True)
        used = axes[: len(panels)]
        for axis, panel in zip(used, panels, strict=True):
            self._panel(axis, x, panel, quantity)
            axis.set_title(self.grid.title_of(panel, panels), fontsize=10, loc="left")
        for axis in used[::columns]:
            axis.set_ylabel(quantity.unit)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        shown = [n for panel in panels for n in self._shown(quantity, panel)]
        self._scale_y(used, quantity, shown)
        Scale(self.grid, x, shown).put_on(used, used[-columns:])
        handles = self._handles([quantity], shown)
        return plots.finish(
            figure, f"{quantity.title}, by {Scale(self.grid, x, shown).title}", self.grid.subtitle(panels), handles
        ), note

    def side_by_side(self, x: str, quantities: Sequence[Quantity], title: str) -> tuple[Figure, str]:
        """A column for each quantity, over x; a row for each of a few panels."""
        panels, note = self.grid.panels(x)
        if len(panels) > 3:
            panels = panels[-1:]
            note = (
                f"Shown at {', '.join(self.grid.label(*item) for item in panels[0].items())}; the table has the others."
            )
        count = len(quantities)
        figure, axes = plots.canvas(len(panels), count)
        for place, axis in enumerate(axes):
            panel, quantity = panels[place // count], quantities[place % count]
            self._panel(axis, x, panel, quantity)
            axis.set_ylabel(quantity.unit)
            if place % count == 0:
                axis.set_title(self.grid.title_of(panel, panels), fontsize=10, loc="left")
        shown = [n for panel in panels for n in self.grid.select(**panel)]
        for place, quantity in enumerate(quantities):
            self._scale_y(axes[place::count], quantity, shown)
        Scale(self.grid, x, shown).put_on(axes, axes[-count:])
        handles = self._handles(quantities, shown)
        return plots.finish(figure, title, self.grid.subtitle(panels), handles), note

    def rows(self, quantity: Quantity) -> tuple[Figure, str]:
        """Nothing varies but the reducer: a row for each."""
        shown = self._shown(quantity, {})
        figure, (axis,) = plots.canvas(height=0.9 + 0.34 * len(shown))
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color=plots.GRID, lw=0.8)
        extent = quantity.extent(shown, self.ranks)
        finite = extent[np.isfinite(extent) & (extent > 0)]
        if quantity.band:
            edges = [edge * share(self.ranks[shown[0]]) for edge in quantity.band]
            axis.axvspan(float(edges[0]), float(edges[1]), **BAND)
        if quantity.guide is not None:
            axis.axvline(quantity.guide, color=LOSS if quantity.is_loss_below else FAINT, lw=1)
        if quantity.is_loss_below and quantity.guide is not None:
            axis.axvspan(0, quantity.guide, color=LOSS, alpha=0.06, lw=0)
        for place, number in enumerate(shown):
            value, style = quantity.values[number], look(self.grid.points[number]["reducer"], self.grid.reducers)
            if quantity.low is not None and quantity.high is not None:
                axis.hlines(place, quantity.low[number], quantity.high[number], color=style["color"], lw=2)
            axis.plot(value, place, style["marker"], color=style["color"], ms=8)
            text = f"{plots.short(value)}  {quantity.texts.get(number, '')}"
            # Beyond the interval, so that it covers nothing.
            end = value if quantity.high is None else quantity.high[number]
            axis.annotate(text, (end, place), (9, 0), textcoords="offset points", va="center", fontsize=9, color=FAINT)
            if quantity.model is not None and np.isfinite(quantity.model[number]):
                axis.plot(quantity.model[number], place, "|", color=style["color"], ms=13, mew=1.6)
        axis.set_yticks(range(len(shown)), [self.grid.points[number]["reducer"] for number in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.set_xlabel(quantity.unit)
        if finite.size and finite.max() / finite.min() >= 4:
            axis.set_xscale("log")
            plots.log_ticks(axis.xaxis, finite.max() / finite.min())
            axis.set_xlim(finite.min() / 1.3, finite.max() * (finite.max() / finite.min()) ** 0.15 * 1.2)
        elif finite.size:
            axis.set_xlim(0, finite.max() * 1.25)
        handles = self._handles([quantity], [])
        if quantity.model is not None:
            handles = [plots.key("α-β model", color=FAINT, marker="|", ls="", ms=11, mew=1.6)]
        return plots.finish(figure, quantity.title, self.grid.subtitle(), handles), ""

    def _panel(self, axis: Axes, x: str, panel: Setting, quantity: Quantity) -> None:
        shown = self._shown(quantity, panel)
        scale = Scale(self.grid, x, self._shown(quantity, {}))
        if quantity.guide is not None:
            axis.axhline(quantity.guide, color=LOSS if quantity.is_loss_below else FAINT, lw=1, zorder=1.5)
        if quantity.is_loss_below and quantity.guide is not None:
            axis.axhspan(0, quantity.guide, color=LOSS, alpha=0.06, lw=0)
        if quantity.band and shown:
            ranks = np.unique(self.ranks[shown])
            across = ranks if x == "ranks" else np.array([min(scale.places), max(scale.places)])
            low, high = (edge * share(ranks) * np.ones(len(across)) for edge in quantity.band)
            axis.fill_between(across, low, high, zorder=0.5, **BAND)
        for reducer in self.reducers:
            mine = [n for n in shown if self.grid.points[n]["reducer"] == reducer]
            if x == "density" and reducer in EXACT:
                # It has none: a level line across all of them.
                self._line(axis, np.array(scale.places), mine[:1] * len(scale.places), quantity, reducer)
            elif mine:
                mine.sort(key=lambda n: scale.place(self.grid.points[n][x]))
                at = np.array([scale.place(self.grid.points[n][x]) for n in mine])
                self._line(axis, at, mine, quantity, reducer)

    def _line(self, axis: Axes, at: np.ndarray, numbers: list[int], quantity: Quantity, reducer: str) -> None:
        if not numbers:
            return
        y, style = quantity.values[numbers], look(reducer, self.grid.reducers)
        if quantity.model is not None:
            axis.plot(at, quantity.model[numbers], color=style["color"], alpha=0.75, zorder=1.8, **MODEL)
        if quantity.low is not None and quantity.high is not None:
            reach = np.maximum(0, [y - quantity.low[numbers], quantity.high[numbers] - y])
            axis.errorbar(at, y, reach, fmt="none", ecolor=style["color"], elinewidth=1.2, capsize=2.5, zorder=2.2)
        axis.plot(at, y, **style, ms=6, lw=1.7, mec="white", mew=0.6, zorder=2.5)
        for place, number in zip(at, numbers, strict=True):
            if text := quantity.texts.get(number):
                side = "left" if place == at[0] < at[-1] else "right" if place == at[-1] > at[0] else "center"
                spot: dict[str, Any] = {
                    "xy": (place, quantity.values[number]),
                    "xytext": (0, 8),
                    "textcoords": "offset points",
                }
                axis.annotate(text, **spot, ha=side, fontsize=8, color=FAINT)

    def _shown(self, quantity: Quantity, panel: Setting) -> list[int]:
        return [number for number in self.grid.select(**panel) if np.isfinite(quantity.values[number])]

    def _handles(self, quantities: Sequence[Quantity], shown: Sequence[int]) -> list[Any]:
        there = {self.grid.points[n]["reducer"] for n in shown if any(np.isfinite(q.values[n]) for q in quantities)}
        handles: list[Any] = [plots.key(r, **look(r, self.grid.reducers)) for r in self.reducers if r in there]
        if any(quantity.model is not None for quantity in quantities):
            handles.append(plots.key("α-β model", color=FAINT, **MODEL))
        if any(quantity.band for quantity in quantities):
            handles.append(Patch(label=f"2{SHARE} … 6{SHARE}", **BAND))
        return handles

    def _scale_y(self, axes: Sequence[Axes], quantity: Quantity, shown: Sequence[int]) -> None:
        plots.scale_y(axes, quantity.extent(shown, self.ranks), quantity.is_linear)
        if quantity.guide is None or not quantity.guide_text:
            return
        for axis in axes:
            # At the foot of what is lost, where the fewest lines are, or else on the line itself.
            spot = (0.01, 0.02 if quantity.is_loss_below else quantity.guide)
            across = "axes fraction" if quantity.is_loss_below else ("axes fraction", "data")
            style: dict[str, Any] = {"xycoords": across, "textcoords": "offset points", "va": "bottom", "fontsize": 8}
            axis.annotate(quantity.guide_text, spot, (0, 2), color=LOSS if quantity.is_loss_below else FAINT, **style)
