"""The step of LagAdamW against that of torch's AdamW, on the sparse gradients that okrt.DataParallel delivers.

python -m okrt.perf.optimizer [--parameters 16] [--density 0.01] [--steps 15] [--threads 1 2]

All optimizers take the same gradient of each step, in an order that changes from step to step.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import okrt
from okrt.jobs.gpt_bytes import build
from okrt.perf.training import wide_enough

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LagAdamW": lambda parameters: okrt.LagAdamW(parameters, lr=1e-4),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "AdamW(foreach)": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "AdamW(fused)": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}
MODELS = ("16 tensors", "GPT")
Loss = Callable[[torch.nn.Module, int], torch.Tensor]


class Tensors(torch.nn.Module):
    """Sixteen square matrices; the gradient of what it returns is new noise at every call."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        side = max(1, round((parameters / 16) ** 0.5))
        self.weights = torch.nn.ParameterList(torch.zeros(side, side) for _ in range(16))

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * torch.randn_like(p)).sum() for p in self.weights]).sum()


def make(model: str, parameters: float) -> tuple[torch.nn.Module, Loss]:
    """One of MODELS with about this many parameters, and its loss at a step."""
    if model == "16 tensors":
        torch.manual_seed(0)
        return Tensors(parameters), lambda model, step: model()
    task = build(wide_enough(parameters, 64), seed=0)
    return task.model, lambda model, step: task.loss(model, np.arange(step, step + 2))


def compare(model: str, parameters: float, density: float, steps: int, warmup: int) -> list[dict[str, Any]]:
    """A row for each optimizer: the median of its steps."""
    module, loss = make(model, parameters)
    wrapped = okrt.DataParallel(module, "oktopk", density=density)
    optimizers = {name: make(module.parameters()) for name, make in OPTIMIZERS.items()}
    elements = sum(p.numel() for p in module.parameters())
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    delivered = []
    for step in range(warmup + steps):
        module.zero_grad()
        loss(wrapped, step).backward()
        delivered.append(sum(int(p.grad.count_nonzero()) for p in module.parameters() if p.grad is not None))
        names = list(optimizers)
        first = step % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
    median_ms = {name: 1e3 * float(np.median(seconds[warmup:])) for name, seconds in times.items()}
    shared = {
        "model": model,
        "parameters": elements,
        "threads": torch.get_num_threads(),
        "density": density,
        "delivered": float(np.median(delivered[warmup:])) / elements,
        "steps": steps,
    }
    return [
        {**shared, "optimizer": name, "median_ms": ms, "times_lag": ms / median_ms["LagAdamW"]}
        for name, ms in median_ms.items()
    ]


def with_threads(threads: int, *arguments: Any) -> list[dict[str, Any]]:
    os.environ["OKRT_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return compare(*arguments)


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"The step of the optimizer, density {rows[0]['density']}: medians of {rows[0]['steps']}")
    headings = ("model", "parameters", "delivered", "threads", "optimizer", "ms", "LagAdamW is faster")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "optimizer") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['delivered']:.2%}",
            str(row["threads"]),
            row["optimizer"],
            f"{row['median_ms']:.2f}",
            f"{row['times_lag']:.1f} ×",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=16.0, help="millions (16)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, default=Path("perf/results/optimizer.json"))
    given = parser.parse_args()
    rows = []
    for model in MODELS:
        for threads in given.threads:
            # A world keeps its number of threads: each number has a process of its own.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                arguments = (threads, model, 1e6 * given.parameters, given.density, given.steps, given.warmup)
                rows += process.submit(with_threads, *arguments).result()
    print_table(rows)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
