"""A run in words: how far it is, what it came to, and what it took."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from okrt.report.page import Report
from okrt.report.plots import short, styled, time_text
from okrt.report.provenance import facts, place_text
from okrt.report.run_file import COMPLETE, OPEN, STOPPED, Run
from okrt.report.run_plots import breakdown_s, pictures
from okrt.report.sweep_file import BASELINE

CONTROL_WORDS = (8, 64)
"""of a step, on top of the bound: this many per rank, and this many"""

Figure = tuple[str, Any, str]


def report_on(run: Run) -> Report:
    name = str(run.config.get("task", {}).get("module", "a job"))
    with styled():
        shown = list(pictures(run, subtitle(run, name)))
    return Report(
        title=f"{name} on {run.size} rank{'s' * (run.size != 1)}, {run.reducer}",
        lead=[progress(run), *place_text(run.attributes)],
        headlines=headlines(run),
        losses=[],
        warnings=bound(run),
        facts=facts(run.attributes),
        summary=summary_rows(run),
        pictures=shown,
    )


def subtitle(run: Run, name: str) -> str:
    reducer, optimizer = run.config.get("reducer", {}), run.config.get("optimizer", {}).get("name")
    density = "" if run.reducer == BASELINE or "density" not in reducer else f" at {100 * reducer['density']:.3g} %"
    parts = [name, f"{run.size} rank{'s' * (run.size != 1)}", f"{run.reducer}{density}", optimizer]
    return " · ".join(part for part in parts if part)


def progress(run: Run) -> str:
    planned = run.config.get("steps")
    if run.rows == 0:
        text = f"No step{f' of {planned:,}' if planned else ''} has been recorded yet: there is nothing to show."
    else:
        last = int(run.steps["step"][-1])
        text = f"{last:,} {f'of {planned:,} ' if planned else ''}steps."
        if int(run.steps["step"][0]) > 1:
            text += f" The file begins with step {int(run.steps['step'][0]):,}."
    return text + {
        COMPLETE: " The run is complete.",
        STOPPED: " The run ended before its last step and closed its file: it was stopped, or it failed.",
        OPEN: " The run is still going, or it was killed: its file has not been closed.",
    }.get(run.state, " The file does not say how many steps there should be.")


def figures(run: Run) -> list[Figure]:
    """The main figures: name, value, unit; None for what is not known."""
    steps = run.steps
    planned = run.config.get("steps")
    rows: list[Figure] = [("state", run.state, ""), ("ranks", run.size, "1"), ("reducer", run.reducer, "")]
    rows += [("steps_planned", planned, "1"), ("steps", int(steps["step"][-1]) if run.rows else 0, "1")]
    if run.rows == 0:
        return rows
    held = steps["eval_loss"][np.isfinite(steps["eval_loss"])]
    parts = breakdown_s(run).mean(axis=0)
    sparse = ~run.is_exact & (steps["words_over_k"] > 0)
    per_k = steps["words_over_k"][sparse]
    later_s = float(steps["step_s"][1:].sum())
    return [
        *rows,
        ("exact_steps", int(run.is_exact.sum()), "1"),
        ("samples", int(steps["samples"][-1]), "1"),
        ("loss_last", float(steps["loss"][-1]), "1"),
        ("eval_loss_last", float(held[-1]) if held.size else None, "1"),
        ("eval_loss_best", float(held.min()) if held.size else None, "1"),
        ("time_s", float(steps["step_s"].sum()), "s"),
        ("step_median_s", float(np.median(steps["step_s"])), "s"),
        ("samples_per_s", float(steps["samples"][-1] - steps["samples"][0]) / later_s if later_s else None, "1/s"),
        ("bytes_received", int(steps["bytes_received"].sum()), "bytes"),
        ("bytes_received_per_step_median", float(np.median(steps["bytes_received"])), "bytes"),
        ("words_over_k_median", float(np.median(per_k)) if per_k.size else None, "words/k"),
        ("words_over_k_max", float(per_k.max()) if per_k.size else None, "words/k"),
        *zip(
            ("compute_s", "compute_with_communication_s", "wait_for_communication_s", "wait_for_slowest_s"),
            map(float, parts),
            "ssss",
            strict=True,
        ),
    ]


def summary_rows(run: Run) -> list[Sequence[Any]]:
    return [("figure", "value", "unit"), *figures(run)]


def headlines(run: Run) -> list[str]:
    if run.rows == 0:
        return []
    value = {name: figure for name, figure, _ in figures(run)}
    loss = f"The training loss is {value['loss_last']:.4f}"
    if value["eval_loss_last"] is not None:
        loss += f", that on held-out samples {value['eval_loss_last']:.4f}"
        if value["eval_loss_best"] < value["eval_loss_last"]:
            loss += f" (its best was {value['eval_loss_best']:.4f})"
    texts = [f"{loss}."]
    waits = value["wait_for_communication_s"] + value["wait_for_slowest_s"]
    total = waits + value["compute_s"] + value["compute_with_communication_s"]
    rate = f", {short(value['samples_per_s'])} samples a second" if value["samples_per_s"] else ""
    texts.append(
        f"A step takes {time_text(value['step_median_s'])} (median of the slowest rank){rate}. "
        f"{100 * value['wait_for_communication_s'] / total:.0f} % of it is waiting for communication, "
        f"{100 * value['wait_for_slowest_s'] / total:.0f} % waiting for the slowest rank."
    )
    if value["bytes_received"]:
        texts.append(f"The rank that received most has received {short(value['bytes_received'] / 1e6)} MB.")
    if value["words_over_k_max"] is not None:
        exact = f" after {value['exact_steps']} exact steps" * bool(value["exact_steps"])
        limit = f"; the bound is {short(6 * (run.size - 1) / run.size)}" if run.reducer == "oktopk" else ""
        texts.append(
            f"It received {short(value['words_over_k_median'])} words/k a step{exact} (median), "
            f"{short(value['words_over_k_max'])} at most{limit}."
        )
    return texts


def bound(run: Run) -> list[str]:
    """A warning if a step went over it, control words aside."""
    if run.reducer != "oktopk" or run.size < 2 or run.rows == 0:
        return []
    per_rank, more = CONTROL_WORDS
    allowed = 6 * (run.size - 1) / run.size + (per_rank * run.size + more) / np.maximum(1, run.k)
    over = ~run.is_exact & (run.steps["words_over_k"] > allowed)
    if not over.any():
        return []
    return [f"The bound was EXCEEDED in {over.sum()} steps, first in step {run.steps['step'][np.argmax(over)]}."]
