"""How near the kernels come to the speed of a copy in the same memory."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from okrt.kernels.staging import fence
from okrt.perf.kernel_inputs import ARGUMENTS, Inputs

ROUNDS, CALLS = 5, 4
SHARE = 0.125  # of the elements that lists of entries hold
WORD_BYTES = 4
COPY = "copy"
PACKED_WORDS = 0.85  # of a message, for each entry

# Words that a call must read and write at least, of n elements and m entries; the other kernels only search.
TRAFFIC_WORDS: dict[str, Callable[[int, int], float]] = {
    "all_finite": lambda n, m: n,
    "accumulate": lambda n, m: 3 * n,
    "accumulate_select": lambda n, m: 3 * n + 2 * m,
    "select": lambda n, m: n + 2 * m,
    "select_top": lambda n, m: n + 2 * m,
    "count": lambda n, m: n,
    "counts": lambda n, m: 3 * n,
    "histogram": lambda n, m: n,
    "accumulate_histogram": lambda n, m: 3 * n,
    "moments": lambda n, m: n,
    "exceedances": lambda n, m: n,
    "accumulate_select_exceedances": lambda n, m: 3 * n + 2 * m,
    "kth_magnitude": lambda n, m: n,
    "keep_reaching": lambda n, m: 2 * n + 2 * m,
    "keep_top": lambda n, m: 2 * n + 2 * m,
    "cut_to_top": lambda n, m: 2 * n + 3 * m,
    "scatter_add": lambda n, m: 4 * m,
    "clear_common": lambda n, m: (2 + SHARE) * m,
    "merge_add": lambda n, m: (8 - 2 * SHARE) * m,
    "take": lambda n, m: 4 * m,
    "put": lambda n, m: 3 * m,
    "keep_lost": lambda n, m: 3.5 * m,
    "mean": lambda n, m: 2 * n,
    "rounding_error": lambda n, m: 3 * n,
    "pack": lambda n, m: (4 + PACKED_WORDS) * m,
    "inspect_packed": lambda n, m: PACKED_WORDS * m,
    "unpack": lambda n, m: (2 + PACKED_WORDS) * m,
}


def copy_seconds(kernels: Any, elements: int) -> float:
    source, target = (kernels.from_host(np.full(elements, fill, np.float32)) for fill in (1, 0))
    if kernels.memory == "host":
        return seconds(kernels, lambda: kernels.map(lambda _, at: np.copyto(target[at], source[at]), elements))

    def copy() -> None:
        target[:] = source

    return seconds(kernels, copy)


def seconds(kernels: Any, call: Callable[[], object]) -> float:
    """Of one call, several made in a row; the median of a few rounds."""
    wait = (lambda: None) if kernels.memory == "host" else fence
    call()
    taken = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait()
        taken.append((time.perf_counter() - start) / CALLS)
    return float(np.median(taken))


def speeds(kernels: Any, elements: int) -> Iterator[tuple[str, float]]:
    """Name and GB/s of a copy, and then of each kernel."""
    yield COPY, 2 * WORD_BYTES * elements / 1e9 / copy_seconds(kernels, elements)
    x = Inputs(elements, share=SHARE)
    gradient = np.zeros(elements, np.float32)  # so that the same entries are found at every call
    for name, words in TRAFFIC_WORDS.items():
        arguments = [
            kernels.from_host(a.copy()) if isinstance(a, np.ndarray) and a.dtype != np.int64 else a
            for a in ARGUMENTS[name](x, gradient)[0]
        ]
        taken = seconds(kernels, functools.partial(getattr(kernels, name), *arguments))
        yield name, WORD_BYTES * words(elements, x.k) / 1e9 / taken
