"""Sweeps and runs as they might have been measured: times by an alpha-beta model, with noise, from a seed."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from okrt.report.sweep_file import Measured, Sweep, new
from okrt.train.metrics import Metrics

ALL = ("gloo", "dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk")
EXACT = ("gloo", "dense")
PROVENANCE = {
    "schema_version": 1,
    "okrt_version": "0.1.0",
    "git_sha": "0deb6e8f3c1f4f9a9f1f6f0a6f3b2c1d0e9f8a7b",
    "command": "okrt sweep perf/strong.toml --out strong.h5",
    "seed": 0,
    "started_utc": "2026-11-18T01:02:03+00:00",
    "hostnames": ["nid00012", "nid00013"],
    "mpi_library": "MPICH Version: 5.0.2",
    "packages": json.dumps({"python": "3.11.7", "numpy": "2.4.6"}),
}
BITS = {"": 40e9, "100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}


def words_of(reducer: str, n: int, k: int, ranks: int) -> float:
    per_k = {"topka": 2 * (ranks - 1), "gtopk": 4 * np.log2(ranks), "gaussiank": 2.3 * (ranks - 1)}
    per_k |= {"oktopk": 4.1 * (ranks - 1) / ranks, "topkdsa": 5.5 * (ranks - 1) / ranks}
    return 2 * n * (ranks - 1) / ranks if reducer in EXACT else k * per_k.get(reducer, 3 * (ranks - 1))


def measured(point: dict[str, Any], phases: tuple[str, ...], noise: np.random.Generator) -> Measured:
    ranks, n = point["ranks"], point.get("elements", 3_000_000)
    k = int(np.ceil(point["density"] * n))
    words = words_of(point["reducer"], n, k, ranks)
    alpha, beta = (60e-6, 32 / BITS[point["lab"]]) if ranks > 1 else (0.0, 0.0)
    model = 4 * ranks * alpha + words * beta
    exact = point["reducer"] in EXACT
    select = 0.0 if exact else n * 2.5e-9
    other = n * (0.4e-9 if exact else 0.7e-9)
    compute = 0.25 / ranks if phases[0] == "compute" else 0.0
    exchange = model * 1.25 + (0.0 if ranks == 1 else 3e-4)
    total = compute + select + exchange + other
    count = int(noise.integers(10, 20))
    seconds = total * (1 + 0.04 * np.abs(noise.standard_normal(count)))
    received = words * (1 + 0.01 * noise.random(count))
    if phases[0] == "compute":
        share = {"compute": compute, "communication": total - compute}
    else:
        share = {"select": select, "exchange": exchange, "scatter": other * 0.7, "other": other * 0.3}
    bound = {"oktopk": 6 * (ranks - 1) / ranks}.get(point["reducer"], 1.1 * words / k)
    samples = {"seconds": seconds, "words_over_k": received / k, "bytes_received": 4 * received}
    return Measured(samples, share, k, bound, alpha, beta, model if ranks > 1 else np.nan)


def sweep(scaling: str = "strong", job: str | None = None, title: str = "", left: int = 0, **grid: Any) -> Sweep:
    """All points of the grid but the `left` last ones."""
    lists = {"ranks": [1, 2, 4]} | ({} if job else {"elements": [4_194_304]})
    lists |= {"lab": ["1gbit"], "reducer": ["dense", "topka", "oktopk"], "density": [0.01]}
    lists |= grid
    points = []
    for values in itertools.product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        if point["reducer"] in EXACT:
            if point["density"] != lists["density"][0]:
                continue
            point["density"] = 1.0
        if scaling == "weak" and "elements" in point:
            point["elements"] *= point["ranks"]
        points.append(point)
    phases = ("compute", "communication") if job else ("select", "exchange", "scatter", "other")
    config = {"title": title, "job": job, "scaling": scaling, "grid": {name: list(v) for name, v in lists.items()}}
    made = new(points, phases, PROVENANCE | {"config": json.dumps(config)})
    noise = np.random.default_rng(1)
    for number, point in enumerate(points[: len(points) - left]):
        made.record(number, measured(point, phases, noise), "0.1.0 0deb6e8", f"2026-11-18T01:{number:02d}:00+00:00")
    return made


def run(path: Path, rows: int, ranks: int = 4, steps: int = 400, dense_steps: int = 0, close: bool = True) -> Metrics:
    """A run that wrote that many rows of its steps."""
    k, n = 30_000, 3_000_000
    config = {
        "steps": steps,
        "batch": 8,
        "task": {"module": "gpt_bytes"},
        "optimizer": {"name": "lag_adamw", "lr": 4e-3},
    }
    config["reducer"] = {"name": "oktopk", "density": 0.01, "dense_steps": dense_steps, "density_schedule": []}
    metrics = Metrics(path, ranks, PROVENANCE | {"config": json.dumps(config), "command": "okrt train gpt_bytes"})
    noise = np.random.default_rng(2)
    for step in range(1, rows + 1):
        exact = step <= dense_steps
        words = 2 * n * (ranks - 1) / ranks if exact else k * (ranks - 1) / ranks * noise.uniform(3.6, 4.4, ranks)
        words = np.broadcast_to(words, ranks).astype(int)
        step_s = 0.14 + 0.02 * noise.random(ranks) + (0.5 if exact else 0)
        loss = 1.7 + 3.8 * np.exp(-step / 90)
        metrics.write(
            {
                "step": step,
                "loss": loss + 0.05 * noise.standard_normal(),
                "eval_loss": loss + 0.03 if step % 20 == 0 or step == steps else np.nan,
                "lr": 4e-3 * min(1, step / 50) * (0.55 + 0.45 * np.cos(np.pi * step / steps)),
                "samples": 32 * step,
                "step_s": step_s.max(),
                "compute_s": (step_s - 0.03).max(),
                "comm_s": 0.05,
                "bytes_received": 4 * words.max(),
                "words_over_k": words.max() / k,
            },
            {
                "step_s": step_s,
                "comm_s": np.full(ranks, 0.05) + 0.01 * noise.random(ranks),
                "idle_s": 0.02 + 0.02 * noise.random(ranks),
                "selected": np.full(ranks, n) if exact else noise.integers(0.9 * k, 1.1 * k, ranks),
                "bytes_received": 4 * words,
            },
        )
    metrics.close() if close else metrics.flush()
    return metrics
