"""The CNN on scikit-learn's digits."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from okrt.jobs.cnn_digits import Settings, build
from okrt.train import Task

SMALL = Settings(channels=8, hidden=32)


@pytest.fixture(scope="module")
def task() -> Task:
    return build(SMALL, seed=0)


def test_all_images_are_used_once(task: Task) -> None:
    """Those to train and those to test, seen through a model that returns what it is given."""
    seen: list[torch.Tensor] = []

    class Looks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros(len(x), 10)

    task.loss(Looks(), np.arange(task.train_samples))
    task.figures(Looks(), np.arange(task.eval_samples))
    shown = torch.cat(seen).reshape(-1, 64).numpy() * 16
    images = load_digits(return_X_y=True)[0]
    np.testing.assert_array_equal(shown[np.lexsort(shown.T)], images[np.lexsort(images.T)])
    assert task.eval_samples == int(0.2 * len(images))


def test_the_split_does_not_depend_on_the_seed(task: Task) -> None:
    other = build(SMALL, seed=5)
    numbers = np.arange(50)
    with torch.no_grad():
        assert task.figures(task.model, numbers) == other.figures(task.model, numbers)
        assert not torch.equal(task.model[0].weight, other.model[0].weight)


def test_figures_are_sums(task: Task) -> None:
    numbers = np.arange(task.eval_samples)
    with torch.no_grad():
        whole = task.figures(task.model, numbers)
        parts = [task.figures(task.model, part) for part in np.split(numbers, [100])]
    assert list(whole) == ["loss", "accuracy"]
    for name in whole:
        assert whole[name] == pytest.approx(sum(part[name] for part in parts), rel=1e-5)


def test_it_learns(task: Task) -> None:
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = np.random.default_rng(0)
    for _ in range(80):
        optimizer.zero_grad()
        task.loss(model, random.integers(0, task.train_samples, 64)).backward()
        optimizer.step()
    with torch.no_grad():
        right = task.figures(model, np.arange(task.eval_samples))["accuracy"]
    assert right > 0.85 * task.eval_samples
