"""`make bench`, the core: how near the fused select pass comes to the speed of memory, and to torch.topk.

The triad a = b + s*c is compiled and split over threads as the kernels are. Both count 12 bytes an element (two reads
and a write); runs alternate, and the ratio is the median of the ratios of neighbours.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numba import njit
from rich.console import Console
from rich.progress import track
from rich.table import Table

from okrt.kernels import cpu
from okrt.kernels.host import Host

BYTES_PER_ELEMENT = 12


@njit(nogil=True)
def triad(a: np.ndarray, b: np.ndarray, c: np.ndarray, s: np.float32) -> None:
    for i in range(a.size):
        a[i] = b[i] + s * c[i]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Core:
    """Arrays of one length, and the passes over them."""

    def __init__(self, elements: int, density: float) -> None:
        rng = np.random.default_rng(0)
        self.elements = elements
        self.k = int(elements * density)
        self.residual = rng.standard_normal(elements, dtype=np.float32)
        self.gradient = np.zeros(elements, np.float32)  # so that the same entries are found at every pass
        self.target = np.zeros(elements, np.float32)
        self.threshold = cpu.kth_magnitude(self.residual, self.k)

    def compare(self, threads: int, rounds: int) -> dict[str, float]:
        host = Host(threads)
        index = np.empty(2 * self.k, np.int32)
        value = np.empty(2 * self.k, np.float32)

        def run_triad() -> None:
            a, b, c = self.target, self.residual, self.gradient
            host.map(lambda _, at: triad(a[at], b[at], c[at], np.float32(3)), self.elements)

        def run_select() -> None:
            found = host.accumulate_select(self.residual, self.gradient, self.threshold, 0, index, value)
            assert found == self.k, f"{found} entries found, {self.k} expected"

        run_triad()
        run_select()
        what = f"triad and select, {threads} thread{'s' * (threads > 1)}"
        pairs = np.array([(seconds(run_triad), seconds(run_select)) for _ in track(range(rounds), what)])
        gigabytes = BYTES_PER_ELEMENT * self.elements / 1e9
        return {
            "threads": threads,
            "triad_gb_per_s": gigabytes / float(np.median(pairs[:, 0])),
            "select_gb_per_s": gigabytes / float(np.median(pairs[:, 1])),
            "select_over_triad": float(np.median(pairs[:, 0] / pairs[:, 1])),
            "select_ms": 1e3 * float(np.median(pairs[:, 1])),
        }

    def topk_ms(self, threads: int, rounds: int) -> float:
        torch.set_num_threads(threads)
        magnitude = torch.from_numpy(np.abs(self.residual))
        torch.topk(magnitude, self.k)
        what = f"torch.topk, {threads} thread{'s' * (threads > 1)}"
        return 1e3 * float(
            np.median([seconds(lambda: torch.topk(magnitude, self.k)) for _ in track(range(rounds), what)])
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--elements", type=int, default=1 << 24)
    options.add_argument("--density", type=float, default=0.01)
    options.add_argument("--rounds", type=int, default=41)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--json", type=Path, default=Path("perf/results/core.json"))
    chosen = options.parse_args()
    core = Core(chosen.elements, chosen.density)
    rows = []
    for threads in chosen.threads:
        row = core.compare(threads, chosen.rounds)
        row["topk_ms"] = core.topk_ms(threads, max(3, chosen.rounds // 8))
        row["topk_over_select"] = row["topk_ms"] / row["select_ms"]
        rows.append(row)
    table = Table(title=f"{chosen.elements} float32, density {chosen.density}: fused add, select and compact")
    for heading in (
        "threads",
        "triad GB/s",
        "select GB/s",
        "select/triad",
        "select ms",
        "torch.topk ms",
        "topk/select",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['threads']}",
            f"{row['triad_gb_per_s']:.1f}",
            f"{row['select_gb_per_s']:.1f}",
            f"{row['select_over_triad']:.0%}",
            f"{row['select_ms']:.2f}",
            f"{row['topk_ms']:.0f}",
            f"{row['topk_over_select']:.0f}",
        )
    Console(width=100).print(table)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
