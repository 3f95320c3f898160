"""A sweep in words and tables: what was measured, who is fastest, who loses to dense, whether bounds held."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from okrt.report.comparison import Comparison, Loss
from okrt.report.grid import EXACT, Grid, label, percent, rate_text
from okrt.report.page import Report, Table
from okrt.report.plots import NOTHING, short, styled, time_text
from okrt.report.provenance import facts, place_text
from okrt.report.sweep_file import BASELINE, COUNTS, DONE, FAILED, FIGURES, PENDING, TEXTS, Sweep
from okrt.report.sweep_plots import pictures

MOST_HEADLINES = 8
MOST_LOSSES = 12


def report_on(sweep: Sweep) -> Report:
    grid = Grid(sweep)
    comparison = Comparison(grid)
    tables = [points_table(grid, comparison)] if grid.done else []
    if sweep.numbers(FAILED):
        tables.append(failures_table(grid))
    with styled():
        shown = list(pictures(grid, comparison))
    return Report(
        title=grid.config.get("title") or f"Sweep of {subject(grid)}",
        lead=[measured(grid), *place_text(sweep.attributes), progress(grid)],
        headlines=[*headlines(grid), *bounds_kept(grid, comparison)],
        losses=losses(grid, comparison),
        warnings=[*bounds_exceeded(grid, comparison), *warnings(grid)],
        facts=facts(sweep.attributes),
        summary=summary(grid, comparison),
        pictures=shown,
        tables=tables,
    )


def subject(grid: Grid) -> str:
    return f"training steps of {grid.config.get('job') or 'a job'}" if grid.is_job else "allreduces"


def measured(grid: Grid) -> str:
    """What was measured, in a sentence or two."""
    counts = listed([str(ranks) for ranks in grid.values("ranks")])
    parts = [f"{subject(grid).capitalize()} on {counts} rank{'' if counts == '1' else 's'}"]
    parts.append(f"with {listed(grid.reducers)}")
    for name in (*grid.fixed, *grid.varied):
        values = grid.values(name)
        if name == "lab":
            if any(values):
                parts.append(f"{listed([rate_text(v) if v else 'no limit' for v in values])} between the ranks")
        elif name == "density":
            parts.append(f"density {listed([percent(value) for value in values])}")
        elif name == "elements":
            parts.append(f"{listed([f'{value:,}' for value in values])} elements{' a rank' if grid.weak else ''}")
        else:
            parts.append(f"{name} {listed([f'{v:g}' if isinstance(v, float) else str(v) for v in values])}")
    text = f"{'; '.join([' '.join(parts[:2]), *parts[2:]])}."
    if len(grid.values("ranks")) > 1:
        what = "batch" if grid.is_job else "gradient"
        each = f"each rank brings {'a batch' if grid.is_job else 'its elements'} of its own"
        whole = "the batch is shared by all ranks" if grid.is_job else f"the {what} is as long on any number of ranks"
        text += f" Weak scaling: {each}." if grid.weak else f" Strong scaling: {whole}."
    return text


def progress(grid: Grid) -> str:
    done, failed, pending = (len(grid.sweep.numbers(status)) for status in (DONE, FAILED, PENDING))
    text = f"{done} of {grid.sweep.size} points {'so far' if pending else 'measured'}"
    more = [f"{failed} failed"] * bool(failed) + [f"{pending} {'is' if pending == 1 else 'are'} pending"] * bool(
        pending
    )
    text = "; ".join([text, *more]) + "."
    if not done:
        text += " Nothing was measured, so there is nothing to show yet."
    return text


def headlines(grid: Grid) -> list[str]:
    """Who is fastest, for each of the settings at the most ranks."""
    columns = grid.sweep.points
    names = [name for name in grid.varied if grid.values(name, grid.done)]
    most = grid.values("ranks", grid.done)[-1:]
    texts = []
    for values in itertools.product(most, *(grid.values(name, grid.done) for name in names)):
        setting = dict(zip(("ranks", *names), values, strict=True))
        found = grid.select(**setting)
        if not found:
            continue
        best = min(found, key=lambda number: columns["median_s"][number])
        where = ", ".join(grid.label(name, value) for name, value in setting.items())
        text = f"{'On' if where[0].isdigit() else 'At'} {where}, {grid.points[best]['reducer']} "
        others = [number for number in found if grid.points[number]["reducer"] != grid.points[best]["reducer"]]
        if not others:
            texts.append(
                f"{text}takes {time_text(columns['median_s'][best])} a step; there is no other to compare with."
            )
            continue
        other = min(others, key=lambda number: columns["median_s"][number])
        text += f"is fastest: {time_text(columns['median_s'][best])} a step"
        rival, ratio = grid.points[other]["reducer"], columns["median_s"][other] / columns["median_s"][best]
        times = [f"{short(ratio)} times as fast as the best other, {rival}"]
        if BASELINE not in (rival, grid.points[best]["reducer"]) and columns["speedup_over_dense"][best] > 0:
            times.insert(0, f"{short(columns['speedup_over_dense'][best])} times as fast as dense")
        text += f", {' and '.join(times)}."
        if columns["ci95_high_s"][best] >= columns["ci95_low_s"][other]:
            text += " Their intervals overlap: it may be chance."
        if not names and columns["alpha_beta_s"][best] > 0:
            text += f" The network alone would allow it {time_text(columns['alpha_beta_s'][best])} (α-β model)."
        texts.append(text)
    if len(texts) > MOST_HEADLINES:
        texts[MOST_HEADLINES:] = [f"{len(texts) - MOST_HEADLINES} more settings are in the table below."]
    return texts


def losses(grid: Grid, comparison: Comparison) -> list[str]:
    """Who loses to dense, where and by how much; on one rank, where there is nothing to gain, in one line."""

    def told(loss: Loss, *names: str) -> str:
        where = grid.describe(loss.number, *names)
        chance = "" if loss.is_certain else " (intervals overlap: it may be chance)"
        reducer = grid.points[loss.number]["reducer"]
        return f"{reducer}{f' on {where}' if where else ''}: {short(loss.times_as_long)} times as long as dense{chance}"

    alone = [loss for loss in comparison.losses if grid.points[loss.number]["ranks"] == 1]
    several = [loss for loss in comparison.losses if loss not in alone]
    texts = [f"{told(loss, 'ranks')}." for loss in several[:MOST_LOSSES]]
    if len(several) > MOST_LOSSES:
        texts.append(f"{len(several) - MOST_LOSSES} more points: their rows are marked in the table.")
    if alone:
        worst: dict[str, float] = {}
        for loss in alone:
            worst.setdefault(grid.points[loss.number]["reducer"], loss.times_as_long)
        parts = ", ".join(f"{name} {short(times)}" for name, times in worst.items())
        texts.append(
            f"On 1 rank nothing is sent, so choosing what to send only costs. Times as long as dense: {parts}."
        )
    return texts


def bounds_exceeded(grid: Grid, comparison: Comparison) -> list[str]:
    columns = grid.sweep.points
    over = [
        f"{grid.points[n]['reducer']} on {grid.describe(n, 'ranks')}: "
        f"{short(columns['words_over_k_max'][n])} words/k, bound {short(columns['bound_words_over_k'][n])}"
        for n in comparison.over_bound
    ]
    return [f"The bound was EXCEEDED: {'; '.join(over)}."] if over else []


def bounds_kept(grid: Grid, comparison: Comparison) -> list[str]:
    """Said where something was sent that has a bound."""
    bound = grid.sweep.points["bound_words_over_k"]
    sparse = [n for n in grid.done if grid.points[n]["reducer"] not in EXACT and grid.points[n]["ranks"] > 1]
    if comparison.over_bound or not any(np.isfinite(bound[number]) for number in sparse):
        return []
    return ["No sparse scheme received more words in any step than its bound, control words aside."]


def warnings(grid: Grid) -> list[str]:
    """What makes points of one file differ by more than their settings."""
    codes = sorted({str(grid.sweep.points["code"][number]) for number in grid.done})
    if len(codes) < 2:
        return []
    return [f"The points were measured with {len(codes)} versions of the code: {', '.join(codes)}."]


def listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def points_table(grid: Grid, comparison: Comparison) -> Table:
    """The measured points; what is alike in all of them is said above."""
    columns = grid.sweep.points
    varied = [*grid.varied]
    headings = [
        "reducer",
        "ranks",
        *varied,
        "steps",
        "ms",
        "95 % of ms",
        "α-β ms",
        "× dense",
        "× best other",
        "efficiency",
    ]
    headings += ["words/k", "max", "bound", "MB"]
    rows = []
    lost = {loss.number for loss in comparison.losses}
    for number in grid.done:
        point = grid.points[number]
        low, high = 1e3 * columns["ci95_low_s"][number], 1e3 * columns["ci95_high_s"][number]
        best, exact = comparison.best_other[number], point["reducer"] in EXACT
        ratio = comparison.speedup_over_best_other[number]
        rows.append(
            [
                point["reducer"],
                str(point["ranks"]),
                *(NOTHING if name == "density" and exact else value_text(name, point[name]) for name in varied),
                str(columns["repetitions"][number]),
                short(1e3 * columns["median_s"][number]),
                f"{short(low)}…{short(high)}",
                short(1e3 * columns["alpha_beta_s"][number]),
                short(columns["speedup_over_dense"][number]),
                f"{short(ratio)} ({grid.points[best]['reducer']})" if best >= 0 else NOTHING,
                percent(comparison.efficiency[number]) if np.isfinite(comparison.efficiency[number]) else NOTHING,
                *(
                    NOTHING if exact else short(columns[name][number])
                    for name in ("words_over_k_median", "words_over_k_max", "bound_words_over_k")
                ),
                short(columns["bytes_received"][number] / 1e6),
            ]
        )
    return Table("All measured points", headings, rows, [number in lost for number in grid.done])


def value_text(name: str, value: Any) -> str:
    if name == "density":
        return percent(value)
    if name == "elements":
        return f"{value:,}"
    return rate_text(value) if name == "lab" else label("", value).strip()


def failures_table(grid: Grid) -> Table:
    rows = [
        [grid.points[n]["reducer"], grid.describe(n, "ranks"), str(grid.sweep.points["reason"][n])]
        for n in grid.sweep.numbers(FAILED)
    ]
    return Table("Points that failed", ["reducer", "where", "reason"], rows, texts=3)


def summary(grid: Grid, comparison: Comparison) -> list[Sequence[Any]]:
    """A row for every point, with all its settings and figures."""
    sweep = grid.sweep
    columns = {name: sweep.points[name] for name in (*sweep.settings, "status", *COUNTS, *FIGURES)}
    columns |= {f"{phase}_s": sweep.points["phase_s"][:, at] for at, phase in enumerate(sweep.phases)}
    best = [grid.points[other]["reducer"] if other >= 0 else "" for other in comparison.best_other]
    columns |= {"efficiency": comparison.efficiency, "best_other": np.array(best, object)}
    columns |= {"speedup_over_best_other": comparison.speedup_over_best_other}
    columns |= {name: sweep.points[name] for name in TEXTS if name != "status"}
    return [list(columns), *zip(*(column.tolist() for column in columns.values()), strict=True)]
