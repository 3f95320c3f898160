"""Numba's simulator of CUDA with the threads of a block in turn, each until it waits for the others or ends.

Its own scheduler lets them run at once, and polls: most of the time goes to the fight for Python's lock. Here the order
is drawn anew whenever all have come to a barrier, so that a barrier that is missing is noticed, and in every run.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel

LIMIT_S = 60


class Thread(kernel.BlockThread):
    def __init__(self, body: Callable[[], None], block: "Block", place: tuple[int, ...], own: tuple[int, ...]) -> None:
        super().__init__(body, block, place, own, debug=False)
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        self.turn.acquire()
        super().run()
        self._manager.ended(self)

    def syncthreads(self) -> None:
        self._manager.pass_on()
        self.turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block has failed")


class Block(kernel.BlockManager):
    order = random.Random(0)

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        threads = [Thread(lambda: self._f(*args), self, grid_point, own) for own in np.ndindex(*self._block_dim)]
        self._alive, self._next, self._finished = list(threads), list[Thread](), threading.Event()
        for thread in threads:
            thread.start()
        self.pass_on()
        if not self._finished.wait(LIMIT_S):
            raise TimeoutError(f"block {grid_point} has not ended after {LIMIT_S} s")
        failed = [thread.exception for thread in threads if thread.exception and not thread.abort]
        if failed:
            raise failed[0][0].with_traceback(failed[0][1])

    def pass_on(self) -> None:
        """To the next of this round, or to the first of a new one."""
        if not self._next:
            self._next = list(self._alive)
            self.order.shuffle(self._next)
        if self._next:
            self._next.pop().turn.release()
        else:
            self._finished.set()

    def ended(self, thread: Thread) -> None:
        self._alive.remove(thread)
        if thread.exception:
            for other in self._alive:
                other.abort = True
        self.pass_on()
