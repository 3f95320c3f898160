"""Start-up of a single process; tests/mpi and tests/faults have several."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import okrt
from okrt.errors import (
    DtypeError,
    NonFiniteGradient,
    PeerError,
    PlanMismatch,
    StallError,
    UsageError,
    exit_code,
)
from okrt.world import World, install_abort_hook, launcher_size, positive_setting


@pytest.fixture
def hooks() -> Iterator[None]:
    before = sys.excepthook, threading.excepthook
    install_abort_hook()
    yield
    sys.excepthook, threading.excepthook = before


def test_init_is_idempotent() -> None:
    assert okrt.init() is okrt.init()


def test_threads_are_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(local_size: int) -> int:
        return World(None, 0, 1, 0, local_size, 1.0, None).threads

    monkeypatch.setenv("OKRT_THREADS", "3")
    assert threads(1) == 3
    monkeypatch.delenv("OKRT_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert [threads(local_size) for local_size in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]
    # Four ranks on a node, this one with cores of its own, or with one more that has the same.
    assert [World(None, 0, 4, 0, 4, 1.0, None, sharers).threads for sharers in (1, 2)] == [8, 4]


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0)])
def test_gpus_are_dealt_out_by_local_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert World(None, 5, 8, local_rank, 3, 1.0, None).device == torch.device("cuda", index)


@pytest.mark.parametrize("text", ["0", "-2", "many", "", "nan"])
@pytest.mark.parametrize(("name", "kind"), [("OKRT_THREADS", int), ("OKRT_TIMEOUT_S", float)])
def test_bad_settings(monkeypatch: pytest.MonkeyPatch, name: str, kind: type, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}={text}: a positive number is needed"):
        positive_setting(name, kind)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKRT_TIMEOUT_S", "2.5")
    assert positive_setting("OKRT_TIMEOUT_S", float) == 2.5
    monkeypatch.delenv("OKRT_TIMEOUT_S")
    assert positive_setting("OKRT_TIMEOUT_S", float) is None
    monkeypatch.setenv("OKRT_THREADS", "1.5")
    with pytest.raises(UsageError):
        positive_setting("OKRT_THREADS", int)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_launcher_size(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(other, raising=False)
    assert launcher_size() is None
    monkeypatch.setenv(name, "12")
    assert launcher_size() == (name, 12)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("x"), 64) for kind in (UsageError, DtypeError, PlanMismatch, NonFiniteGradient)),
        (StallError("x"), 70),
        (OSError("x"), 74),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
    assert isinstance(error, ValueError) == (code == 64)


def test_peer_error_is_a_mistake_of_another() -> None:
    assert not isinstance(PeerError("x"), StallError)


@pytest.mark.usefixtures("hooks")
def test_alone_an_error_is_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("broken on purpose")
    sys.excepthook(RuntimeError, error, None)
    assert "RuntimeError: broken on purpose" in capsys.readouterr().err
