"""Which plots a sweep gets: over ranks if these vary, else over the first setting that does, else a row per reducer."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from okrt.report import plots
from okrt.report.comparison import Comparison
from okrt.report.grid import EXACT, MOST_PANELS, Grid, Setting, label
from okrt.report.lines import Lines, Quantity
from okrt.report.page import Picture
from okrt.report.plots import SHARE
from okrt.report.sweep_file import BASELINE

TITLES = {"lab": "network rate"}
LEAST, MOST = 2, 6
"""times k(P-1)/P words: no sparse allreduce of coordinates can do with less, Ok-Topk never receives more"""


def pictures(grid: Grid, comparison: Comparison) -> Iterator[Picture]:
    if not grid.done:
        return
    lines = Lines(grid)
    swept = [name for name in ("ranks", *grid.varied) if len(grid.values(name, grid.done)) > 1]
    for quantity in quantities(grid, comparison):
        if not np.isfinite(quantity.values[grid.done]).any():
            continue
        if quantity.name == "efficiency" and len(grid.values("ranks", with_value(grid, quantity))) < 2:
            continue
        figure, note = lines.over(swept[0], quantity) if swept else lines.rows(quantity)
        yield Picture(quantity.name, figure, quantity.title, f"{quantity.caption} {note}".strip())
    for name in swept[1:]:
        yield over_another(grid, comparison, lines, name)
    if np.isfinite(grid.sweep.points["phase_s"]).any():
        yield phases(grid)


def quantities(grid: Grid, comparison: Comparison) -> list[Quantity]:
    return [
        time(grid),
        efficiency(grid, comparison),
        speedup_over_dense(grid),
        speedup_over_best_other(grid, comparison),
        words(grid),
    ]


def with_value(grid: Grid, quantity: Quantity) -> list[int]:
    return [number for number in grid.done if np.isfinite(quantity.values[number])]


def without(grid: Grid, reducers: tuple[str, ...], values: np.ndarray) -> np.ndarray:
    """NaN for the points of these reducers."""
    return np.where([point["reducer"] in reducers for point in grid.points], np.nan, values)


def where_sent(grid: Grid, values: np.ndarray) -> np.ndarray:
    """NaN for allreduces on one rank: they would stretch the axis, and send nothing."""
    return values if grid.is_job else np.where(grid.sweep.points["ranks"] > 1, values, np.nan)


def left_out(grid: Grid) -> str:
    is_there = not grid.is_job and 1 in grid.values("ranks", grid.done)
    return " 1 rank, where nothing is sent, is left out." if is_there else ""


def time(grid: Grid) -> Quantity:
    columns = grid.sweep.points
    factor, unit = plots.time_unit(columns["median_s"][grid.done])
    model = np.where(columns["alpha_beta_s"] > 0, factor * columns["alpha_beta_s"], np.nan)
    caption = "Median time of a step on the slowest rank, with 95 % intervals."
    if np.isfinite(model[grid.done]).any():
        caption += (
            " The α-β model is what the network allows the algorithm: messages × latency + words × time per word of a "
            "ping-pong between two ranks, without any computing."
        )
    return Quantity(
        "time",
        "Time per step",
        f"{unit} per step",
        factor * columns["median_s"],
        caption,
        low=factor * columns["ci95_low_s"],
        high=factor * columns["ci95_high_s"],
        model=model if np.isfinite(model[grid.done]).any() else None,
    )


def efficiency(grid: Grid, comparison: Comparison) -> Quantity:
    base = label("ranks", comparison.base_ranks)
    what = "Samples" if grid.is_job else "Elements reduced"
    why = "" if grid.is_job else " (with one nothing is sent)" if 1 in grid.values("ranks") else ""
    return Quantity(
        "efficiency",
        f"Efficiency relative to {base}",
        f"% of {base}",
        100 * comparison.efficiency,
        f"{what} per second and rank. The base case, 100 %, is the same reducer with the same settings on {base}{why}.",
        guide=100,
        guide_text=f"as on {base}",
        is_linear=True,
    )


def speedup_over_dense(grid: Grid) -> Quantity:
    return Quantity(
        "speedup_over_dense",
        "Speed-up over dense",
        "times as fast as dense",
        without(grid, (BASELINE,), where_sent(grid, grid.sweep.points["speedup_over_dense"])),
        "Time of dense, the base case, divided by that of the reducer, all other settings alike. In the shaded part it "
        f"is slower than dense.{left_out(grid)}",
        guide=1,
        guide_text="slower than dense",
        is_loss_below=True,
    )


def speedup_over_best_other(grid: Grid, comparison: Comparison) -> Quantity:
    ratio, best = where_sent(grid, comparison.speedup_over_best_other), comparison.best_other
    note = left_out(grid)
    exact = [name for name in grid.reducers if name in EXACT]
    if exact and "density" in grid.varied:
        # Theirs is over the best at any density, which no panel or place of a density can show.
        ratio = without(grid, EXACT, ratio)
        note += f" Without a density, {' and '.join(exact)} can only be compared with."
    return Quantity(
        "speedup_over_best_other",
        "Speed-up over the best other",
        "times as fast as the best other",
        ratio,
        "Time of the fastest other reducer, all other settings alike, divided by that of this one: whoever is above 1 "
        f"is the fastest, and the base case, the runner-up, is named there.{note}",
        guide=1,
        is_loss_below=True,
        texts={n: f"over {grid.points[best[n]]['reducer']}" for n in grid.done if ratio[n] > 1},
    )


def words(grid: Grid) -> Quantity:
    columns = grid.sweep.points
    exact = [name for name in grid.reducers if name in EXACT]
    off = ""
    if exact:
        densities = grid.values("density")
        times = f" ({plots.short(2 / max(densities))}{SHARE} words/k or more)" if densities else ""
        off = f" {' and '.join(exact)} would be far off this chart with 2{SHARE} words per element{times}."
    return Quantity(
        "words",
        "Words received per k",
        "words/k, most of any step",
        without(grid, EXACT, np.where(columns["ranks"] > 1, columns["words_over_k_max"], np.nan)),
        f"The most that a rank received in a step, in words of 4 bytes per entry kept. The band is 2{SHARE} to "
        f"6{SHARE}: no sparse allreduce of coordinates can do with less than the one, and oktopk never receives more "
        f"than the other, control words aside.{off}",
        band=(LEAST, MOST),
    )


def over_another(grid: Grid, comparison: Comparison, lines: Lines, name: str) -> Picture:
    """Time and speed-up over a setting that is not that of the main plots."""
    shown = [replace(time(grid), model=None)]
    if np.isfinite(speedup_over_dense(grid).values[grid.done]).any():
        shown.append(speedup_over_dense(grid))
    title = f"Time{' and speed-up' if len(shown) > 1 else ''}, by {TITLES.get(name, name)}"
    figure, note = lines.side_by_side(name, shown, title)
    caption = f"Median time of a step on the slowest rank, with 95 % intervals. {note}"
    return Picture(f"over_{re.sub('[^A-Za-z0-9]+', '_', name)}", figure, title, caption.strip())


def phases(grid: Grid) -> Picture:
    """Shares as stacked bars; a panel for each number of ranks, or for what else varies at the most ranks."""
    columns, names = grid.sweep.points, grid.sweep.phases
    note = ""
    panels: list[Setting] = [{"ranks": ranks} for ranks in grid.values("ranks", grid.done)[-MOST_PANELS:]]
    if grid.varied:
        panels, note = grid.panels("reducer")
    reducers = [name for name in grid.reducers if grid.select(reducer=name)]
    rows, across = plots.arrange(len(panels))
    height = 0.3 + rows * (0.55 + 0.29 * len(reducers))
    figure, axes = plots.canvas(rows, across, height, sharex=True, sharey=True)
    for axis, panel in zip(axes, panels, strict=False):
        axis.grid(visible=False)
        for place, reducer in enumerate(reducers):
            for number in grid.select(**panel, reducer=reducer)[:1]:
                bar(axis, place, columns["phase_s"][number], plots.time_text(columns["median_s"][number]))
        axis.set_title(grid.title_of(panel, panels), fontsize=10, loc="left")
        axis.set_yticks(range(len(reducers)), reducers)
        axis.set_ylim(len(reducers) - 0.4, -0.6)
        axis.set_xlim(0, 100)
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    for axis in axes[len(panels) - across : len(panels)]:
        axis.set_xlabel("% of the step")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = [Patch(color=plots.PHASES[i % 4], label=name) for i, name in enumerate(names)]
    plots.finish(figure, "Where the time goes", grid.subtitle(panels), handles)
    caption = f"Share of {', '.join(names)} in a step, by medians; beside each bar the median time of a step. {note}"
    return Picture("phases", figure, "Where the time goes", caption.strip())


def bar(axis: Axes, place: int, phase_s: np.ndarray, text: str) -> None:
    total = np.nansum(phase_s)
    left = 0.0
    for i, part in enumerate(100 * np.nan_to_num(phase_s) / total if total > 0 else []):
        axis.barh(place, part, 0.72, left, color=plots.PHASES[i % 4], lw=0)
        if part >= 12:
            ink = "white" if i < 2 else plots.INK
            axis.text(left + part / 2, place, f"{part:.0f}", ha="center", va="center", fontsize=8, color=ink)
        left += part
    axis.text(101, place, text, va="center", fontsize=8.5, color=plots.FAINT)
