"""A byte-level LSTM on the source text of Python's standard library: the data of gpt_bytes, quite another model."""

import torch
from pydantic import Field
from torch import nn

from okrt.jobs.library import TextSettings, text_task
from okrt.train import Task


class Settings(TextSettings):
    """The [task] table of the job."""

    layers: int = Field(1, ge=1)
    width: int = Field(256, ge=1)
    """cells of a layer, and size of the vectors that stand for bytes"""


class Lstm(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.byte = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, settings.layers, batch_first=True)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.byte.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.byte(text))
        return self.norm(hidden) @ self.byte.weight.T


def build(settings: Settings, seed: int) -> Task:
    torch.manual_seed(seed)
    return text_task(Lstm(settings), settings)
