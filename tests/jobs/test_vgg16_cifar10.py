"""VGG-16 on CIFAR-10: its size, both file formats, and that no pickle runs anything."""

import hashlib
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from okrt.errors import UsageError
from okrt.jobs.files import Folder
from okrt.jobs.vgg16_cifar10 import BATCHES, TEST, Settings, Vgg, build, crop_and_mirror, read_cifar

IMAGES = 12
SMALL = Settings(images_per_file=IMAGES, width=0.125)
NAMES = [*BATCHES, TEST]


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of a batch as Python 2 and the NumPy of that time wrote it."""

    def string(s: bytes) -> bytes:
        return b"U" + bytes([len(s)]) + s

    raw = pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + string(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(b"M" + struct.pack("<H", n) for n in pixels.shape) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<I", len(raw)) + raw + b"tb"
    label_list = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"](" + string(b"a.png") + b"e"
    content = {b"batch_label": string(b"batch 1"), b"labels": label_list, b"data": array, b"filenames": names}
    return b"\x80\x02}(" + b"".join(string(key) + value for key, value in content.items()) + b"u."


def write_python(root: Path, name: str, content: bytes, sums: dict[str, str]) -> None:
    (root / name).write_bytes(content)
    sums[name] = hashlib.sha256(content).hexdigest()


def random_images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return {n: (rng.integers(0, 256, (IMAGES, 3072), np.uint8), rng.integers(0, 10, IMAGES)) for n in NAMES}


@pytest.fixture
def python_version(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    sums: dict[str, str] = {}
    for name, (pixels, labels) in random_images().items():
        write_python(tmp_path, name, python2_batch(pixels, labels.tolist()), sums)
    return tmp_path, sums


@pytest.fixture
def binary_version(tmp_path: Path) -> Path:
    for name, (pixels, labels) in random_images().items():
        records = b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, pixels, strict=True))
        (tmp_path / f"{name}.bin").write_bytes(records)
    return tmp_path


def check_read_back(folder: Folder) -> None:
    train, test = read_cifar(folder, IMAGES)
    written = random_images()
    for i, name in enumerate(BATCHES):
        pixels, labels = train(np.arange(i * IMAGES, (i + 1) * IMAGES))
        np.testing.assert_array_equal(pixels.reshape(IMAGES, 3072), written[name][0])
        np.testing.assert_array_equal(labels, written[name][1])
    pixels, labels = test(np.array([5, 2]))
    np.testing.assert_array_equal(pixels[1].ravel(), written[TEST][0][2])
    assert labels.tolist() == written[TEST][1][[5, 2]].tolist()


def test_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Vgg(Settings()).parameters()) == 14_728_266


def test_binary_version_is_read_back(binary_version: Path) -> None:
    check_read_back(Folder(str(binary_version), {}))
    task = build(SMALL.model_copy(update={"path": str(binary_version)}), 1)
    assert task.data.startswith("real: CIFAR-10, 6 files")
    assert (task.train_samples, task.eval_samples) == (5 * IMAGES, IMAGES)


def test_python_version_is_read_back(python_version: tuple[Path, dict[str, str]]) -> None:
    root, sums = python_version
    content = pickle.loads(python2_batch(np.arange(6, dtype=np.uint8).reshape(2, 3), [7, 8]), encoding="bytes")
    assert content[b"data"].tolist() == [[0, 1, 2], [3, 4, 5]] and content[b"labels"] == [7, 8]
    check_read_back(Folder(str(root), sums))


def test_pickles_of_today_are_read_too(tmp_path: Path) -> None:
    sums: dict[str, str] = {}
    for name, (pixels, labels) in random_images().items():
        write_python(tmp_path, name, pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, 3), sums)
    check_read_back(Folder(str(tmp_path), sums))


def test_python_version_has_published_sums(python_version: tuple[Path, dict[str, str]]) -> None:
    root, sums = python_version
    with pytest.raises(UsageError, match=r"data_batch_1 is altered.*md5.*c99cafc152244af753f735de768cd75f"):
        read_cifar(Folder(str(root), {}), IMAGES)
    del sums[TEST]
    with pytest.raises(UsageError, match=r"test_batch is altered.*40351d587109b95175f43aff81a1287e"):
        read_cifar(Folder(str(root), sums), IMAGES)


class Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_malicious_pickle_does_nothing(python_version: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, sums = python_version
    made = tmp_path / "made"
    content = pickle.dumps({b"data": Malicious(made), b"labels": [0] * IMAGES}, 3)
    pickle.loads(content)
    made.rmdir()  # it does work where it is let
    write_python(root, "data_batch_2", content, sums)
    with pytest.raises(UsageError, match=r"data_batch_2 is refused: it names posix\.mkdir"):
        read_cifar(Folder(str(root), sums), IMAGES)
    assert not made.exists()


@pytest.mark.parametrize("name", ["builtins eval", "numpy load", "numpy.core.multiarray scalar", "os system"])
def test_other_names_are_refused(python_version: tuple[Path, dict[str, str]], name: str) -> None:
    root, sums = python_version
    write_python(root, TEST, b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n.", sums)
    with pytest.raises(UsageError, match=f"test_batch is refused: it names {name.replace(' ', '.')}"):
        read_cifar(Folder(str(root), sums), IMAGES)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}.",
        b"nonsense",
        pickle.dumps([1, 2], 2),
        pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.int8), b"labels": [0] * IMAGES}, 3),
        pickle.dumps({b"data": np.array([[None] * 3072] * IMAGES), b"labels": [0] * IMAGES}, 3),
        pickle.dumps({b"data": np.zeros((IMAGES - 1, 3072), np.uint8), b"labels": [0] * (IMAGES - 1)}, 3),
        pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.uint8), b"labels": [0]}, 3),
        pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.uint8), b"labels": [10] * IMAGES}, 3),
        python2_batch(np.zeros((IMAGES, 3072), np.uint8), [0] * IMAGES)[:-500],
    ],
)
def test_pickles_of_something_else_are_refused(python_version: tuple[Path, dict[str, str]], content: bytes) -> None:
    root, sums = python_version
    write_python(root, "data_batch_3", content, sums)
    with pytest.raises(UsageError, match="data_batch_3"):
        read_cifar(Folder(str(root), sums), IMAGES)


def test_missing_short_and_altered_binary_files_are_named(binary_version: Path) -> None:
    def read(**sums: str) -> None:
        read_cifar(Folder(str(binary_version), sums), IMAGES)

    file = binary_version / "data_batch_4.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UsageError, match=rf"data_batch_4.bin has {len(content) - 1} bytes, expected {len(content)}"):
        read()
    file.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(UsageError, match="data_batch_4 has labels"):
        read()
    file.unlink()
    with pytest.raises(UsageError, match=r"data_batch_4.bin is missing"):
        read()
    with pytest.raises(UsageError, match=r"neither data_batch_1.bin nor data_batch_1"):
        (binary_version / "data_batch_1.bin").unlink()
        read()


def test_sums_without_files_are_an_error() -> None:
    with pytest.raises(UsageError, match="sha256"):
        build(Settings(sha256={"data_batch_1.bin": "0" * 64}), 1)


def test_learns_and_evaluates() -> None:
    task = build(SMALL.model_copy(update={"images_per_file": 100}), 1)
    assert task.data.startswith("synthetic:")
    optimizer = torch.optim.SGD(task.model.parameters(), 0.02, momentum=0.9)
    losses = []
    for step in range(14):
        optimizer.zero_grad()
        loss = task.loss(task.model, np.arange(step * 32, step * 32 + 32) % task.train_samples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    task.model.eval()
    with torch.no_grad():
        whole = task.figures(task.model, np.arange(12))
        parts = [task.figures(task.model, np.arange(i, i + 4)) for i in (0, 4, 8)]
    assert list(whole) == ["loss", "accuracy"]
    assert 0 <= whole["accuracy"] <= 12 and whole["accuracy"] == int(whole["accuracy"])
    assert whole["loss"] == pytest.approx(sum(p["loss"] for p in parts), rel=1e-5)


def test_same_seed_same_task() -> None:
    losses = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        task = build(SMALL, seed)
        losses[name] = task.loss(task.model, np.arange(20, 28)).item()
    assert losses["a"] == losses["b"] != losses["c"]


def test_crop_and_mirror_moves_by_four_pixels_at_most() -> None:
    torch.manual_seed(0)
    images = torch.zeros(200, 3, 32, 32)
    images[:, :, 10, 20] = torch.tensor([1.0, 2.0, 3.0])
    moved = crop_and_mirror(images)
    assert moved.shape == images.shape
    image, channel, row, column = moved.nonzero(as_tuple=True)
    assert len(image) == 600 and torch.equal(moved[image, channel, row, column], channel + 1.0)
    assert set(row.tolist()) == set(range(6, 15))
    assert set(column.tolist()) == {*range(16, 25), *range(31 - 24, 31 - 15)}
