"""Numba's simulator of CUDA with the threads of a block in turn, each until it waits for the others or ends.

Its own threads are Python's, which mostly fight for Python's lock. Here the order is drawn anew whenever all have come
to a barrier, from a seed: what depends on the order, as where a barrier is missing, shows, and in every run alike.
"""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import greenlet
import numpy as np
import pytest
from numba.cuda.simulator import kernel, kernelapi


class Thread(greenlet.greenlet):
    """One of a block; `cuda.threadIdx` and the like ask the one that runs."""

    def __init__(self, block: "Block", place: tuple[int, ...], own: tuple[int, ...], body: Any) -> None:
        super().__init__(body)
        self.blockIdx, self.threadIdx = kernel.Dim3(*place), kernel.Dim3(*own)
        self.thread_id = np.ravel_multi_index(own, block.shape, order="F")

    def syncthreads(self) -> None:
        self.parent.switch()


class Block:
    order = random.Random(0)

    def __init__(self, function: Any, grid: tuple[int, ...], shape: tuple[int, ...], debug: bool) -> None:
        self._function, self.shape = function, shape

    def run(self, place: tuple[int, ...], *args: Any) -> None:
        alive = [Thread(self, place, own, self._function) for own in np.ndindex(*self.shape)]
        start = args
        while alive:
            self.order.shuffle(alive)
            for thread in alive:
                thread.switch(*start)
            start = ()
            alive = [thread for thread in alive if not thread.dead]


def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BlockManager", Block)
        patch.setattr(kernelapi, "threading", SimpleNamespace(current_thread=greenlet.getcurrent))
        yield
