"""A thread that reduces buckets one after the other while backward goes on."""

import queue
import threading
import time
from collections.abc import Callable


class Courier:
    """Runs jobs in the order they are given; `settle` waits for all of them and raises what one of them raised.

    Without a thread of its own it runs each job when it is given.
    """

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._given = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.busy_s = 0.0
        """seconds spent in jobs; whoever reads it sets it back"""

    def give(self, job: Callable[[], None]) -> None:
        if not self._threaded:
            self._given += 1
            self._do(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="okrt courier", daemon=True)
            self._thread.start()
        self._given += 1
        self._jobs.put(job)

    def settle(self) -> float:
        """Returns the seconds it had to wait. Every job has time limits of its own, so this ends."""
        start = time.perf_counter()
        for _ in range(self._given):
            self._done.acquire()
        self._given = 0
        error, self._error = self._error, None
        if error is not None:
            raise error
        return time.perf_counter() - start

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            del job  # it may hold the model that this thread is to end with

    def _do(self, job: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            # After an error the ranks may no longer agree: what is left of this backward is not done.
            if self._error is None:
                job()
        except BaseException as error:
            self._error = error
        finally:
            self.busy_s += time.perf_counter() - start
            self._done.release()

    def close(self) -> None:
        self._jobs.put(None)
