"""One process compiles, the others wait and then load what it wrote."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 600


@contextlib.contextmanager
def compile_lock(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Held by one process at a time on this machine; TimeoutError, naming the lock file, after limit_s seconds."""
    source = hashlib.sha256(str(Path(__file__).resolve()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"okrt-compile-{os.getuid()}-{source}.lock"
    deadline = time.monotonic() + limit_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another process has held {path} for {limit_s:.0f} s while compiling kernels: end it"
                    raise TimeoutError(message) from None
                time.sleep(0.05)
        yield
