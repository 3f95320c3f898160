"""BERT pre-training: its size, text read from files, word pieces, and how samples are made."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from okrt.errors import UsageError
from okrt.jobs.bert_wikipedia import (
    SPECIAL,
    Bert,
    Pair,
    Sentences,
    Settings,
    Vocabulary,
    batch,
    build,
    split_words,
    synthetic_pairs,
)
from okrt.jobs.files import Folder

SMALL = Settings(layers=1, heads=2, width=32, words=400, length=48, places=48, eval_samples=24)
PIECES = [*SPECIAL, "un", "##aff", "##able", "##un", "the", "cat", "##s", "sat", ".", ",", "mat", "cafe", "中", "$"]
PIECES += [f"word{i}" for i in range(32 - len(PIECES))]
NUMBER = {piece: i for i, piece in enumerate(PIECES)}


def numbers(*pieces: str) -> list[int]:
    return [NUMBER[piece] for piece in pieces]


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    documents = [[f"word{d} the cat{'s' * (i % 2)} sat." for i in range(4)] for d in range(6)]
    text = "\n".join("".join(f"{line}\n" for line in document) for document in documents)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("the mat\non the mat\n\n\nalone\n\nthe end\nwithout a break")
    return tmp_path


def small(wiki: Path, **changed: object) -> Settings:
    return SMALL.model_copy(update={"path": str(wiki), "words": len(PIECES), "eval_samples": 5} | changed)


def test_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Bert(Settings()).parameters()) == 133_547_324


def test_lines_and_pairs_are_read_back(wiki: Path) -> None:
    sentences = Sentences(Folder(str(wiki), {}))
    lines = (wiki / "a.txt").read_text().split("\n")[:-1] + (wiki / "b.txt").read_text().split("\n")
    assert [sentences[i].rstrip("\n") for i in range(len(lines))] == lines
    within = len((wiki / "a.txt").read_text().split("\n")) - 2  # the last line of a.txt has no next one
    assert sentences.pairs.tolist() == [i for i in range(len(lines) - 1) if lines[i] and lines[i + 1] and i != within]
    assert sentences.pairs.size == 6 * 3 + 2


def test_word_pieces(wiki: Path) -> None:
    vocabulary = Vocabulary(Folder(str(wiki), {}), len(PIECES))
    assert vocabulary.pieces("The cats sat, unaffable.") == numbers(
        "the", "cat", "##s", "sat", ",", "un", "##aff", "##able", "."
    )
    assert vocabulary.pieces("Café xyz 中中 $ catx") == numbers("cafe", "[UNK]", "中", "中", "$", "[UNK]")
    assert vocabulary.pieces("ununs") == numbers("un", "##un", "##s")
    assert vocabulary.pieces(" \x00\n") == numbers("[UNK]")
    assert split_words("A\u0300\tb-c\u200bd «e»") == ["a", "b", "-", "cd", "«", "e", "»"]


def test_text_in_samples_is_that_of_the_files(wiki: Path) -> None:
    task = build(small(wiki), 1)
    assert task.data.startswith("real: 14 pairs of sentences, 3 files")
    assert (task.train_samples, task.eval_samples) == (14, 5)
    assert np.isfinite(task.loss(task.model, np.arange(14)).item())
    assert np.isfinite(task.figures(task.model, np.arange(5))["loss"])


def test_damaged_files_are_named(wiki: Path) -> None:
    with pytest.raises(UsageError, match=f"vocab.txt has {len(PIECES)} lines, but task.words is 400"):
        build(small(wiki, words=400), 1)
    with pytest.raises(UsageError, match="20 pairs"):
        build(small(wiki, eval_samples=19), 1)
    good = hashlib.sha256((wiki / "a.txt").read_bytes()).hexdigest()
    build(small(wiki, sha256={"a.txt": good}), 1)
    (wiki / "a.txt").write_bytes((wiki / "a.txt").read_bytes()[:-1])
    with pytest.raises(UsageError, match=f"a.txt is altered.*expected {good}"):
        build(small(wiki, sha256={"a.txt": good}), 1)
    (wiki / "b.txt").write_bytes(b"one\r\ntwo\r\n\r\n")
    with pytest.raises(UsageError, match=r"b.txt has carriage returns"):
        build(small(wiki), 1)
    (wiki / "b.txt").write_bytes(b"one\ntw\xff\n")
    with pytest.raises(UsageError, match=r"b.txt is not UTF-8 text in line 2"):
        Sentences(Folder(str(wiki), {}))[30]
    (wiki / "vocab.txt").write_text("the\ncat\n")
    with pytest.raises(UsageError, match=r"vocab.txt has no \[PAD\]"):
        build(small(wiki), 1)
    (wiki / "vocab.txt").unlink()
    with pytest.raises(UsageError, match=r"vocab.txt is missing"):
        build(small(wiki), 1)


def test_sizes_that_do_not_fit_are_an_error() -> None:
    for changed in ({"heads": 5}, {"places": 47}, {"sha256": {"a.txt": "0" * 64}}):
        with pytest.raises(UsageError, match=next(iter(changed))):
            build(SMALL.model_copy(update=changed), 1)


def test_masks_as_the_paper_of_bert_says() -> None:
    settings = SMALL.model_copy(update={"words": 10_000, "length": 128})
    first, second = list(range(100, 160)), list(range(200, 240))
    special = (0, 1, 2, 3, 4)
    made = batch(lambda number, rng: Pair(first, second, True), np.arange(400), (5, 0), special, settings)
    sample = [2, *first, 3, *second, 3]
    assert made.words.shape == (400, len(sample)) and made.visible.all()
    assert made.sentences[0].tolist() == [0] * 62 + [1] * 41
    original = torch.tensor(sample).expand(400, -1)
    assert (made.masked.sum(1) == 15).all()
    assert torch.equal(made.answers, original[made.masked])
    assert torch.equal(made.words[~made.masked], original[~made.masked])
    assert not made.masked[:, [0, 61, 102]].any() and made.masked[:, 1:61].any(0).all()
    shown = made.words[made.masked]
    hidden, left = (shown == 4).float().mean(), (shown == made.answers).float().mean()
    assert hidden.item() == pytest.approx(0.8, abs=0.02) and left.item() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("sizes", [(100, 3), (3, 100), (100, 100), (20, 25), (1, 1)])
def test_long_pairs_are_cut_and_short_ones_padded(sizes: tuple[int, int]) -> None:
    pairs = [Pair([9] * sizes[0], [8] * sizes[1], False), Pair([7], [6], True)]
    made = batch(lambda number, rng: pairs[number], np.arange(2), (5, 0), (0, 1, 2, 3, 4), SMALL)
    assert made.words.shape[1] == min(SMALL.length, sum(sizes) + 3)
    assert made.visible.sum(1).tolist() == [made.words.shape[1], 5]
    kept = [int((made.sentences[0] == 0).sum()) - 2, int((made.sentences[0] == 1).sum()) - 1]
    assert all(k == size or k >= 22 for k, size in zip(kept, sizes, strict=True))
    assert made.is_next.tolist() == [0, 1]


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    def words(numbers: list[int], seed: int) -> torch.Tensor:
        return batch(synthetic_pairs(SMALL), np.array(numbers), (seed, 0), (0, 1, 2, 3, 4), SMALL).words

    alone, among = words([11], 3)[0], words([4, 11, 999_999], 3)[1]
    assert torch.equal(alone, among[: alone.numel()]) and not among[alone.numel() :].any()
    other = words([11], 4)[0]
    assert other.shape != alone.shape or not torch.equal(other, alone)


def test_padding_is_not_seen() -> None:
    torch.manual_seed(0)
    model = Bert(SMALL).eval()
    made = batch(synthetic_pairs(SMALL), np.arange(6), (1, 0), (0, 1, 2, 3, 4), SMALL)
    garbled = torch.where(made.visible, made.words, 17)
    assert not made.visible.all()
    with torch.no_grad():
        clean = model(made.words, made.sentences, made.visible, made.masked)
        dirty = model(garbled, made.sentences, made.visible, made.masked)
    for a, b in zip(clean, dirty, strict=True):
        torch.testing.assert_close(a, b)


def test_learns_and_evaluates() -> None:
    task = build(SMALL, 1)
    assert task.data.startswith("synthetic:")
    optimizer = torch.optim.SGD(task.model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = task.loss(task.model, np.arange(step * 16, step * 16 + 16))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.any() for p in task.model.parameters())
    assert np.mean(losses[-5:]) < 0.93 * np.mean(losses[:5])
    task.model.eval()
    with torch.no_grad():
        whole = task.figures(task.model, np.arange(24))
        parts = [task.figures(task.model, np.arange(i, i + 8)) for i in (0, 8, 16)]
    assert list(whole) == ["loss", "masked_lm_loss"]
    for name, value in whole.items():
        assert value == pytest.approx(sum(p[name] for p in parts), rel=1e-5)


def test_first_loss_is_that_of_guessing() -> None:
    task = build(SMALL, 1)
    guess = np.log(SMALL.words) + np.log(2)
    assert task.loss(task.model, np.arange(32)).item() == pytest.approx(guess, rel=0.03)


def test_same_seed_same_task() -> None:
    losses = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        task = build(SMALL, seed)
        losses[name] = task.loss(task.model, np.array([3, 900])).item()
    assert losses["a"] == losses["b"] != losses["c"]
