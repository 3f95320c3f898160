"""`okrt bench allreduce`: reducers side by side on the same gradients, in one run."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from okrt.cli.launch import TERMINAL_WIDTH, check_lab, console, start_ranks, started_by_launcher
from okrt.cli.measure import BYTES, SECONDS, WORDS, Allreduce, alpha_beta_s, measure_in_turns, parsed, ping
from okrt.cli.mistakes import checking
from okrt.errors import UsageError
from okrt.perf.synthetic import SyntheticGradient
from okrt.reducers import REDUCERS, checked_options
from okrt.report.statistics import median_interval
from okrt.sweep.spec import EXACT, GLOO, Repeat
from okrt.world import World, init

app = typer.Typer(help="Measure.", invoke_without_command=True)

MIN_STEPS = 5


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure reducers against each other."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@dataclass
class Row:
    """One reducer; times are of the slowest rank of each step."""

    reducer: str
    ranks: int
    elements: int
    density: float
    lab: str | None
    steps: int
    median_ms: float
    ci95_low_ms: float
    ci95_high_ms: float
    words_over_k_median: float
    words_over_k_max: float
    bytes_received_median: float
    bound_words_over_k: float
    alpha_beta_ms: float


@app.command()
def allreduce(
    reducers: Annotated[
        str,
        typer.Option(
            help=f"comma-separated: {', '.join([*REDUCERS, GLOO])}; with options as oktopk:codec=packed:values=fp16"
        ),
    ] = "dense,oktopk",
    elements: Annotated[int, typer.Option(help="length of the gradient")] = 4_000_000,
    density: Annotated[float, typer.Option(help="share of entries that sparse reducers send")] = 0.01,
    ranks: Annotated[int | None, typer.Option(help="ranks to start, when no launcher did")] = None,
    steps: Annotated[int, typer.Option(help="measured steps of each reducer", min=1)] = 20,
    warmup: Annotated[int, typer.Option(help="steps before them that do not count", min=0)] = 5,
    max_seconds: Annotated[
        float, typer.Option(help=f"per reducer; at least {MIN_STEPS} steps are taken", min=0)
    ] = 120.0,
    lab: Annotated[str | None, typer.Option(help="one host per rank at this rate, such as 1gbit; needs root")] = None,
    seed: Annotated[int, typer.Option(help="of the synthetic gradients", min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows to this file")] = None,
) -> int:
    """Time per step, words on the wire and their bound, for each reducer on the same gradients.

    The gradients are a shared part plus noise of each rank, with layer scales from 1 to 0.01, new at each step. The
    reducers take their steps in turns, so that a machine that changes speed changes it for all of them.

    Beside each row stands what the alpha-beta model allows the algorithm, with latency and rate from a ping-pong.
    """
    names = reducers.split(",")
    if not started_by_launcher(ranks) and (ranks not in (None, 1) or lab):
        check_options(names, elements, density, lab, json_file)
        return start_ranks(1 if ranks is None else ranks, lab)
    world = init()
    with checking(world.transport):
        check_options(names, elements, density, lab, json_file)
    repeat = Repeat(warmup=warmup, at_least=min(steps, MIN_STEPS), at_most=steps, within=0, max_seconds=max_seconds)
    with progress_bar(world) as progress:
        alpha_s, beta_s = ping(world.transport)
        gradient = SyntheticGradient(elements, world.rank, seed)
        subjects = [Allreduce(world, name, gradient, density) for name in names]
        bars = [progress.add_task(name, total=warmup + steps) for name in names]
        tables = measure_in_turns(subjects, world.transport, repeat, lambda i: progress.advance(bars[i]))
        for subject in subjects:
            subject.close()
        rows = []
        for name, subject, bar, samples in zip(names, subjects, bars, tables, strict=True):
            progress.update(bar, total=warmup + len(samples))
            model_ms = 1e3 * alpha_beta_s(subject.cost, alpha_s, beta_s)
            setting = {"elements": elements, "density": density, "lab": lab, "alpha_beta_ms": model_ms}
            rows.append(row_of(name, subject, samples, world, setting))
    if world.rank == 0:
        print_table(rows, alpha_s, beta_s)
        if json_file:
            write_atomically(json_file, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def check_options(names: list[str], elements: int, density: float, lab: str | None, json_file: Path | None) -> None:
    """What typer does not see."""
    for text in names:
        name, chosen = parsed(text)
        if name not in (*REDUCERS, GLOO):
            raise UsageError(f"--reducers: unknown {name!r}: choose from {', '.join([*REDUCERS, GLOO])}")
        if chosen and name in EXACT:
            raise UsageError(f"--reducers: {text}: {name} has no options here")
        if "density" in chosen:
            raise UsageError(f"--reducers: {text}: the density is that of --density, for all reducers")
        if chosen:
            checked_options(REDUCERS[name], chosen)
    if names.count(GLOO) > 1:
        raise UsageError(f"--reducers: {GLOO} can be there once only")
    if not 0 < density <= 1:
        raise UsageError(f"--density is {density}: it must be above 0 and at most 1")
    if elements < 1:
        raise UsageError(f"--elements is {elements}: it must be at least 1")
    if lab is not None:
        check_lab(lab)
    if json_file and (json_file.is_dir() or not os.access(json_file.parent, os.W_OK)):
        raise OSError(f"--json {json_file}: cannot write it")


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def row_of(name: str, subject: Allreduce, samples: np.ndarray, world: World, setting: dict[str, Any]) -> Row:
    median, low, high = median_interval(samples[:, SECONDS])
    words = samples[:, WORDS] / subject.k
    return Row(
        reducer=name,
        ranks=world.size,
        steps=len(samples),
        median_ms=1e3 * median,
        ci95_low_ms=1e3 * low,
        ci95_high_ms=1e3 * high,
        words_over_k_median=float(np.median(words)),
        words_over_k_max=float(words.max()),
        bytes_received_median=float(np.median(samples[:, BYTES])),
        bound_words_over_k=subject.cost.words / subject.k,
        **setting,
    )


def progress_bar(world: World) -> Progress:
    """Shown by rank 0 in a terminal; nothing elsewhere."""
    shown = world.rank == 0 and (TERMINAL_WIDTH in os.environ or sys.stderr.isatty())
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console(world, sys.stderr), disable=not shown)


def print_table(rows: list[Row], alpha_s: float, beta_s: float) -> None:
    first = rows[0]
    where = f"lab {first.lab}" if first.lab else "no lab"
    title = f"{first.ranks} ranks, {first.elements} elements, density {first.density}, {where}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    headings = ("reducer", "steps", "ms", "95 % of ms", f"× {first.reducer}", "words/k", "max", "bound", "MB", "α-β ms")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "reducer" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.reducer,
            str(row.steps),
            f"{row.median_ms:.1f}",
            f"{row.ci95_low_ms:.1f}-{row.ci95_high_ms:.1f}",
            f"{first.median_ms / row.median_ms:.2f}",
            f"{row.words_over_k_median:.3g}",
            f"{row.words_over_k_max:.3g}",
            f"{row.bound_words_over_k:.3g}",
            f"{row.bytes_received_median / 1e6:.2f}",
            f"{row.alpha_beta_ms:.1f}",
        )
    out = console(init(), sys.stdout)
    out.print(table)
    if beta_s:
        out.print(
            f"Medians; ms, words and MB received are of the slowest rank. × {first.reducer}: times as fast. "
            f"α-β: {1e6 * alpha_s:.0f} µs and {32e-9 / beta_s:.2f} Gbit/s by ping-pong, for messages and words "
            "of the bound. All reduce in place; the words of gloo are those of a ring."
        )
