"""BERT pre-training, the third job of the Ok-Topk paper: masked words and next sentences, 133,547,324 parameters.

BERT-base (uncased) with pooler and next-sentence head; the decoder of masked words is not tied to the embedding.
"""

import mmap
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F

from okrt.errors import UsageError
from okrt.jobs.files import Folder, Sums
from okrt.train import Task

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Special = tuple[int, ...]
"""The numbers of these in the vocabulary."""
SYNTHETIC_SAMPLES = 1_000_000
TOPICS = 16


class Settings(BaseModel):
    """The [task] table of the job."""

    model_config = ConfigDict(extra="forbid")

    path: str = ""
    """folder with vocab.txt and the text in other *.txt: a sentence a line, a blank line between documents"""
    sha256: Sums = {}
    layers: int = Field(12, ge=1)
    heads: int = Field(12, ge=1)
    width: int = Field(768, ge=1)
    """size of the vectors; a multiple of heads"""
    words: int = Field(30_522, ge=32)
    """word pieces: lines of vocab.txt"""
    length: int = Field(128, ge=8)
    """word pieces of a sample at most"""
    places: int = Field(512, ge=8)
    """rows of the embedding of places, at least length"""
    dropout: float = Field(0.1, ge=0, lt=1)
    eval_samples: int = Field(512, ge=1)
    """pairs of sentences held out, the last ones of the text"""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, visible[:, None, None], dropped)
        x = self.norm1(x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Logits of the masked word pieces, and of the second sentence being the next one or not."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.word, self.place = nn.Embedding(settings.words, width), nn.Embedding(settings.places, width)
        self.sentence = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList([Block(width, settings.heads, settings.dropout) for _ in range(settings.layers)])
        self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, 2)
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.decoder = nn.Linear(width, settings.words)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, words: torch.Tensor, sentences: torch.Tensor, visible: torch.Tensor, masked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All (batch, length): word pieces, which sentence, False in the padding, True where a word is asked for."""
        places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.norm(self.word(words) + self.place(places) + self.sentence(sentences)))
        for block in self.blocks:
            x = block(x, visible)
        asked = self.transform_norm(F.gelu(self.transform(x[masked])))
        return self.decoder(asked), self.next(torch.tanh(self.pooler(x[:, 0])))


class Vocabulary:
    """Word pieces of BERT's uncased kind; the longest piece that fits comes first."""

    def __init__(self, folder: Folder, words: int) -> None:
        pieces = folder.text("vocab.txt").splitlines()
        self.number = {piece: i for i, piece in enumerate(pieces)}
        missing = [piece for piece in SPECIAL if piece not in self.number]
        if missing:
            raise UsageError(f"{folder.root / 'vocab.txt'} has no {missing[0]}: it should be a vocabulary of BERT")
        if len(pieces) != words:
            raise UsageError(f"{folder.root / 'vocab.txt'} has {len(pieces)} lines, but task.words is {words}")
        self.special = tuple(self.number[piece] for piece in SPECIAL)

    def pieces(self, text: str) -> list[int]:
        """Never empty: a text without a word is one unknown word."""
        return [piece for word in split_words(text) for piece in self._split(word)] or [self.number["[UNK]"]]

    def _split(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = self.number.get("##" * (start > 0) + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.number["[UNK]"]]
            found.append(piece)
            start = end
        return found


def split_words(text: str) -> list[str]:
    """Lower case without accents; punctuation and Chinese characters stand alone."""
    spaced = []
    for c in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(c)
        if kind == "Mn" or (kind[0] == "C" and not c.isspace()):
            continue
        symbol = c.isascii() and not c.isalnum() and not c.isspace()
        alone = symbol or kind[0] == "P" or "\u3400" <= c <= "\u9fff" or "\uf900" <= c <= "\ufaff" or c >= "\U00020000"
        spaced.append(f" {c} " if alone else c)
    return "".join(spaced).split()


class Sentences:
    """Lines of the text files, left on disk; `pairs` are the lines whose next line is of the same document."""

    def __init__(self, folder: Folder) -> None:
        self._paths = sorted(file for file in folder.root.glob("*.txt") if file.name != "vocab.txt")
        if not self._paths:
            raise UsageError(f"{folder.root} has no text: task.path should hold *.txt beside vocab.txt")
        self._files = [folder.read(path.name) for path in self._paths]
        self._bounds = [line_bounds(file) for file in self._files]
        self._first_line = np.cumsum([0] + [bounds.size - 1 for bounds in self._bounds])
        for path, file in zip(self._paths, self._files, strict=True):
            if file.find(b"\r") >= 0:
                raise UsageError(f"{path} has carriage returns, which hide blank lines: lines should end in \\n")
        paired = [paired_lines(bounds) for bounds in self._bounds]
        self.pairs = np.concatenate([p + first for p, first in zip(paired, self._first_line[:-1], strict=True)])

    def __getitem__(self, line: int) -> str:
        file = int(np.searchsorted(self._first_line, line, "right")) - 1
        start, end = self._bounds[file][line - self._first_line[file] :][:2]
        try:
            return self._files[file][start:end].decode()
        except UnicodeDecodeError:
            line += 1 - self._first_line[file]
            raise UsageError(f"{self._paths[file]} is not UTF-8 text in line {line}") from None


def line_bounds(file: mmap.mmap) -> np.ndarray:
    """Where each line starts, and at last where the file ends."""
    step = 1 << 26
    parts = ((i, np.frombuffer(file[i : i + step], np.uint8)) for i in range(0, len(file), step))
    breaks = [i + 1 + np.flatnonzero(part == ord("\n")) for i, part in parts]
    return np.unique(np.concatenate([[0], *breaks, [len(file)]]))


def paired_lines(bounds: np.ndarray) -> np.ndarray:
    filled = np.diff(bounds) > 1
    return np.flatnonzero(filled[:-1] & filled[1:])


class Pair(NamedTuple):
    first: list[int]
    second: list[int]
    is_next: bool


Pairs = Callable[[int, np.random.Generator], Pair]
"""Word pieces of the pair of sentences of this number; half of them have a second one from elsewhere."""


def real_pairs(sentences: Sentences, vocabulary: Vocabulary, lines: np.ndarray) -> Pairs:
    def pair(number: int, rng: np.random.Generator) -> Pair:
        is_next = bool(rng.random() < 0.5)
        line = int(lines[number])
        other = line + 1 if is_next else int(lines[rng.integers(lines.size)])
        return Pair(vocabulary.pieces(sentences[line]), vocabulary.pieces(sentences[other]), is_next)

    return pair


def synthetic_pairs(settings: Settings) -> Pairs:
    """Half the words of a sentence are of its topic, few of them often; the next sentence has the same topic."""
    per_topic = (settings.words - len(SPECIAL)) // TOPICS

    def sentence(topic: int, rng: np.random.Generator) -> list[int]:
        rank = np.minimum(rng.geometric(0.1, rng.integers(2, settings.length // 2)) - 1, per_topic - 1)
        chosen = np.where(rng.random(rank.size) < 0.5, topic, 0)
        return (len(SPECIAL) + chosen * per_topic + rank).tolist()

    def pair(number: int, rng: np.random.Generator) -> Pair:
        is_next, topic = bool(rng.random() < 0.5), int(rng.integers(TOPICS))
        other = topic if is_next else (topic + int(rng.integers(1, TOPICS))) % TOPICS
        return Pair(sentence(topic, rng), sentence(other, rng), is_next)

    return pair


class Batch(NamedTuple):
    words: torch.Tensor
    sentences: torch.Tensor
    visible: torch.Tensor
    masked: torch.Tensor
    answers: torch.Tensor
    """the words asked for, in the order of `masked`"""
    is_next: torch.Tensor


def batch(pairs: Pairs, numbers: np.ndarray, key: tuple[int, int], special: Special, settings: Settings) -> Batch:
    """Of 15 % of the words, 80 % are hidden, 10 % replaced and 10 % left; each sample as `key` and its number say."""
    pad, _, cls, sep, mask = special
    shape = len(numbers), settings.length
    original, words = np.full(shape, pad), np.full(shape, pad)
    sentences, masked, is_next = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(len(numbers), np.int64)
    for row, number in enumerate(numbers.tolist()):
        rng = np.random.default_rng([*key, number])
        first, second, is_next[row] = pairs(number, rng)
        room = settings.length - 3
        first = first[: max(room - len(second), room // 2)]
        second = second[: room - len(first)]
        sample = [cls, *first, sep, *second, sep]
        original[row, : len(sample)] = words[row, : len(sample)] = sample
        sentences[row, len(first) + 2 : len(sample)] = 1
        open_places = np.delete(np.arange(1, len(sample) - 1), len(first))
        asked = rng.choice(open_places, max(1, round(0.15 * open_places.size)), replace=False)
        masked[row, asked] = True
        draw, other = rng.random(asked.size), rng.integers(settings.words, size=asked.size)
        words[row, asked] = np.where(draw < 0.8, mask, np.where(draw < 0.9, other, words[row, asked]))
    longest = int((original != pad).sum(1).max())
    return Batch(
        words=torch.from_numpy(words[:, :longest]),
        sentences=torch.from_numpy(sentences[:, :longest]),
        visible=torch.from_numpy(original[:, :longest] != pad),
        masked=torch.from_numpy(masked[:, :longest]),
        answers=torch.from_numpy(original[masked]),
        is_next=torch.from_numpy(is_next),
    )


def build(settings: Settings, seed: int) -> Task:
    if settings.width % settings.heads or settings.places < settings.length:
        raise UsageError("task.width should be a multiple of task.heads, and task.places at least task.length")
    torch.manual_seed(seed)
    model = Bert(settings)
    special: Special = tuple(range(len(SPECIAL)))
    if settings.path:
        folder = Folder(settings.path, settings.sha256)
        vocabulary, sentences = Vocabulary(folder, settings.words), Sentences(folder)
        # One pair is left out between the two, so that they share no sentence.
        train_lines = sentences.pairs[: -settings.eval_samples - 1]
        if not train_lines.size:
            raise UsageError(f"{folder.root} has {sentences.pairs.size} pairs, expected over task.eval_samples + 1")
        train = real_pairs(sentences, vocabulary, train_lines)
        test = real_pairs(sentences, vocabulary, sentences.pairs[-settings.eval_samples :])
        special, train_samples = vocabulary.special, train_lines.size
        data = f"real: {train_lines.size} pairs of sentences, {folder.describe()}"
    else:
        if settings.sha256:
            raise UsageError("task.sha256 is given without task.path: synthetic text has no files")
        train = test = synthetic_pairs(settings)
        train_samples = SYNTHETIC_SAMPLES
        data = "synthetic: words by topic in the shape of BERT's samples"

    def losses(model: nn.Module, pairs: Pairs, split: int, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the samples: of the mean over its masked words, and for the next sentence."""
        b = batch(pairs, numbers, (seed, split), special, settings)
        word_logits, next_logits = model(b.words, b.sentences, b.visible, b.masked)
        asked = b.masked.sum(1).repeat_interleave(b.masked.sum(1))
        masked_words = (F.cross_entropy(word_logits, b.answers, reduction="none") / asked).sum()
        return masked_words, F.cross_entropy(next_logits, b.is_next, reduction="sum")

    def figures(model: nn.Module, numbers: np.ndarray) -> dict[str, float]:
        masked_words, next_sentence = losses(model, test, 1, numbers)
        return {"loss": (masked_words + next_sentence).item(), "masked_lm_loss": masked_words.item()}

    return Task(
        model=model,
        train_samples=train_samples,
        loss=lambda model, numbers: sum(losses(model, train, 0, numbers), torch.zeros(())) / len(numbers),
        eval_samples=settings.eval_samples,
        figures=figures,
        data=data,
    )
