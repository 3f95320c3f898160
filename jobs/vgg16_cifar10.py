"""VGG-16 for CIFAR-10, the first job of the Ok-Topk paper: batch norm, one linear classifier, 14,728,266 parameters."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F

from okrt.errors import UsageError
from okrt.jobs.files import Folder, Sums
from okrt.train import Task

CLASSES = 10
BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
TEST = "test_batch"
# Published for the files of the Python version.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3c3",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
BLOCKS = [(64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)]  # a pooling after each
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

Images = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Pixels (n, 3, 32, 32) uint8 and labels (n,) int64 of the samples of these numbers."""


class Settings(BaseModel):
    """The [task] table of the job."""

    model_config = ConfigDict(extra="forbid")

    path: str = ""
    """folder of the binary or the Python version; empty: synthetic images"""
    sha256: Sums = {}
    """sums of files, in place of the published ones"""
    images_per_file: int = Field(10_000, ge=1)
    """five files for training, one held out"""
    width: float = Field(1.0, gt=0, le=1)
    """share of VGG-16's channels"""
    augment: bool = True
    """crops and mirror images in training, drawn from torch's generator"""


class Vgg(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for block in BLOCKS:
            for full in block:
                wide = max(1, round(full * settings.width))
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


class Inert:
    """Takes the place of every class and function that a pickle may name: keeps what it is given, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class ArraysOnly(pickle.Unpickler):
    """Reads dicts, lists, strings and NumPy arrays (as `Inert`); a pickle that names anything else is refused."""

    NAMES = (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )

    def find_class(self, module: str, name: str) -> type[Inert]:
        if (module, name) in self.NAMES:
            return Inert
        raise UsageError(f"it names {module}.{name}, and only NumPy arrays are read")


def read_pickle(file: Path, opened: Any, images: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = ArraysOnly(opened, encoding="bytes").load()
        array, labels = content[b"data"], np.array(content[b"labels"], np.int64)
        _, shape, dtype, by_columns, raw = array.state
        (kind, *_), shape = dtype.arguments, tuple(shape)
    except UsageError as error:
        raise UsageError(f"{file} is refused: {error}") from None
    except Exception as error:
        raise UsageError(f"{file} is not a batch of CIFAR-10's Python version: {error!r}") from None
    if kind not in (b"u1", "u1") or shape != (images, 3072) or by_columns or labels.shape != (images,):
        raise UsageError(f"{file} holds {kind!r} {shape} with {labels.size} labels, expected 'u1' {(images, 3072)}")
    if not isinstance(raw, bytes) or len(raw) != images * 3072:
        raise UsageError(f"{file} is cut short: its array does not have the bytes of {images} images")
    return np.frombuffer(raw, np.uint8), labels


def read_cifar(folder: Folder, images: int) -> tuple[Images, Images]:
    """Training and test images, of whichever version the folder holds; the binary one if both."""

    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        if binary:
            records = np.frombuffer(folder.read(name + ".bin", size=images * 3073), np.uint8).reshape(images, 3073)
            pixels, labels = records[:, 1:], records[:, 0].astype(np.int64)
        else:
            pixels, labels = read_pickle(folder.root / name, folder.read(name, MD5[name]), images)
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise UsageError(f"{folder.root / name} has labels {labels.min()} to {labels.max()}, expected 0 to 9")
        return pixels.reshape(images, 3, 32, 32), labels

    binary = folder.has(BATCHES[0] + ".bin")
    if not binary and not folder.has(BATCHES[0]):
        raise UsageError(f"{folder.root} has neither data_batch_1.bin nor data_batch_1: task.path should hold CIFAR-10")
    pixels, labels = (np.concatenate(parts) for parts in zip(*map(read, BATCHES), strict=True))
    test_pixels, test_labels = read(TEST)
    return (lambda numbers: (pixels[numbers], labels[numbers])), (
        lambda numbers: (test_pixels[numbers], test_labels[numbers])
    )


def synthetic(seed: int, split: int) -> Images:
    """Each class has a coarse pattern of its own, under noise of twice its size."""
    coarse = np.random.default_rng(seed).standard_normal((CLASSES, 3, 4, 4))
    patterns = coarse.repeat(8, axis=2).repeat(8, axis=3)

    def image(number: int) -> np.ndarray:
        noise = np.random.default_rng([seed, split, number]).standard_normal((3, 32, 32))
        return np.clip(128 + 25 * patterns[number % CLASSES] + 50 * noise, 0, 255).astype(np.uint8)

    return lambda numbers: (np.stack([image(n) for n in numbers.tolist()]), numbers % CLASSES)


def crop_and_mirror(images: torch.Tensor) -> torch.Tensor:
    """Each moved by up to four pixels, zeros coming in, and mirrored one time in two."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1))
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def build(settings: Settings, seed: int) -> Task:
    torch.manual_seed(seed)
    model = Vgg(settings)
    if settings.path:
        folder = Folder(settings.path, settings.sha256)
        train, test = read_cifar(folder, settings.images_per_file)
        data = f"real: CIFAR-10, {folder.describe()}"
    else:
        if settings.sha256:
            raise UsageError("task.sha256 is given without task.path: synthetic images have no files")
        train, test = synthetic(seed, 0), synthetic(seed, 1)
        data = "synthetic: noisy patterns in the shape of CIFAR-10"
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))

    def batch(images: Images, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = images(numbers)
        return (torch.from_numpy(pixels) / 255 - mean) / std, torch.from_numpy(labels)

    def loss(model: nn.Module, numbers: np.ndarray) -> torch.Tensor:
        images, labels = batch(train, numbers)
        return F.cross_entropy(model(crop_and_mirror(images) if settings.augment else images), labels)

    def figures(model: nn.Module, numbers: np.ndarray) -> dict[str, float]:
        images, labels = batch(test, numbers)
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum").item(),
            "accuracy": float((logits.argmax(1) == labels).sum().item()),
        }

    return Task(
        model=model,
        train_samples=len(BATCHES) * settings.images_per_file,
        loss=loss,
        eval_samples=settings.images_per_file,
        figures=figures,
        data=data,
    )
