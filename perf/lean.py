"""`make bench`, the memory: what oktopk holds between steps and takes within one, under MPI.

Counted by tracemalloc, which sees every NumPy array. Held: after the result is dropped. Peak: beyond what was held
before the step, with a result of its own and with the result written in place.
"""

import argparse
import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import okrt
from okrt.perf.synthetic import SyntheticGradient


def measure(elements: int, density: float, steps: int) -> dict[str, float]:
    """Bytes on this rank: held between steps, and the largest peaks of a step."""
    world = okrt.init()
    gradient = SyntheticGradient(elements, world.rank, seed=0)
    gradient(0)
    # Compiled code is loaded by the first reducer of a process, whatever its size.
    okrt.reducer("oktopk", density=0.1).allreduce(np.ones(10_000, np.float32))
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    reducer = okrt.reducer("oktopk", density=density)
    peaks = {True: 0, False: 0}
    for step in range(steps):
        x = gradient(step)
        in_place = step % 2 == 0
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reducer.allreduce(x, out=x if in_place else None)
        if step >= 2:  # the residual and the buffers are made in the first steps
            peaks[in_place] = max(peaks[in_place], tracemalloc.get_traced_memory()[1] - before)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    return {"held": held, "peak": peaks[False], "peak_in_place": peaks[True]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--elements", type=int, default=1 << 24)
    options.add_argument("--density", type=float, default=0.01)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--json", type=Path, default=Path("perf/results/lean.json"))
    chosen = options.parse_args()
    world = okrt.init()
    mine = measure(chosen.elements, chosen.density, chosen.steps)
    table = world.transport.allgather(np.array(list(mine.values()), np.float64)).max(axis=0)
    if world.rank:
        return
    array_bytes, k = 4 * chosen.elements, int(chosen.elements * chosen.density)
    rows = []
    shown = Table(title=f"oktopk, {world.size} ranks, {chosen.elements} float32, k = {k}: memory of the largest rank")
    for heading in ("", "MB", "arrays of length n", "beyond those, words per k"):
        shown.add_column(heading, justify="left" if not heading else "right")
    expected = {"held": ("held between steps", 1), "peak": ("a step, with its result", 1)}
    expected["peak_in_place"] = ("a step in place", 0)
    for key, total in zip(mine, table, strict=True):
        what, arrays = expected[key]
        beyond = (total - arrays * array_bytes) / 4 / k
        rows.append({"what": what, "bytes": total, "arrays_of_length_n": arrays, "beyond_words_per_k": beyond})
        shown.add_row(what, f"{total / 1e6:.1f}", str(arrays), f"{beyond:.1f}")
    Console(width=100).print(shown)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
