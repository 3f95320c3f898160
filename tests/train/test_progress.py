"""What rank 0 tells, into a file and into a terminal."""

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from okrt.train.progress import Progress

DENSE_BYTES = 8000.0


def rows(loss: float = 2.0) -> np.ndarray:
    """Two ranks: loss, step_s, comm_s, idle_s, selected, bytes_received, words_over_k, stop."""
    return np.array([[loss - 1, 0.5, 0.3, 0.1, 10, 400, 3, 0], [loss + 1, 0.4, 0.3, 0.2, 10, 200, 3, 0]])


def told(file: StringIO, speaks: bool = True, steps: int = 7, **figures: float) -> list[str]:
    console = Console(file=file, width=132)
    with Progress(console, speaks, steps, log_every=3, dense_bytes=DENSE_BYTES) as progress:
        for step in range(1, steps + 1):
            progress.step(step, rows(), figures if step == 5 else {}, samples=16)
    return file.getvalue().splitlines()


def test_lines_of_a_log() -> None:
    lines = told(StringIO(), loss=1.25, accuracy=0.5)
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "5/7", "6/7"]
    # By hand: mean loss of the ranks, 16 samples in 0.5 s, 0.2 of 0.5 s waited, 8000 bytes over 400.
    assert (
        lines[0] == "step 1/7  loss 2.0000  32 samples/s  waiting for communication 40 %  20.0x fewer bytes than dense"
    )
    assert lines[2].endswith("held out: loss 1.2500, accuracy 0.5000")
    assert not any("\x1b" in line for line in lines)


def test_other_ranks_say_nothing() -> None:
    file = StringIO()
    assert told(file, speaks=False, loss=1.0) == []
    with Progress(Console(file=file), False, 1, 1, DENSE_BYTES) as progress:
        progress.log("resumed")
    assert file.getvalue() == ""


@pytest.mark.parametrize("text", ["into runs/[a]/[/b]: [Errno 28] :warning: 12", "x" * 300])
def test_a_log_line_is_written_as_it_is(text: str) -> None:
    file = StringIO()
    with Progress(Console(file=file, width=132), True, 1, 1, DENSE_BYTES) as progress:
        progress.log(text)
    assert file.getvalue() == f"{text}\n"


@contextmanager
def terminal() -> Iterator[tuple[Any, int]]:
    """A file that is a terminal, and the other end of it."""
    master, slave = os.openpty()
    try:
        with open(slave, "w") as file:
            yield file, master
    finally:
        os.close(master)


def read_until(master: int, text: str, limit_s: float = 20) -> str:
    seen = b""
    end = time.monotonic() + limit_s
    while text.encode() not in seen and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
    return seen.decode()


def test_a_live_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is shown in one place; only what is evaluated stays."""
    monkeypatch.setenv("TERM", "xterm")
    with (
        terminal() as (file, master),
        Progress(Console(file=file, width=160), True, 100, log_every=50, dense_bytes=DENSE_BYTES) as progress,
    ):
        for step in (1, 2, 3):
            progress.step(step, rows(), {}, 16)
            seen = read_until(master, f"step {step}/100")
            assert f"step {step}/100  loss 2.0000  32 samples/s" in seen
            assert "\n" not in seen, "the line stays where it is"
        progress.step(4, rows(), {"loss": 1.5}, 16)
        assert "held out: loss 1.5000\r\n" in read_until(master, "held out: loss 1.5000\r\n")
