"""Every reducer against dense and against the laws that hold for any of them, over the ranks of a transport."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import okrt

STEPS = 3
DENSITY = 0.03
DENSE = "dense"
EVEN_ONLY = ("topkdsa",)  # whose cost is what entries spread evenly take: a rank may receive somewhat more
HALF = {np.float32: 2.0**-24, np.float16: 2.0**-11}  # of the last place, relative


def runs(name: str) -> list[tuple[Any, dict[str, Any]]]:
    """Gradient type and options."""
    if name == DENSE:
        return [(np.float32, {}), (np.float16, {})]
    mixed = {"density": DENSITY, "complete": True, "dense_steps": 1}
    return [(np.float32, {"density": 1.0}), (np.float32, {"density": DENSITY}), (np.float16, mixed)]


def check_reducer(name: str, transport: Any, kernels: Any, elements: int) -> Iterator[str]:
    """For each step what is wrong with it on this rank, empty if nothing is; all ranks go through the same calls."""
    for dtype, options in runs(name):
        run = Run(name, transport, kernels, dtype, options)
        told = ", ".join([np.dtype(dtype).name, *(f"{key} {value}" for key, value in options.items())])
        for step in range(STEPS):
            wrong = "; ".join(run.step(step, elements))
            yield wrong and f"{told}, step {step}: {wrong}"


class Run:
    """One reducer on arrays in the memory of the kernels; its like on the host, where that is another; and dense."""

    def __init__(self, name: str, transport: Any, kernels: Any, dtype: Any, options: dict[str, Any]) -> None:
        self._name, self._transport, self._kernels, self._dtype = name, transport, kernels, dtype
        self._options = options
        self._reducer: Any = okrt.reducer(name, transport=transport, **options)
        self._dense = okrt.reducer(DENSE, transport=transport) if options.get("density") == 1 else None
        is_on_host = kernels.memory == "host"
        self._twin: Any = None if is_on_host else okrt.reducer(name, transport=transport, **options)

    def step(self, step: int, elements: int) -> list[str]:
        """What is wrong."""
        x = np.random.default_rng([step, self._transport.rank]).standard_normal(elements).astype(self._dtype)
        before = self._residual(elements)
        given = self._kernels.from_host(x.copy())
        result = self._kernels.to_host(self._reducer.allreduce(given))
        wrong = [] if np.array_equal(self._kernels.to_host(given), x) else ["its input has changed"]
        if self._has_bound and (words := self._reducer.last.words_received) > (limit := self._limit_words(elements)):
            wrong.append(f"{words} words received, at most {limit:.0f} allowed")
        wrong += self._broken_laws(x, before, self._residual(elements), result)
        return wrong + (self._unlike_host(x, result) if self._twin is not None else [])

    def _broken_laws(self, x: np.ndarray, before: np.ndarray, after: np.ndarray, result: np.ndarray) -> list[str]:
        """Of those that hold over all ranks; before and after: the residual."""
        transport, size, wrong = self._transport, self._transport.size, []
        digest = zlib.crc32(result.tobytes())
        if digest != transport.allgather(np.array([digest], np.int64))[0, 0]:
            wrong.append("the result is not that of rank 0")
        sums = np.stack([x + before - after, np.abs(x) + np.abs(before)])
        transport.allreduce(sums, "sum")
        delivered, scale = sums
        allowed = (size + 8) * HALF[np.float32] * scale + size * 2.0**-149
        if self._name == DENSE and self._dtype == np.float16:
            allowed += HALF[np.float16] * scale + size * 2.0**-25
        if not (np.abs(delivered - size * result.astype(np.float64)) <= allowed).all():
            wrong.append("the gradients are not what was delivered and what was kept")
        if self._dense is not None:
            mean = self._dense.allreduce(x).astype(np.float64)
            if not (size * np.abs(result - mean) <= 2 * allowed).all():
                wrong.append("the result is not that of dense")
        return wrong

    def _unlike_host(self, x: np.ndarray, result: np.ndarray) -> list[str]:
        wrong = []
        if result.tobytes() != self._twin.allreduce(x).tobytes():
            wrong.append("the result is not that of the host")
        kept = self._twin.residual
        if kept is not None and kept.tobytes() != self._kernels.to_host(self._reducer.residual).tobytes():
            wrong.append("the residual is not that of the host")
        return wrong

    def _residual(self, elements: int) -> np.ndarray:
        """In double precision."""
        if self._reducer.residual is None:
            return np.zeros(elements)
        return self._kernels.to_host(self._reducer.residual).astype(np.float64)

    @property
    def _has_bound(self) -> bool:
        """`complete` and dense steps have costs of their own."""
        return self._name not in EVEN_ONLY and not self._options.get("complete")

    def _limit_words(self, elements: int) -> float:
        """Of payload by the bound of the algorithm, and of control."""
        size = self._transport.size
        return self._reducer.cost(elements, self._reducer.last.k, size).words + 8 * size + 64
