"""Bytes an entry, and entries a second through one core, of packed messages.

python -m okrt.perf.codec [--elements 16777216] [--densities 0.1 0.01 0.001]

Encoding is measured with the rounding of values and the checksum, decoding with the test of the checksum. Indexes are
scattered evenly, which is the worst that can happen to gaps, or denser in some layers than in others.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from okrt.kernels.host import Host
from okrt.kernels.packed import KINDS, room_words

COO_BYTES = 8
LAYERS = np.logspace(0, -2, 10)


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The median."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def scattered(elements: int, density: float, by_layers: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    share = np.repeat(LAYERS / LAYERS.mean(), -(-elements // LAYERS.size))[:elements] if by_layers else 1.0
    return np.flatnonzero(rng.random(elements) < density * share).astype(np.int32)


def measured(elements: int, density: float, by_layers: bool, values: str, rounds: int) -> dict[str, float | str]:
    host, kind = Host(), KINDS[values]
    index = scattered(elements, density, by_layers)
    value = np.random.default_rng(1).standard_normal(index.size).astype(np.float32)
    error = np.empty(index.size if values != "fp32" else 0, np.float32)
    message = np.empty(room_words(index.size, kind, elements), np.int32)
    index_out, value_out = np.empty_like(index), np.empty_like(value)
    length = host.pack(index, value, kind, message, error)

    def decode() -> None:
        _, _, has, right = host.inspect_packed(message[:length])
        assert has == right
        host.unpack(message[:length], index_out, value_out)

    encode_s = seconds(lambda: host.pack(index, value, kind, message, error), rounds)
    decode_s = seconds(decode, rounds)
    assert (index_out == index).all() and (value_out == value).all()
    return {
        "density": density,
        "indexes": "by layers" if by_layers else "even",
        "values": values,
        "bytes_per_entry": 4 * length / index.size,
        "encode_ns": 1e9 * encode_s / index.size,
        "decode_ns": 1e9 * decode_s / index.size,
        "million_entries_per_s": index.size / 1e6 / (encode_s + decode_s),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--elements", type=int, default=1 << 24)
    options.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--json", type=Path, default=Path("perf/results/codec.json"))
    chosen = options.parse_args()
    cases = [
        (density, by_layers, values)
        for density in chosen.densities
        for by_layers in (False, True)
        for values in ("fp32", "fp16", "bf16")
    ]
    rows = [measured(chosen.elements, *case, chosen.rounds) for case in track(cases, "packed messages")]
    table = Table(title=f"packed messages, {chosen.elements} elements, one thread (coordinates: {COO_BYTES} bytes)")
    for heading in ("density", "indexes", "values", "bytes/entry", "encode ns", "decode ns", "M entries/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console(width=100).print(table)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
