"""Speech recognition on AN4 with CTC, the second job of the Ok-Topk paper: DeepSpeech-like, 27,569,568 parameters."""

import re
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from okrt.errors import UsageError
from okrt.jobs.files import Folder, Sums
from okrt.train import Task

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # the first is CTC's blank
RATE = 16_000
WINDOW, HOP = RATE // 50, RATE // 100
BINS = WINDOW // 2 + 1
SPEECH, HELD_OUT = 948, 130  # utterances of AN4

Utterances = Callable[[int], tuple[torch.Tensor, str]]
"""Features (frames, BINS) and text of the utterance of this number."""
Recording = tuple[np.ndarray, str]
"""Samples and text."""


class Settings(BaseModel):
    """The [task] table of the job."""

    model_config = ConfigDict(extra="forbid")

    path: str = ""
    """folder of AN4, with etc/ and wav/; empty: synthetic utterances"""
    sha256: Sums = {}
    layers: int = Field(5, ge=1)
    width: int = Field(800, ge=1)
    """cells of a layer of the LSTM"""
    channels: int = Field(32, ge=1)
    """of the two convolutions below it"""
    lookahead: int = Field(20, ge=0)
    """later frames that the output sees: the LSTM runs forward only"""


def normed(norm: nn.Module, x: PackedSequence) -> PackedSequence:
    """Batch norm over frames that are speech, not padding."""
    return x._replace(data=norm(x.data))


class Speech(nn.Module):
    """Spectrograms (batch, frames, BINS) with their lengths to letters; half the frames, log-probabilities, lengths."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        channels, width = settings.channels, settings.width
        self.conv = nn.ModuleList(
            [
                nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5)),
                nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5)),
            ]
        )
        self.conv_norm = nn.ModuleList([nn.BatchNorm2d(channels) for _ in self.conv])
        sizes = [channels * -(-BINS // 4)] + [width] * settings.layers
        self.lstm = nn.ModuleList([nn.LSTM(size, width) for size in sizes[:-1]])
        self.norm = nn.ModuleList([nn.BatchNorm1d(width) for _ in self.lstm])
        self.lookahead = nn.Conv1d(width, width, settings.lookahead + 1, groups=width, bias=False)
        self.letter = nn.Linear(width, len(LETTERS), bias=False)

    def forward(self, spectrograms: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = spectrograms.transpose(1, 2).unsqueeze(1)
        lengths = (lengths + 1) // 2
        speech = torch.arange(int(lengths.max())) < lengths[:, None]
        for conv, norm in zip(self.conv, self.conv_norm, strict=True):
            # Zeros in the padding, so that no utterance depends on the length of its neighbours.
            x = F.hardtanh(norm(conv(x)), 0, 20) * speech[:, None, None]
        packed = pack_padded_sequence(x.flatten(1, 2).permute(2, 0, 1), lengths, enforce_sorted=False)
        for depth, lstm in enumerate(self.lstm):
            packed, _ = lstm(normed(self.norm[depth - 1], packed) if depth else packed)
        padded, _ = pad_packed_sequence(packed)
        ahead = self.lookahead(F.pad(padded.permute(1, 2, 0), (0, self.lookahead.kernel_size[0] - 1)))
        seen = pack_padded_sequence(F.hardtanh(ahead.permute(2, 0, 1), 0, 20), lengths, enforce_sorted=False)
        letters, _ = pad_packed_sequence(seen._replace(data=self.letter(normed(self.norm[-1], seen).data)))
        return F.log_softmax(letters, -1), lengths


def spectrogram(audio: np.ndarray) -> torch.Tensor:
    """Logarithm of the magnitudes, every 10 ms over 20 ms, with mean 0 and deviation 1 over the utterance."""
    wave = torch.from_numpy(audio.astype(np.float32) / 2**15)
    waves = torch.stft(wave, WINDOW, HOP, window=torch.hamming_window(WINDOW), pad_mode="constant", return_complex=True)
    features = torch.log1p(waves.abs()).T
    return (features - features.mean()) / (features.std() + 1e-6)


def read_audio(folder: Folder, name: str) -> np.ndarray:
    """Samples of NAME.sph (NIST Sphere), or of NAME.raw (16-bit, big-endian, no header)."""
    if not folder.has(name + ".sph"):
        raw = folder.read(name + ".raw")
        if len(raw) % 2:
            raise UsageError(f"{folder.root / name}.raw is cut short: {len(raw)} bytes are no whole 16-bit samples")
        return np.frombuffer(raw[:], ">i2")
    content = folder.read(name + ".sph")
    head = re.match(rb"NIST_1A\n *(\d+)\n(.*?)end_head\n", content[:4096], re.DOTALL)
    if not head:
        raise UsageError(f"{folder.root / name}.sph has no NIST Sphere header")
    plain = {"sample_rate": "16000", "sample_n_bytes": "2", "channel_count": "1", "sample_coding": "pcm"}
    fields = {"channel_count": "1", "sample_coding": "pcm"}
    fields.update(re.findall(r"^(\w+) -\w+ (.*?) *$", head[2].decode("latin-1"), re.MULTILINE))
    order = {"01": "<i2", "10": ">i2"}.get(fields.get("sample_byte_format", ""))
    if order is None or any(fields.get(key) != value for key, value in plain.items()):
        raise UsageError(f"{folder.root / name}.sph is {fields}, expected plain 16-bit speech: {plain}")
    start, count = int(head[1]), int(fields.get("sample_count", 0))
    if not 0 < 2 * count <= len(content) - start:
        raise UsageError(f"{folder.root / name}.sph has {len(content) - start} bytes of speech, expected {2 * count}")
    return np.frombuffer(content[start : start + 2 * count], order)


def shortest(text: str) -> int:
    """Output frames that CTC needs: one a letter, and a blank between two that are alike."""
    return len(text) + sum(a == b for a, b in pairwise(text))


def read_an4(folder: Folder, part: str) -> list[Recording]:
    """The utterances of etc/an4_PART.fileids."""
    names = folder.text(f"etc/an4_{part}.fileids").split()
    transcription = f"etc/an4_{part}.transcription"
    lines = [line for line in folder.text(transcription).splitlines() if line.strip()]
    if len(lines) != len(names) or not names:
        raise UsageError(f"{folder.root / transcription} has {len(lines)} lines, an4_{part}.fileids {len(names)}")
    utterances = []
    for name, line in zip(names, lines, strict=True):
        words, _, spoken = line.rpartition("(")
        text = " ".join(re.sub(r"<[^>]*>", " ", words).upper().split())
        if spoken.strip() != name.rpartition("/")[2] + ")":
            raise UsageError(f"{folder.root / transcription} has {line!r} where {name} is expected")
        if not text or set(text) - set(LETTERS[1:]):
            raise UsageError(f"{folder.root / transcription}: {line!r} should have letters, spaces and apostrophes")
        audio = read_audio(folder, f"wav/{name}")
        if (audio.size // HOP + 2) // 2 < shortest(text):
            raise UsageError(f"{folder.root / 'wav' / name} is cut short: {audio.size} samples cannot hold {text!r}")
        utterances.append((audio, text))
    return utterances


def recorded(utterances: list[Recording]) -> Utterances:
    return lambda number: (spectrogram(utterances[number][0]), utterances[number][1])


def synthetic(seed: int, split: int) -> Utterances:
    """Each letter has a spectrum of its own, and lasts 8 to 16 frames, under noise."""
    spectra = np.random.default_rng(seed).standard_normal((len(LETTERS), BINS))

    def utterance(number: int) -> tuple[torch.Tensor, str]:
        rng = np.random.default_rng([seed, split, number])
        words = rng.integers(2, len(LETTERS) - 1, (rng.integers(1, 6), 4))
        text = " ".join("".join(LETTERS[i] for i in word) for word in words)
        frames = spectra[[LETTERS.index(c) for c in text]].repeat(rng.integers(8, 17, len(text)), axis=0)
        frames = frames + 0.5 * rng.standard_normal(frames.shape)
        return torch.from_numpy(frames.astype(np.float32)), text

    return utterance


def greedy(letters: torch.Tensor) -> str:
    """Text of the likeliest letter of each frame (frames, letters)."""
    return "".join(LETTERS[i] for i, _ in groupby(letters.argmax(-1).tolist()) if i)


def edits(found: Sequence[Any], expected: Sequence[Any]) -> int:
    """Least number of insertions, deletions and replacements between the two."""
    row = list(range(len(expected) + 1))
    for i, item in enumerate(found):
        before, row[0] = row[0], i + 1
        for j, other in enumerate(expected, 1):
            before, row[j] = row[j], min(before + (item != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def build(settings: Settings, seed: int) -> Task:
    torch.manual_seed(seed)
    model = Speech(settings)
    if settings.path:
        folder = Folder(settings.path, settings.sha256)
        spoken, held_out = read_an4(folder, "train"), read_an4(folder, "test")
        sizes = len(spoken), len(held_out)
        train, test = recorded(spoken), recorded(held_out)
        data = f"real: AN4, {folder.describe()}"
    else:
        if settings.sha256:
            raise UsageError("task.sha256 is given without task.path: synthetic utterances have no files")
        sizes = SPEECH, HELD_OUT
        train, test = synthetic(seed, 0), synthetic(seed, 1)
        data = "synthetic: noisy spectra of letters in the shape of AN4"
    expected = [test(n)[1] for n in range(sizes[1])]
    # The loop divides sums by the number of utterances; error rates are per letter and per word.
    per_letter = sizes[1] / sum(map(len, expected))
    per_word = sizes[1] / sum(len(text.split()) for text in expected)

    def run(
        model: nn.Module, source: Utterances, numbers: np.ndarray
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
        """The sum of losses, and for each utterance the probabilities of letters and the text."""
        features, texts = zip(*map(source, numbers.tolist()), strict=True)
        frames = torch.tensor([len(f) for f in features])
        letters, lengths = model(pad_sequence(list(features), batch_first=True), frames)
        targets = torch.tensor([LETTERS.index(c) for c in "".join(texts)])
        loss = F.ctc_loss(letters, targets, lengths, torch.tensor([len(t) for t in texts]), reduction="sum")
        return loss, [letters[:length, i] for i, length in enumerate(lengths)], list(texts)

    def figures(model: nn.Module, numbers: np.ndarray) -> dict[str, float]:
        loss, letters, texts = run(model, test, numbers)
        pairs = list(zip(map(greedy, letters), texts, strict=True))
        return {
            "loss": loss.item(),
            "letter_error_rate": per_letter * sum(edits(a, b) for a, b in pairs),
            "word_error_rate": per_word * sum(edits(a.split(), b.split()) for a, b in pairs),
        }

    return Task(
        model=model,
        train_samples=sizes[0],
        loss=lambda model, numbers: run(model, train, numbers)[0] / len(numbers),
        eval_samples=sizes[1],
        figures=figures,
        data=data,
    )
