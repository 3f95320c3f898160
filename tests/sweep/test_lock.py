"""Who may write to a sweep's file, with real processes."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from okrt.errors import StallError, UsageError
from okrt.sweep import lock as lock_module
from okrt.sweep.lock import SweepLock

HOLD = """
import sys, time
from pathlib import Path
from okrt.sweep.lock import SweepLock
with SweepLock(Path(sys.argv[1]), shared=sys.argv[2] == "shared") as lock, lock.updating():
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(path: Path, kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_sweep_at_a_time_and_a_killed_one_leaves_nothing_locked(tmp_path: Path) -> None:
    path = tmp_path / "sweep.h5"
    with holder(path, "alone") as other:
        for shared in (False, True):
            with pytest.raises(UsageError, match="another okrt sweep is working on it"), SweepLock(path, shared):
                pass
        other.kill()
    with SweepLock(path, shared=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_those_with_points_of_their_own_share_it_and_write_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep.h5"
    with holder(path, "shared") as other:
        with pytest.raises(UsageError, match="another okrt sweep"), SweepLock(path, shared=False):
            pass
        with SweepLock(path, shared=True) as mine:
            monkeypatch.setattr(lock_module, "PATIENCE_S", 0.1)
            with pytest.raises(StallError, match="has been writing to it"), mine.updating():
                pass
            monkeypatch.setattr(lock_module, "PATIENCE_S", 60)
            assert other.stdin is not None
            threading.Timer(0.2, lambda: other.stdin.write("\n") and other.stdin.flush()).start()
            began = time.monotonic()
            with mine.updating():
                assert time.monotonic() - began > 0.1
        other.wait(20)
    with SweepLock(path, shared=True):
        pass
    assert list(tmp_path.iterdir()) == [], "the last one removes the lock file"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"), SweepLock(tmp_path / "missing" / "sweep.h5", shared=False):
        pass
