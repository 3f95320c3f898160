"""A byte-level GPT on the source text of Python's standard library: real data on every machine."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F

from okrt.train import Task


class Settings(BaseModel):
    """The [task] table of the job."""

    model_config = ConfigDict(extra="forbid")

    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(112, ge=1)
    """size of the vectors; a multiple of heads"""
    context: int = Field(64, ge=1)
    """bytes that a prediction can look back at"""
    text_mb: float = Field(8.0, gt=0)
    """of the standard library, at most; the last tenth is held out"""
    eval_samples: int = Field(512, ge=1)


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


def library_text(limit_bytes: int) -> np.ndarray:
    """Source files of the standard library, in an order that mixes its packages but never changes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in ("site-packages", "test")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest())
    pieces, length = [], 0
    for file in files:
        if length >= limit_bytes:
            break
        pieces.append(file.read_bytes())
        length += len(pieces[-1])
    return np.frombuffer(b"".join(pieces)[:limit_bytes], np.uint8)


def build(settings: Settings, seed: int) -> Task:
    torch.manual_seed(seed)
    model = Gpt(settings)
    text = library_text(int(settings.text_mb * 1e6))
    held_out = text[-(text.size // 10) :]
    train = text[: -held_out.size]
    checksum = hashlib.sha256(text.tobytes()).hexdigest()
    length = settings.context + 1
    reach = np.arange(length)

    def loss(model: nn.Module, source: np.ndarray, starts: np.ndarray, reduction: str) -> torch.Tensor:
        window = torch.from_numpy(source[starts[:, None] + reach].astype(np.int64))
        return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten(), reduction=reduction)

    def figures(model: nn.Module, numbers: np.ndarray) -> dict[str, float]:
        starts = numbers * (held_out.size - length) // settings.eval_samples
        return {"loss": float(loss(model, held_out, starts, "sum")) / settings.context}

    return Task(
        model=model,
        train_samples=train.size - length,
        loss=lambda model, numbers: loss(model, train, numbers, "mean"),
        eval_samples=settings.eval_samples,
        figures=figures,
        data=f"real: {text.size / 1e6:.1f} MB of Python's standard library, sha256 {checksum[:12]}",
    )
