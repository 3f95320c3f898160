"""Processes that start at once compile the kernels one time; a held lock ends in an error that names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from okrt.kernels import compile_lock as module
from okrt.kernels import reference
from okrt.kernels.compile_lock import compile_lock

ROOT = Path(module.__file__).parents[2]

IMPORT = """
import json
import numpy as np
from numba.core.dispatcher import Dispatcher
from okrt.kernels import cpu

kernels = [f for name, f in vars(cpu).items() if isinstance(f, Dispatcher) and not name.startswith("_")]
total = lambda field: sum(sum(getattr(f.stats, field).values()) for f in kernels)
values = np.arange(-5000, 5000, dtype=np.float32)
answers = [cpu.count(values, cpu.kth_magnitude(values, k)) for k in (1, 10, 9999)]
signatures = sum(len(f.signatures) for f in kernels)
print(json.dumps([total("cache_hits"), total("cache_misses"), signatures, answers]))
"""

# By path: `import okrt` would itself compile the kernels in the empty folder.
HOLD = f"""
import runpy
with runpy.run_path({module.__file__!r})["compile_lock"]():
    print("held", flush=True)
    input()
"""


def start(code: str, folder: Path) -> subprocess.Popen:
    """A Python process whose compiled code and lock file are in the folder."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "TMPDIR": str(folder), "PYTHONPATH": paths}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe, text=True)


def finish(process: subprocess.Popen) -> list:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return json.loads(output)


def test_three_processes_at_once_compile_one_time(tmp_path):
    together = [finish(process) for process in [start(IMPORT, tmp_path) for _ in range(3)]]
    later = finish(start(IMPORT, tmp_path))
    values = np.arange(-5000, 5000, dtype=np.float32)
    answers = [reference.count(values, reference.kth_magnitude(values, k)) for k in (1, 10, 9999)]
    signatures = later[2]
    compiled, *loaded = sorted(together)  # by cache hits
    assert compiled == [0, signatures, signatures, answers]
    assert [*loaded, later] == 3 * [[signatures, 0, signatures, answers]]


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Another process that holds the lock."""
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    process = start(HOLD, tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_held_lock_is_an_error_that_names_the_file(holder, tmp_path):
    with pytest.raises(TimeoutError) as error, compile_lock(limit_s=0.2):
        pass
    (file,) = tmp_path.glob("*.lock")
    assert str(file) in str(error.value)


def test_the_lock_of_a_killed_process_is_free(holder):
    holder.kill()
    holder.wait()
    with compile_lock(limit_s=0):
        pass


def test_a_lock_is_free_after_use_and_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), compile_lock():
        raise ZeroDivisionError
    with compile_lock(limit_s=0):
        pass
