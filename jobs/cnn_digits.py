"""A small convolutional network on scikit-learn's bundled digits: 1,797 real images of 8 by 8."""

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F

from okrt.errors import UsageError
from okrt.train import Task


class Settings(BaseModel):
    """The [task] table of the job."""

    model_config = ConfigDict(extra="forbid")

    channels: int = Field(32, ge=1)
    """of the first layer; the second has twice as many"""
    hidden: int = Field(128, ge=1)
    held_out: float = Field(0.2, gt=0, lt=1)
    """share of the images that tests the model; the split never changes"""


def network(settings: Settings) -> nn.Module:
    channels, hidden = settings.channels, settings.hidden
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def build(settings: Settings, seed: int) -> Task:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("cnn_digits needs scikit-learn: pip install 'okrt[digits]'") from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order].astype(np.float32) / 16).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels[order].astype(np.int64))
    tested = int(settings.held_out * len(y))
    torch.manual_seed(seed)

    def figures(model: nn.Module, numbers: np.ndarray) -> dict[str, float]:
        scores, right = model(x[:tested][numbers]), y[:tested][numbers]
        loss = F.cross_entropy(scores, right, reduction="sum")
        return {"loss": float(loss), "accuracy": float((scores.argmax(1) == right).sum())}

    return Task(
        model=network(settings),
        train_samples=len(y) - tested,
        loss=lambda model, numbers: F.cross_entropy(model(x[tested:][numbers]), y[tested:][numbers]),
        eval_samples=tested,
        figures=figures,
        data=f"real: scikit-learn's digits, {len(y) - tested} to train and {tested} to test",
    )
