"""The byte-level GPT: its data are real, and it predicts from the past only."""

import copy
import math

import numpy as np
import pytest
import torch

from okrt.jobs.gpt_bytes import Settings, build
from okrt.jobs.library import library_text
from okrt.train import Task

SMALL = Settings(width=16, layers=1, context=32, text_mb=0.1, eval_samples=40)


@pytest.fixture(scope="module")
def task() -> Task:
    return build(SMALL, seed=0)


def test_the_text_is_python_and_always_the_same() -> None:
    text = library_text(50_000)
    assert text.size == 50_000
    assert b"import" in text.tobytes()
    np.testing.assert_array_equal(text, library_text(100_000)[:50_000])


def test_size_of_the_job() -> None:
    parameters = sum(p.numel() for p in build(Settings(text_mb=0.1), 0).model.parameters())
    assert 0.55e6 < parameters < 0.70e6


def test_every_sample_is_inside(task: Task) -> None:
    assert "real" in task.data
    ends = np.array([0, task.train_samples - 1])
    with torch.no_grad():
        assert math.isfinite(task.loss(task.model, ends))
        assert math.isfinite(task.figures(task.model, np.array([0, SMALL.eval_samples - 1]))["loss"])


def test_it_starts_at_chance(task: Task) -> None:
    """A model that knows nothing needs log(256) nats a byte."""
    with torch.no_grad():
        assert float(task.loss(task.model, np.arange(16))) == pytest.approx(math.log(256), abs=0.1)


def test_figures_are_sums(task: Task) -> None:
    with torch.no_grad():
        numbers = np.arange(SMALL.eval_samples)
        parts = sum(task.figures(task.model, part)["loss"] for part in np.split(numbers, [3, 20]))
        assert task.figures(task.model, numbers)["loss"] == pytest.approx(parts, rel=1e-5)


def test_no_look_into_the_future(task: Task) -> None:
    text = torch.randint(0, 256, (1, SMALL.context), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    with torch.no_grad():
        before, after = task.model(text), task.model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_the_seed_decides_the_start(task: Task) -> None:
    same, other = (build(SMALL, seed).model.byte.weight for seed in (0, 1))
    assert torch.equal(task.model.byte.weight, same)
    assert not torch.equal(task.model.byte.weight, other)


def test_it_learns(task: Task) -> None:
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        optimizer.zero_grad()
        task.loss(model, np.arange(8) + 800 * step).backward()
        optimizer.step()
    with torch.no_grad():
        numbers = np.arange(SMALL.eval_samples)
        assert task.figures(model, numbers)["loss"] / SMALL.eval_samples < 4.5
