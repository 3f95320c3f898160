"""The plots of a run."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from okrt.report import plots
from okrt.report.page import Picture
from okrt.report.plots import FAINT, INK, SHARE
from okrt.report.run_file import Run

MOST_POINTS = 800
"""of a line: more than there are pixels is only weight"""
TICK_STEPS = [1, 2, 2.5, 5, 10]
COLOUR, HELD_OUT = "#D55E00", "#0072B2"
PARTS = ("computes", "computes, with communication behind it", "waits for communication", "waits for the slowest rank")
PART_COLOURS = ("#17405c", "#4f93a3", "#e69f00", "#dddddd")


def pictures(run: Run, subtitle: str) -> Iterator[Picture]:
    if run.rows == 0:
        return
    yield loss(run, subtitle)
    yield selected(run, subtitle)
    if (~run.is_exact & (run.steps["words_over_k"] > 0)).any():
        yield words(run, subtitle)
    yield breakdown(run, subtitle)
    yield learning_rate(run, subtitle)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of neighbours where there are more points than can be seen."""
    each = -(-len(x) // MOST_POINTS)
    starts = np.arange(0, len(x), each)
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x.astype(float), starts) / counts, np.add.reduceat(y.astype(float), starts) / counts


def line(axis: Axes, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """A single point is seen too."""
    keep = np.isfinite(y)
    if keep.any():
        axis.plot(*thinned(x[keep], y[keep]), **{"marker": "o" if keep.sum() == 1 else "", "ms": 5} | style)


def loss(run: Run, subtitle: str) -> Picture:
    steps = run.steps
    seconds = np.cumsum(steps["step_s"])
    factor, unit = (1, "seconds") if seconds[-1] < 300 else (60, "minutes") if seconds[-1] < 18000 else (3600, "hours")
    received = np.cumsum(steps["bytes_received"])
    size, size_unit = (1e6, "MB") if received[-1] < 3e9 else (1e9, "GB")
    across = {"steps": steps["step"], unit: seconds / factor}
    if received[-1] > 0:
        across[f"{size_unit} received by a rank"] = received / size
    figure, axes = plots.canvas(1, len(across), height=3.2, sharey=True)
    held = np.isfinite(steps["eval_loss"])
    for axis, (title, x) in zip(axes, across.items(), strict=True):
        line(axis, x, steps["loss"], color=COLOUR, lw=1.1, alpha=0.75)
        if held.any():
            axis.plot(x[held], steps["eval_loss"][held], "-o", color=HELD_OUT, lw=1.6, ms=3.5, mec="white", mew=0.4)
        axis.set_xlabel(title)
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS))
        axis.set_xlim(0, 1.03 * x[-1])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes[0].set_ylabel("loss")
    handles = [plots.key("training", color=COLOUR, lw=1.5)]
    if held.any():
        handles.append(plots.key("held out", color=HELD_OUT, marker="o", ms=4))
    plots.finish(figure, "Loss over steps, time and bytes", subtitle, handles)
    caption = (
        "The training loss is the mean over ranks of each step's samples. Time is that of the slowest rank, added up, "
        "without evaluations and checkpoints; bytes are those of the rank that received most."
    )
    return Picture("loss", figure, "Loss over steps, time and bytes", caption)


def selected(run: Run, subtitle: str) -> Picture:
    """Relative to k, or as counts with their median where the file does not tell k."""
    entries = run.ranks["selected"]
    shown = ~run.is_exact if (~run.is_exact).any() else np.ones(run.rows, bool)
    step, entries, k = run.steps["step"][shown], entries[shown], run.k[shown]
    figure, (axis,) = plots.canvas(height=2.8)
    is_relative = bool(np.isfinite(k).any()) and (~run.is_exact).any()
    values = entries / k[:, None] if is_relative else entries
    mean = np.nanmean(values, axis=1)
    if run.size > 1 and len(step) > 1:
        low, high = np.nanmin(values, axis=1), np.nanmax(values, axis=1)
        x, lows = thinned(step, low)
        axis.fill_between(x, lows, thinned(step, high)[1], color=COLOUR, alpha=0.2, lw=0)
    line(axis, step, mean, color=COLOUR, lw=1.3)
    middle = 1.0 if is_relative else float(np.nanmedian(entries))
    axis.axhline(middle, color=FAINT, lw=1)
    over_steps(axis, step)
    axis.set_ylabel("selected/k" if is_relative else "entries selected")
    top = max(float(np.nanmax(values)), middle)
    axis.set_ylim(0, 1.15 * top if top > 0 else 1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    handles: list[Any] = [plots.key("mean of the ranks", color=COLOUR)]
    if run.size > 1:
        handles.append(Patch(color=COLOUR, alpha=0.2, lw=0, label="fewest to most of any rank"))
    handles.append(plots.key("selected = k" if is_relative else f"median {middle:,.0f}", color=FAINT, lw=1))
    title = "Entries selected, per k" if is_relative else "Entries selected"
    plots.finish(figure, title, subtitle, handles)
    caption = "Entries that a rank took part with in each step."
    if is_relative:
        caption += (
            f" k is about {np.nanmedian(k):,.0f}: the file does not hold it, it follows from bytes and "
            "words/k, a little high because of control messages."
        )
    else:
        caption += " The file does not tell k, so these are counts, with their median marked."
    return Picture("selected", figure, title, f"{caption}{exact_note(run)}")


def words(run: Run, subtitle: str) -> Picture:
    shown = ~run.is_exact
    step, values = run.steps["step"][shown], run.steps["words_over_k"][shown]
    figure, (axis,) = plots.canvas(height=2.8)
    line(axis, step, values, color=COLOUR, lw=1.3)
    handles: list[Any] = [plots.key("most of any rank", color=COLOUR)]
    top, caption = values.max(), "Words of 4 bytes per entry kept, of the rank that received most."
    if run.reducer == "oktopk":
        edges = [times * (run.size - 1) / run.size for times in (2, 6)]
        axis.axhspan(edges[0], edges[1], color="#dcebdc", lw=0, zorder=0.5)
        handles.append(Patch(color="#dcebdc", label=f"2{SHARE} … 6{SHARE}: {edges[0]:.3g} … {edges[1]:.3g}"))
        top = max(top, edges[1])
        caption += f" oktopk never receives more than 6{SHARE}, control words aside."
    over_steps(axis, step)
    axis.set_ylabel("words/k")
    axis.set_ylim(0, 1.15 * top)
    plots.finish(figure, "Words received, per k", subtitle, handles)
    return Picture("words", figure, "Words received, per k", f"{caption}{exact_note(run)}")


def breakdown_s(run: Run) -> np.ndarray:
    """Seconds of a step by rank and part (PARTS): means over all steps but the first, in which much is made ready."""
    first = 1 if run.rows > 1 else 0
    step_s, comm_s, idle_s = (run.ranks[name][first:] for name in ("step_s", "comm_s", "idle_s"))
    hidden = np.clip(comm_s - idle_s, 0, step_s - idle_s)
    parts = (step_s - idle_s - hidden, hidden, idle_s, run.steps["step_s"][first:, None] - step_s)
    return np.stack([np.nanmean(part, axis=0) for part in parts], axis=1)


def breakdown(run: Run, subtitle: str) -> Picture:
    seconds = breakdown_s(run)
    factor, unit = plots.time_unit(seconds.sum(axis=1))
    is_many = run.size > 16
    figure, (axis,) = plots.canvas(height=3.0 if is_many else 0.8 + 0.33 * run.size)
    before = np.zeros(run.size)
    for part in range(len(PARTS)):
        width = factor * np.maximum(0, seconds[:, part])
        if is_many:
            axis.bar(np.arange(run.size), width, 1.0, before, color=PART_COLOURS[part], lw=0)
        else:
            axis.barh(np.arange(run.size), width, 0.72, before, color=PART_COLOURS[part], lw=0)
        before += width
    axis.grid(visible=False)
    axis.grid(axis="y" if is_many else "x", color=plots.GRID, lw=0.8)
    if is_many:
        axis.set(xlabel="rank", ylabel=f"{unit} per step", xlim=(-0.5, run.size - 0.5))
        axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    else:
        axis.set_yticks(range(run.size), [f"rank {rank}" for rank in range(run.size)])
        axis.set(xlabel=f"{unit} per step", ylim=(run.size - 0.4, -0.6))
        axis.tick_params(left=False)
        axis.spines["left"].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in zip(PARTS, PART_COLOURS, strict=True)]
    plots.finish(figure, "Where the time of a step goes, by rank", subtitle, handles)
    which = "Means over all steps but the first." if run.rows > 1 else "The only step so far."
    caption = f"{which} Communication that backward hides costs nothing; waiting does."
    return Picture("breakdown", figure, "Where the time of a step goes, by rank", caption)


def learning_rate(run: Run, subtitle: str) -> Picture:
    figure, (axis,) = plots.canvas(height=2.1)
    line(axis, run.steps["step"], run.steps["lr"], color=INK, lw=1.5)
    over_steps(axis, run.steps["step"])
    axis.set_ylabel("learning rate")
    axis.set_ylim(0, 1.1 * max(run.steps["lr"].max(), 1e-30))
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plots.finish(figure, "Learning rate", subtitle)
    return Picture("lr", figure, "Learning rate", "The learning rate of each step.")


def over_steps(axis: Axes, step: np.ndarray) -> None:
    axis.set_xlabel("step")
    one = [step[0]] if len(step) == 1 else None
    axis.xaxis.set_major_locator(FixedLocator(one) if one else MaxNLocator(8, integer=True, steps=TICK_STEPS))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    spare = max(0.5, 0.02 * (step[-1] - step[0]))
    axis.set_xlim(step[0] - spare, step[-1] + spare)


def exact_note(run: Run) -> str:
    count = int(run.is_exact.sum())
    if count in (0, run.rows):
        return ""
    return f" The first {count} steps, in which everything is sent, are left out."
