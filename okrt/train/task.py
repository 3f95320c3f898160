"""What a job trains: the interface between the training loop and a job's own module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it takes seconds to load, and whoever reads metrics does without it
    import torch


@dataclass(frozen=True)
class Task:
    """Made by `build(settings, seed)` in the module that a job names, alike on every rank.

    Samples are known by their number: the loop decides which rank takes which, so that nothing is taken twice.
    """

    model: "torch.nn.Module"
    train_samples: int
    loss: "Callable[[torch.nn.Module, np.ndarray], torch.Tensor]"
    """loss(model, numbers): the mean loss over the training samples of these numbers (int64)"""
    eval_samples: int
    figures: "Callable[[torch.nn.Module, np.ndarray], dict[str, float]]"
    """figures(model, numbers): sums over these held-out samples, "loss" first; over eval_samples they are means"""
    data: str
    """one line for the log: where the data come from, and whether they are real or synthetic"""
