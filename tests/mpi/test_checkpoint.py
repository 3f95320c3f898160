"""Checkpoints over real MPI, at the number of ranks the run has."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import okrt
from okrt.errors import PeerError, UsageError
from okrt.train.checkpoint import Checkpoints, Saved

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
MODEL = {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.arange(5).bfloat16()}


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same on all ranks."""
    path = Path(COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None))
    yield path
    COMM.barrier()
    if RANK == 0:
        shutil.rmtree(path)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def checkpoints(folder: Path, log: list[str]) -> Checkpoints:
    return Checkpoints(folder, okrt.init().transport, log=log.append)


def residual(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(1000, dtype=np.float32)


def save(checkpoints: Checkpoints, step: int) -> None:
    assert checkpoints.save(step, MODEL, {"residual": residual(RANK, step), "rank": RANK}, {"step": step})


def assert_is(saved: Saved | None, step: int) -> None:
    assert saved is not None
    assert (saved.step, saved.ranks, saved.shared) == (step, SIZE, {"step": step})
    assert len(set(COMM.allgather(str(saved.path)))) == 1
    model = saved.model()
    assert all(model[name].dtype == MODEL[name].dtype and model[name].equal(MODEL[name]) for name in MODEL)
    for rank in range(SIZE):
        own = saved.own(rank)
        np.testing.assert_array_equal(own["residual"], residual(rank, step))
        assert own["rank"] == rank


def names(folder: Path) -> list[str]:
    COMM.barrier()
    found = sorted(path.name for path in folder.iterdir())
    COMM.barrier()
    return found


def test_the_newest_comes_back_on_all_ranks(folder: Path, checkpoints: Checkpoints, log: list[str]) -> None:
    assert checkpoints.newest() is None
    for step in (5, 10, 15):
        save(checkpoints, step)
        assert_is(checkpoints.newest(), step)
    assert names(folder) == ["step_00000010", "step_00000015"]
    assert log == []


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", f"rank_{LAST:05d}.safetensors"])
def test_a_damaged_one_is_passed_over(folder: Path, checkpoints: Checkpoints, log: list[str], name: str) -> None:
    save(checkpoints, 5)
    save(checkpoints, 10)
    if RANK == 0:
        path = folder / "step_00000010" / name
        os.truncate(path, path.stat().st_size - 1)
    COMM.barrier()
    assert_is(checkpoints.newest(), 5)
    assert len(log) == (RANK == 0)
    if RANK == 0:
        assert "step_00000010 is passed over" in log[0]
        assert name in log[0]


def test_a_rank_that_cannot_write(folder: Path, checkpoints: Checkpoints, log: list[str]) -> None:
    """A limit on the size of files makes a write of the last rank fail half-way."""
    save(checkpoints, 5)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == LAST:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        assert not checkpoints.save(10, MODEL, {"x": np.zeros(200_000, np.uint8)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(log) == (RANK == 0)
    if RANK == 0:
        assert f"step 10 not saved in {folder}: rank {LAST}: OSError" in log[0]
    assert names(folder) == ["step_00000005"]
    assert_is(checkpoints.newest(), 5)
    save(checkpoints, 10)
    assert_is(checkpoints.newest(), 10)


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_cannot_keep_is_refused_on_all(folder: Path, checkpoints: Checkpoints) -> None:
    with pytest.raises(UsageError if RANK == LAST else PeerError, match="is a set"):
        checkpoints.save(5, MODEL, {"x": {1} if RANK == LAST else 1}, {})
    assert names(folder) == []
    save(checkpoints, 5)
