"""How to train with sparse gradients: recipes side by side on one job, into perf/results/recipes.json.

python -m okrt.perf.recipes [NAME…] [--job gpt_bytes] [--seeds 0,1,2] [--ranks 4] [--set KEY=VALUE]… [--lab 100mbit]

A run that has been done is not done again, and one that was cut off goes on; remove its folder under runs/recipes to
repeat it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = Path("runs/recipes")
ADAMW = ("optimizer.name=adamw", "reducer.complete=false")
SGD = ("optimizer.name=sgd", "optimizer.weight_decay=1e-4", "reducer.complete=false")
# What each recipe changes in the job; "lr" is its own best one of those tried.
RECIPES: dict[str, tuple[str, ...]] = {
    "dense": ("reducer.name=dense", *ADAMW, "optimizer.betas=[0.9, 0.95]"),
    "lag-aware": (),
    "lag-aware, topka": ("reducer.name=topka",),
    "lag-aware, gtopk": ("reducer.name=gtopk",),
    "lag-aware 0.5 %": ("reducer.density=0.005",),
    "lag-aware 2 %": ("reducer.density=0.02",),
    "lag-aware, not complete": ("reducer.complete=false",),
    "lag-aware by magnitude": ("optimizer.balance=0",),
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


def run(name: str, job: str, seed: int, ranks: int, settings: list[str], lab: str | None) -> dict[str, object]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(RECIPES)} (all if none is given)")
    parser.add_argument("--job", default="gpt_bytes")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--lab")
    given = parser.parse_args()
    file = RESULTS / "recipes.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in given.names or RECIPES:
        for seed in map(int, given.seeds.split(",")):
            row = run(name, given.job, seed, given.ranks, given.settings, given.lab)
            same = ("recipe", "job", "seed", "ranks", "settings", "lab")
            rows = [other for other in rows if any(other[key] != row[key] for key in same)] + [row]
            file.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name}, seed {seed}: {row['figures']}, {row['megabytes_received']:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
