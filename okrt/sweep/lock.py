"""Who may write to a sweep's file: one sweep, or several of which each has its own points.

The locks are those of the system (POSIX): they end with the process that holds them, however it ends, and hold across
the nodes of a cluster where the file system supports them.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from okrt.errors import StallError, UsageError

UPDATE, PRESENCE = 0, 1
"""bytes of the lock file: held while the file is replaced; held as long as a sweep works on it"""
PATIENCE_S = 60.0
POLL_S = 0.02


class SweepLock:
    """A context manager; the file `.NAME.lock` beside the sweep's own is removed by the last who held it."""

    def __init__(self, path: Path, shared: bool) -> None:
        """shared: others may work on other points of the same file."""
        self._path, self._shared = path, shared
        self._lock_path = path.with_name(f".{path.name}.lock")

    def __enter__(self) -> "SweepLock":
        while True:
            self._file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
            self._enter()
            # The last one before us may have removed the file after we opened it: a lock on it would be worth nothing.
            if self._lock_path.exists() and os.path.samestat(os.fstat(self._file), os.stat(self._lock_path)):
                return self
            os.close(self._file)

    def __exit__(self, *_: object) -> None:
        if self._try(fcntl.LOCK_EX, PRESENCE):
            self._lock_path.unlink(missing_ok=True)
        os.close(self._file)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Nobody else replaces the file meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._try(fcntl.LOCK_EX, UPDATE):
            if time.monotonic() > deadline:
                raise StallError(f"{self._path}: another okrt sweep has been writing to it for {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, UPDATE)

    def _enter(self) -> None:
        if self._try(fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX, PRESENCE):
            return
        os.close(self._file)
        raise UsageError(
            f"{self._path}: another okrt sweep is working on it: wait for it, or use another --out "
            "(several can share a file if each has its own --point)"
        )

    def _try(self, kind: int, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            reason = f"{error.strerror}: its file system has no locks, use --out on another"
            raise OSError(error.errno, reason, str(self._lock_path)) from error
        return True
