"""The source text of Python's standard library as a task for byte-level language models: real data on every machine."""

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


class TextSettings(BaseModel):
    """What the [task] tables of these jobs have in common."""

    model_config = ConfigDict(extra="forbid")

    context: int = Field(64, ge=1)
    """bytes that a prediction can look back at"""
    text_mb: float = Field(8.0, gt=0)
    """of the standard library, at most; the last tenth is held out"""
    eval_samples: int = Field(512, ge=1)


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


def text_task(model: nn.Module, settings: TextSettings) -> Task:
    """The model maps bytes (batch, length) to scores (batch, length, 256) of the byte that follows each."""
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
