"""Which threshold: the selectors side by side, how long they take and how near they come to their target.

python -m okrt.perf.thresholds [speed] [laws] [jobs] [--steps 200] [--densities 0.1 0.01 0.001]

speed: milliseconds to add, find the threshold and select, on 10M Laplace values and one thread, beside torch.topk.
laws: found over target on synthetic distributions, new values at each step, with error feedback and without.
jobs: the same on the gradients of gpt_bytes and vgg16_cifar10 as they train, with error feedback.

Every selector is that of a reducer on one rank, with a residual of its own, on the same gradients. The threshold of
gaussian counts as right from 3/4 to 5/4 of the target, so it has room for that; all others are capped at the target.
Of SIDCo's laws the tables also tell, in brackets, what the law alone would find, without the correction: the median.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import okrt
from okrt.train.config import find_job, load_job

SELECTORS = ("exact", "reuse", "gaussian", "sidco", "sidco-exponential", "sidco-gamma", "sidco-pareto")
SETTLED = 5  # steps, from which on the target is to be held
PARTS = ("speed", "laws", "jobs")
ELEMENTS_OF_SPEED = 10_000_000
JOBS = {"gpt_bytes": ["batch=8"], "vgg16_cifar10": ["batch=4"]}
Gradients = Callable[[int], Iterator[np.ndarray]]


def signs(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], n)


LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "normal": lambda rng, n: rng.standard_normal(n),
    "gamma(0.6)": lambda rng, n: rng.gamma(0.6, size=n) * signs(rng, n),
    "gen. Pareto(0.2)": lambda rng, n: (rng.random(n) ** -0.2 - 1) / 0.2 * signs(rng, n),
    "Student t(3)": lambda rng, n: rng.standard_t(3, n),
    "randn·U⁸": lambda rng, n: rng.standard_normal(n) * rng.random(n) ** 8,
    "90 % zeros": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.1),
}


@dataclass
class Row:
    """One selector on one kind of gradients."""

    gradients: str
    elements: int
    density: float
    feedback: bool
    selector: str
    steps: int
    median_ms: float
    lowest: float
    """found over target, from step SETTLED on"""
    highest: float
    found_over_target: list[float]
    by_law_alone: list[float] | None = None
    """found over target by the law of SIDCo without its correction"""
    topk_ms: float | None = None
    """torch.topk of the magnitudes"""


def selected(selector: str, density: float) -> Any:
    return okrt.reducer("gaussiank" if selector == "gaussian" else "topka", density=density, selector=selector)


def compare(
    name: str, gradients: Iterator[np.ndarray], density: float, feedback: bool, topk: bool = False
) -> list[Row]:
    """A row for each selector, on the same gradients."""
    reducers = {selector: selected(selector, density) for selector in SELECTORS}
    found: dict[str, list[float]] = {selector: [] for selector in SELECTORS}
    spent: dict[str, list[float]] = {selector: [] for selector in SELECTORS}
    alone: dict[str, list[float]] = {selector: [] for selector in SELECTORS if selector.startswith("sidco")}
    topk_s = []
    for x in gradients:
        for selector, r in reducers.items():
            if not feedback and r.residual is not None:
                r.residual[:] = 0
            _, value = r.allreduce_sparse(x)
            # No more than there are: zeros are never sent.
            target = min(r.last.k, np.count_nonzero(x)) if not feedback else r.last.k
            found[selector].append(r.last.selected_local / target)
            spent[selector].append(r.last.seconds["select"])
            if selector in alone:
                alone[selector].append(found_by_law(r, value) / target)
        if topk:
            magnitude = torch.from_numpy(np.abs(x))
            start = time.perf_counter()
            torch.topk(magnitude, reducers["exact"].last.k)
            topk_s.append(time.perf_counter() - start)
    return [
        Row(
            gradients=name,
            elements=x.size,
            density=density,
            feedback=feedback,
            selector=selector,
            steps=len(found[selector]),
            median_ms=1e3 * float(np.median(spent[selector][SETTLED:])),
            lowest=min(found[selector][SETTLED:]),
            highest=max(found[selector][SETTLED:]),
            found_over_target=[round(share, 4) for share in found[selector]],
            by_law_alone=[round(share, 4) for share in alone[selector]] if selector in alone else None,
            topk_ms=1e3 * float(np.median(topk_s)) if topk else None,
        )
        for selector in SELECTORS
    ]


def found_by_law(r: Any, sent: np.ndarray) -> int:
    """How many of the last step reach the threshold of the law as it is."""
    threshold = r.last.threshold * np.exp(-r.state_dict()["selector.correction"])
    return sum(int(np.count_nonzero(np.abs(values) >= threshold)) for values in (r.residual, sent))


def of_law(name: str, elements: int, steps: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield LAWS[name](rng, elements).astype(np.float32)


def of_job(name: str, steps: int) -> Iterator[np.ndarray]:
    """Its gradients as it trains, by its own optimizer's learning rate with AdamW, on one rank."""
    job, module, settings = load_job(find_job(name), JOBS[name])
    task = module.build(settings, job.seed)
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job.optimizer.lr)
    order = np.random.default_rng(job.seed).permutation(task.train_samples)
    task.model.train()
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(
            task.model, np.take(order, np.arange(step * job.batch, (step + 1) * job.batch), mode="wrap")
        ).backward()
        optimizer.step()
        yield torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]).numpy()


def print_table(rows: list[Row], title: str) -> None:
    """A line for each kind of gradients, a column for each selector."""
    speed = rows[0].topk_ms is not None
    table = Table(title=title)
    for heading in ("gradients", "density", "feedback", *SELECTORS):
        table.add_column(heading, justify="right", no_wrap=True)
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.gradients, f"{row.density:g}", "yes" if row.feedback else "no"), {})[row.selector] = row
    for key, group in groups.items():
        cells = []
        for row in (group[selector] for selector in SELECTORS):
            if speed:
                assert row.topk_ms is not None
                cells.append(f"{row.median_ms:.1f} ms, 1/{row.topk_ms / row.median_ms:.0f}")
            else:
                law = "" if row.by_law_alone is None else f" ({np.median(row.by_law_alone[SETTLED:]):.2f})"
                cells.append(f"{row.lowest:.2f}…{row.highest:.2f}{law}")
        table.add_row(*key, *cells)
    Console(width=190).print(table)


def pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def plot_found(rows: list[Row], path: Path) -> None:
    """Found over target over steps, a panel for each kind of gradients, at the middle density with feedback."""
    densities = sorted({row.density for row in rows})
    shown = [row for row in rows if row.feedback and row.density == densities[len(densities) // 2]]
    kinds = list(dict.fromkeys(row.gradients for row in shown))
    columns = min(3, len(kinds))
    lines = -(-len(kinds) // columns)
    figure, axes = pyplot().subplots(
        lines, columns, figsize=(4 * columns, 2.6 * lines), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, kind in zip(axes.flat, kinds, strict=False):
        axis.axhspan(0.95, 1.05, color="0.9")
        for number, selector in enumerate(SELECTORS):
            row = next(row for row in shown if (row.gradients, row.selector) == (kind, selector))
            axis.plot(row.found_over_target, color=f"C{number}", lw=1, label=selector)
            if row.by_law_alone is not None:
                axis.plot(row.by_law_alone, color=f"C{number}", lw=1, ls=":")
        axis.set_title(kind, fontsize=10)
        axis.set_yscale("log")
        axis.set_ylim(0.3, 2.5)
        axis.set_yticks([0.3, 0.5, 0.7, 1, 1.5, 2], ["0.3", "0.5", "0.7", "1", "1.5", "2"])
        axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("found / target")
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SELECTORS), fontsize=8
    )
    figure.suptitle(
        f"Entries found over target, density {shown[0].density:g}, error feedback. "
        "Grey: within 5 %; dotted: what the law alone would find"
    )
    figure.savefig(path, dpi=110)


def plot_speed(rows: list[Row], path: Path) -> None:
    """How many times as long torch.topk takes as each selector, bars by density."""
    figure, axis = pyplot().subplots(figsize=(8, 3.2), layout="constrained")
    densities = sorted({row.density for row in rows}, reverse=True)
    width = 0.8 / len(densities)
    for group, density in enumerate(densities):
        shown = [row for row in rows if row.density == density]
        places = [SELECTORS.index(row.selector) + (group - (len(densities) - 1) / 2) * width for row in shown]
        times = [(row.topk_ms or 0.0) / row.median_ms for row in shown]
        bars = axis.bar(places, times, width, color=f"C{group}", label=f"density {density:g}")
        axis.bar_label(bars, [f"{row.median_ms:.0f}" for row in shown], fontsize=7)
    axis.set_xticks(range(len(SELECTORS)), SELECTORS, fontsize=8)
    axis.set_ylabel("torch.topk takes … times as long")
    axis.set_title(f"Add, threshold and select, {rows[0].elements:,} values, one thread; on the bars: ms", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS), help=", ".join(PARTS))
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--elements", type=int, default=500_000, help="of the synthetic gradients")
    options.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    options.add_argument(
        "--out", type=Path, default=Path("perf/results"), help="folder for thresholds.json and the pictures"
    )
    chosen = options.parse_args()
    # Of one rank okrt would use all cores.
    os.environ["OKRT_THREADS"] = "1"
    torch.set_num_threads(1)
    if chosen.steps <= SETTLED:
        options.error(f"--steps must be more than {SETTLED}")
    done: dict[str, list[Row]] = {}
    if "speed" in chosen.parts:
        rows = []
        for density in track(chosen.densities, "speed"):
            rows += compare("Laplace", of_law("Laplace", ELEMENTS_OF_SPEED, 12), density, feedback=False, topk=True)
        done["speed"] = rows
        print_table(
            rows, f"milliseconds on {ELEMENTS_OF_SPEED:,} values, one thread, and the share of the time of torch.topk"
        )
    if "laws" in chosen.parts:
        cases = [(law, density, feedback) for law in LAWS for density in chosen.densities for feedback in (False, True)]
        rows = []
        for law, density, feedback in track(cases, "laws"):
            rows += compare(law, of_law(law, chosen.elements, chosen.steps), density, feedback)
        done["laws"] = rows
        print_table(rows, f"found over target, {chosen.elements} elements, {chosen.steps} steps")
    if "jobs" in chosen.parts:
        rows = []
        for job in track(JOBS, "jobs"):
            rows += compare(job, of_job(job, chosen.steps), chosen.densities[len(chosen.densities) // 2], feedback=True)
        done["jobs"] = rows
        print_table(rows, f"found over target on gradients of jobs, {chosen.steps} steps")
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "thresholds.json"
    held = json.loads(path.read_text()) if path.is_file() else {}
    held |= {part: [asdict(row) for row in rows] for part, rows in done.items()}
    path.write_text(json.dumps(held) + "\n")
    over_steps = [Row(**row) for part in ("laws", "jobs") for row in held.get(part, [])]
    if over_steps:
        plot_found(over_steps, chosen.out / "thresholds.png")
    if "speed" in held:
        plot_speed([Row(**row) for row in held["speed"]], chosen.out / "thresholds_speed.png")


if __name__ == "__main__":
    main()
