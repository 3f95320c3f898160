"""The many-hosts lab: real namespaces, real MPI; skipped where they cannot be made."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from okrt.perf.lab import PREFIX, Lab, LabError, parse_rate
from tests.processes import processes

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="the lab needs root, ip and tc",
)

EXCHANGE = """
import os
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
peer = 1 - comm.rank
comm.Sendrecv(np.zeros(200_000, np.uint8), peer, recvbuf=np.zeros(200_000, np.uint8), source=peer)
print(f"rank {comm.rank} of {comm.size} {os.environ['OKRT_LAB_TEST']}", flush=True)
"""

DIE = """
import os, signal, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""

HOLD = """
import sys
from okrt.perf.lab import Lab
with Lab(2, "100mbit") as lab:
    print(lab.name, flush=True)
    lab.run([sys.executable, "-c", "import time; time.sleep(60)", lab.name])
"""


def namespaces(lab_name: str) -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if line.startswith(lab_name)]


def start_holder() -> tuple[subprocess.Popen[str], str]:
    """A process that holds a lab with a running job, and the lab's name."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    name = holder.stdout.readline().strip()
    assert name.startswith(PREFIX)
    deadline = time.monotonic() + 10
    while not processes(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    holder.stdout.close()
    return holder, name


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("500kbit", 5e5)]
)
def test_rate(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "1Gbps", "-1gbit", "0mbit", "1.gbit"])
def test_bad_rate_names_what_is_right(text: str) -> None:
    with pytest.raises(ValueError, match="kbit, mbit or gbit"):
        parse_rate(text)
    with pytest.raises(LabError, match="kbit, mbit or gbit"):
        Lab(2, text)


def test_refuses_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="root"), Lab(2, "1gbit"):
        pass


@needs_lab
def test_ranks_talk_over_the_lab_and_nothing_is_left() -> None:
    with Lab(2, "100mbit") as lab:
        before = lab.bytes_received()
        argv = [sys.executable, "-c", EXCHANGE]
        done = lab.run(argv, {"OKRT_LAB_TEST": "hello"}, capture_output=True, text=True)
        received = [after - start for start, after in zip(before, lab.bytes_received(), strict=True)]
        failed = lab.run(["sh", "-c", "exit 3"])
    assert done.returncode == 0, done.stderr
    # The launcher may pass on the lines of two ranks without the break between them.
    assert sorted(re.findall(r"rank \d of 2 hello", done.stdout)) == ["rank 0 of 2 hello", "rank 1 of 2 hello"]
    assert all(200_000 < count < 400_000 for count in received)
    assert failed.returncode == 3
    assert namespaces(lab.name) == []


@needs_lab
def test_a_dead_rank_ends_the_job() -> None:
    with Lab(2, "100mbit") as lab:
        start = time.monotonic()
        done = lab.run([sys.executable, "-c", DIE], capture_output=True)
    assert done.returncode != 0
    assert time.monotonic() - start < 20


@needs_lab
def test_sigterm_removes_the_lab_and_its_processes() -> None:
    holder, name = start_holder()
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(20) == 128 + signal.SIGTERM
    assert namespaces(name) == []
    assert processes(name) == []


@needs_lab
def test_a_stale_lab_is_removed_by_the_next() -> None:
    holder, name = start_holder()
    holder.kill()
    holder.wait(20)
    assert namespaces(name)
    with Lab(1, "1gbit"):
        assert namespaces(name) == []
        assert processes(name) == []
