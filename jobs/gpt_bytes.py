"""A byte-level GPT on the source text of Python's standard library: real data on every machine."""

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from okrt.jobs.library import TextSettings, text_task
from okrt.train import Task


class Settings(TextSettings):
    """The [task] table of the job."""

    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(112, ge=1)
    """size of the vectors; a multiple of heads"""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Projections into the residual stream start smaller, so that its variance does not grow with depth.
                shrink = (2 * settings.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * shrink)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))
        return self.norm(self.blocks(x)) @ self.byte.weight.T


def build(settings: Settings, seed: int) -> Task:
    torch.manual_seed(seed)
    return text_task(Gpt(settings), settings)
