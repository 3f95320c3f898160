"""Gradients of every kind, runs over ranks, and what must hold for any of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import okrt
from okrt.reducers import StepStats
from tests.ranks import run_ranks

Law = Callable[[np.random.Generator, int, int, int, int], np.ndarray]
CHANGE_STEP = 4  # when `jump` and `drop` change scale
BASELINES = ["topka", "topkdsa", "gtopk", "gaussiank"]
SPARSE = [*BASELINES, "oktopk"]
DTYPES = {
    "float32": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "torch.float32": torch.from_numpy,
    "torch.float16": lambda x: torch.from_numpy(x).half(),
    "torch.bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
}


def layer_scales(n: int) -> np.ndarray:
    return np.repeat(np.logspace(0, -2, 10), -(-n // 10))[:n]


def region(n: int, first: int, width: int, values: np.ndarray, elsewhere: float = 0.0) -> np.ndarray:
    x = elsewhere * values
    x[first : first + width] = values[first : first + width]
    return x


def correlated(rng, n, rank, size, step):
    return (np.random.default_rng([7, step]).standard_normal(n) + 0.5 * rng.standard_normal(n)) * layer_scales(n)


def one_region(rng, n, rank, size, step):
    return region(n, n // 3, -(-n // 20), rng.standard_normal(n))


def moving(rng, n, rank, size, step):
    """The mass jumps to another place every three steps."""
    width = -(-n // 20)
    return region(n, step // 3 * 3 * n // 7 % max(1, n - width), width, rng.standard_normal(n), 1e-3)


def disjoint(shift: int) -> Law:
    """Each rank has one part of the range, the one of the rank `shift` further."""

    def law(rng, n, rank, size, step):
        part = (rank + shift) % size
        first = n * part // size
        return region(n, first, n * (part + 1) // size - first, rng.standard_normal(n))

    return law


def interleaved(rng, n, rank, size, step):
    return np.where(np.arange(n) % size == rank, rng.standard_normal(n), 0)


def one_winner(rng, n, rank, size, step):
    """Entries everywhere, but all large ones in one region: what is delivered sits on one rank."""
    x = np.where(rng.random(n) < 0.05, rng.uniform(1, 2, n), 0)
    x[: n // size] *= 100
    return x


def cancelling(rng, n, rank, size, step):
    """Pairs of ranks whose sums are exactly zero."""
    sign = 0 if rank == size - 1 and size % 2 else 1 - 2 * (rank % 2)
    return sign * np.random.default_rng([8, step, rank // 2]).standard_normal(n)


def single(rng, n, rank, size, step):
    x = np.zeros(n)
    x[n // 2 : n // 2 + 1] = 1
    return x


LAWS: dict[str, Law] = {
    "laplace": lambda rng, n, *_: rng.laplace(size=n),
    "normal": lambda rng, n, *_: rng.standard_normal(n),
    "heavy": lambda rng, n, *_: rng.standard_t(2, size=n),
    "layers": lambda rng, n, *_: rng.standard_normal(n) * layer_scales(n),
    "correlated": correlated,
    "one_region": one_region,
    "moving": moving,
    "disjoint": disjoint(0),
    "disjoint_shifted": disjoint(1),
    "interleaved": interleaved,
    "one_winner": one_winner,
    "cancelling": cancelling,
    "jump": lambda rng, n, rank, size, step: rng.laplace(size=n) * (100 if step >= CHANGE_STEP else 1),
    "drop": lambda rng, n, rank, size, step: rng.laplace(size=n) * (0.01 if step >= CHANGE_STEP else 1),
    "equal": lambda rng, n, *_: np.ones(n),
    "ties": lambda rng, n, *_: rng.integers(-2, 3, n),
    "zero": lambda rng, n, *_: np.zeros(n),
    "single": single,
}
STEADY = ["laplace", "normal", "heavy", "layers", "correlated"]


OF_SIZE = {"disjoint", "disjoint_shifted", "interleaved", "one_winner", "cancelling"}  # depend on the number of ranks


@functools.lru_cache(maxsize=128)
def drawn(law: str, n: int, rank: int, size: int | None, step: int, seed: int) -> np.ndarray:
    return LAWS[law](np.random.default_rng([seed, step, rank]), n, rank, size, step).astype(np.float32)


def gradient(law: str, n: int, rank: int, size: int, step: int, seed: int = 0) -> np.ndarray:
    """Drawn once for tests that follow each other with other numbers of ranks."""
    return drawn(law, n, rank, size if law in OF_SIZE else None, step, seed).copy()


def wide(x: Any) -> np.ndarray:
    """As float64."""
    return (x.double().numpy() if isinstance(x, torch.Tensor) else x).astype(np.float64)


def bits(x: Any) -> bytes:
    return (x.float().numpy() if isinstance(x, torch.Tensor) else x).tobytes()


@dataclass
class Step:
    """One call on one rank."""

    gradient: Any
    before: np.ndarray
    result: Any
    after: np.ndarray
    stats: StepStats


def take_step(reducer: Any, x: Any) -> Step:
    n = len(x)
    before = np.zeros(n, np.float32) if reducer.residual is None else reducer.residual.copy()
    result = reducer.allreduce(x)
    after = np.zeros(n, np.float32) if reducer.residual is None else reducer.residual.copy()
    return Step(x, before, result, after, reducer.last)


def run(
    name: str, law: str, *, n: int, size: int, steps: int, dtype: str = "float32", seed: int = 0, **options: Any
) -> list[list[Step]]:
    """The calls of every step, one for each rank. In coordinates, of which the bounds speak, unless told otherwise."""
    if name in SPARSE:
        options.setdefault("codec", "coo")

    def body(transport):
        reducer = okrt.reducer(name, transport=transport, **options)
        return [
            take_step(reducer, DTYPES[dtype](gradient(law, n, transport.rank, size, step, seed)))
            for step in range(steps)
        ]

    return list(zip(*run_ranks(size, body), strict=True))


def check_conservation(ranks: list[Step]) -> None:
    """Gradients and old residuals are the result times P and new residuals, to the rounding of float32."""
    size = len(ranks)
    error = -size * wide(ranks[0].result)
    scale = np.zeros_like(error)
    for r in ranks:
        for part in (wide(r.gradient), wide(r.before)):
            error += part
            scale += np.abs(part, out=part)
        error -= r.after
    np.abs(error, out=error)
    allowed = (size + 3) * 2.0**-24 * scale + size * 2.0**-149
    assert (error <= allowed).all(), f"element {np.argmax(error - allowed)} is off by {error.max()}"


def check_identical(ranks: list[Step]) -> None:
    for other in ranks[1:]:
        assert bits(other.result) == bits(ranks[0].result)


def oktopk_limit(k: int, size: int) -> float:
    return 6 * k * (size - 1) / size + 8 * size + 64


def check_bound(ranks: list[Step]) -> None:
    """Words received by each rank, and entries selected."""
    for r in ranks:
        assert r.stats.words_received <= oktopk_limit(r.stats.k, len(ranks))
        assert r.stats.selected_local <= r.stats.k
        assert int((r.result != 0).sum()) <= r.stats.selected_global <= r.stats.k


def top(values: np.ndarray, k: int) -> np.ndarray:
    """Sorted indexes of the k largest magnitudes but zeros; of equals those of lowest index."""
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return np.sort(order[values[order] != 0])


def exact_energy(ranks: list[Step]) -> float:
    """Squared magnitude of the top-k of the sum of the local top-k's."""
    k = ranks[0].stats.k
    total = np.zeros(len(ranks[0].gradient))
    for r in ranks:
        accumulated = wide(r.gradient) + r.before
        chosen = np.argpartition(np.abs(accumulated), -k)[-k:]
        total[chosen] += accumulated[chosen]
    return float((np.partition(np.abs(total), -k)[-k:] ** 2).sum())
