"""How to train with sparse gradients: recipes side by side on one job, into perf/results/recipes.json.

python -m okrt.perf.recipes [NAME…] [--job gpt_bytes] [--seeds 0-2,7] [--ranks 4] [--set KEY=VALUE]… [--lab 100mbit]

A run that has been done is not done again, and one that was cut off goes on; remove its folder under runs/recipes to
repeat it. Ends with a table of all runs of the job so far, or of those with the seeds given; --table shows it without
any new run. --pairs compares two recipes by their runs of the same seeds: differences of the second from the first. A
one-sided interval of 95 % ends where the two-sided one of 90 % does.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.stats
from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = Path("runs/recipes")
ADAMW = ("optimizer.name=adamw", "reducer.complete=false")
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=1e-4", "reducer.complete=false")
# What each recipe changes in the job. AdamW's learning rate is the job's: for the language models the best for dense of
# those in results/recipes.json. That of SGD is the best of 0.1, 0.5 and 2 after 300 dense steps.
RECIPES: dict[str, tuple[str, ...]] = {
    "dense": ("reducer.name=dense", *ADAMW, "optimizer.betas=[0.9, 0.95]"),
    "lag-aware": (),
    "lag-aware, topka": ("reducer.name=topka",),
    "lag-aware, gtopk": ("reducer.name=gtopk",),
    "lag-aware 0.5 %": ("reducer.density=0.005",),
    "lag-aware 2 %": ("reducer.density=0.02",),
    "lag-aware, coo": ("reducer.codec=coo",),
    "lag-aware, fp16": ("reducer.codec=packed", "reducer.values=fp16"),
    "lag-aware, bf16": ("reducer.codec=packed", "reducer.values=bf16"),
    "lag-aware, sidco": ("reducer.selector=sidco",),
    "lag-aware, not complete": ("reducer.complete=false",),
    "lag-aware by magnitude": ("optimizer.balance=0",),
    "lag-aware, four buckets": ("reducer.bucket_mb=0.6",),
    "lag-aware, no dense steps": ("reducer.dense_steps=0",),
    "plain gradients": (*ADAMW, "reducer.dense_steps=0"),
    "plain gradients, 30 dense steps": ADAMW,
    "plain gradients, density schedule": (
        *ADAMW,
        "reducer.dense_steps=0",
        "reducer.density_schedule=[[50, 0.25], [100, 0.06], [150, 0.02]]",
    ),
    "updates": (*ADAMW, "reducer.apply=updates"),
    "dense SGD": (*SGD, "reducer.name=dense"),
    "updates of SGD": (*SGD, "reducer.apply=updates"),
    "updates of SGD, masking": (*SGD, "reducer.apply=updates", "reducer.momentum_masking=true"),
}


def run(name: str, job: str, seed: int, ranks: int, settings: list[str], lab: str | None) -> dict[str, Any]:
    """One run's row."""
    label = " ".join([job, name, *settings, *([lab] if lab else []), f"seed {seed}"])
    folder = RUNS / "".join(c if c.isalnum() or c in ".=-" else "_" for c in label)
    if not (folder / "result.json").exists():
        changes = [f"--set={change}" for change in (*RECIPES[name], *settings, f"seed={seed}")]
        command = [
            sys.executable,
            "-m",
            "okrt",
            "train",
            job,
            "--ranks",
            str(ranks),
            "--out",
            str(folder),
            "--resume",
            *changes,
        ]
        print(f"{label}…", flush=True)
        subprocess.run([*command, *(["--lab", lab] if lab else [])], check=True, stdout=subprocess.DEVNULL)
    with h5py.File(folder / "run.h5", swmr=True) as file:
        steps = {key: data[()] for key, data in file["steps"].items()}
    evaluated = np.flatnonzero(np.isfinite(steps["eval_loss"]))
    return {
        "recipe": name,
        "job": job,
        "seed": seed,
        "ranks": ranks,
        "settings": settings,
        "lab": lab,
        "steps": int(steps["step"][-1]),
        "figures": json.loads((folder / "result.json").read_text())["figures"],
        "megabytes_received": float(steps["bytes_received"].sum()) / 1e6,
        "seconds": float(steps["step_s"].sum()),
        "curve": [
            [int(steps["step"][at]), float(steps["step_s"][: at + 1].sum()), float(steps["eval_loss"][at])]
            for at in evaluated
        ],
    }


def seconds_to(loss: float, row: dict[str, Any]) -> float | None:
    """When the held-out loss of a run was first seen this low; None if never."""
    return next((seconds for _, seconds, seen in row["curve"] if seen <= loss), None)


def summary(rows: list[dict[str, Any]]) -> Table:
    """A line for each recipe: its runs without a lab, or in one, with their means; times are of a lab only."""
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("recipe", "lab", "seeds", "loss", "mean", "above dense", "MB", "fewer", "s", "s to dense's loss"):
        shown.add_column(heading, justify="left" if heading == "recipe" else "right", overflow="fold")
    groups: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((", ".join([row["recipe"], *row["settings"]]), row["lab"]), []).append(row)
    for (name, lab), runs in groups.items():
        runs = sorted(runs, key=lambda row: row["seed"])
        dense = {row["seed"]: row for row in groups.get(("dense", lab), [])}
        losses = [row["figures"]["loss"] for row in runs]
        megabytes = np.mean([row["megabytes_received"] for row in runs])
        cells = ["", "", ""]
        if all(row["seed"] in dense for row in runs):
            same = [dense[row["seed"]] for row in runs]
            cells[0] = f"{100 * (sum(losses) / sum(row['figures']['loss'] for row in same) - 1):+.1f} %"
            cells[1] = f"{np.mean([row['megabytes_received'] for row in same]) / megabytes:.1f} ×"
            times = [seconds_to(other["figures"]["loss"], row) for other, row in zip(same, runs, strict=True)]
            cells[2] = ", ".join("never" if time is None else f"{time:.0f}" for time in times) if lab else ""
        shown.add_row(
            name,
            lab or "",
            ", ".join(str(row["seed"]) for row in runs),
            ", ".join(f"{loss:.4f}" for loss in losses),
            f"{np.mean(losses):.4f}",
            cells[0],
            f"{megabytes:.1f}",
            cells[1],
            f"{np.mean([row['seconds'] for row in runs]):.0f}" if lab else "",
            cells[2],
        )
    return shown


def parse_seeds(text: str) -> list[int]:
    """Numbers and ranges of them: 0,1,5-9."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def chosen(rows: list[dict[str, Any]], job: str, seeds: list[int] | None) -> list[dict[str, Any]]:
    """The runs of a job, with all seeds if none are given."""
    return [row for row in rows if row["job"] == job and (not seeds or row["seed"] in seeds)]


def paired(rows: list[dict[str, Any]], first: str, second: str) -> Table:
    """A line for each figure: means, and the mean difference with its standard error and intervals."""
    plain = [row for row in rows if not row["settings"] and not row["lab"]]
    runs = [{row["seed"]: row["figures"] for row in plain if row["recipe"] == name} for name in (first, second)]
    seeds = sorted(runs[0].keys() & runs[1].keys())
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("figure", "seeds", first, second, "difference", "standard error", "90 %", "95 %"):
        shown.add_column(heading, justify="left" if heading == "figure" else "right")
    if len(seeds) < 2:
        return shown
    for figure in runs[0][seeds[0]]:
        one, other = (np.array([of[seed][figure] for seed in seeds]) for of in runs)
        mean, error = (other - one).mean(), (other - one).std(ddof=1) / np.sqrt(len(seeds))
        cells = [f"{value:.4f}" for value in (one.mean(), other.mean())]
        cells += [f"{mean:+.5f}", f"{error:.5f}"]
        for one_sided in (0.95, 0.975):
            reach = float(scipy.stats.t.ppf(one_sided, len(seeds) - 1)) * error
            cells.append(f"{mean - reach:+.5f} to {mean + reach:+.5f}")
        shown.add_row(figure, str(len(seeds)), *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of: {'; '.join(RECIPES)} (all if none is given)".replace("%", "%%"))
    parser.add_argument("--job", default="gpt_bytes")
    parser.add_argument("--seeds", type=parse_seeds, help="such as 0,1,5-9  (default: 0-2; to show, all there are)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--lab")
    parser.add_argument("--table", action="store_true", help="only show what there is")
    parser.add_argument("--pairs", nargs=2, metavar="NAME", help="only compare these two recipes, by what there is")
    given = parser.parse_args()
    if unknown := [name for name in (*given.names, *(given.pairs or ())) if name not in RECIPES]:
        parser.error(f"unknown recipe {', '.join(unknown)}: choose from {', '.join(RECIPES)}")
    file = RESULTS / "recipes.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    if given.pairs:
        Console(width=150).print(paired(chosen(rows, given.job, given.seeds), *given.pairs))
        return
    for name in () if given.table else given.names or RECIPES:
        for seed in given.seeds or range(3):
            row = run(name, given.job, seed, given.ranks, given.settings, given.lab)
            same = ("recipe", "job", "seed", "ranks", "settings", "lab")
            rows = [other for other in rows if any(other[key] != row[key] for key in same)] + [row]
            file.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name}, seed {seed}: {row['figures']}, {row['megabytes_received']:.1f} MB", flush=True)
    Console(width=150).print(summary(chosen(rows, given.job, given.seeds)))


if __name__ == "__main__":
    main()
