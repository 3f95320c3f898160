"""Speech recognition on AN4: its size, the files as CMU publishes them, and error rates."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from okrt.errors import UsageError
from okrt.jobs.files import Folder
from okrt.jobs.lstm_an4 import BINS, LETTERS, Settings, Speech, build, edits, greedy, read_an4, spectrogram

SMALL = Settings(layers=2, width=32, channels=4, lookahead=3)
TEXTS = {"an4_clstk/fash/an251-fash-b": "<s> YES </s>", "an4_clstk/fash/an253-fash-b": "<s> GO </s>"}
TEST_TEXTS = {"an4test_clstk/fcaw/an406-fcaw-b": "rubout g  m"}


def speech(name: str) -> np.ndarray:
    seed = list(name.encode())
    return np.random.default_rng(seed).integers(-(2**15), 2**15, 8000 + len(name), np.int64).astype(np.int16)


def sphere(audio: np.ndarray, order: str = "01", **changed: str) -> bytes:
    fields = {
        "sample_count": f"-i {audio.size}",
        "sample_n_bytes": "-i 2",
        "sample_byte_format": f"-s2 {order}",
        "sample_rate": "-i 16000",
        "channel_count": "-i 1",
        "sample_coding": "-s3 pcm",
    } | changed
    head = "NIST_1A\n   1024\n" + "".join(f"{key} {value}\n" for key, value in fields.items()) + "end_head\n"
    return head.encode().ljust(1024) + audio.astype("<i2" if order == "01" else ">i2").tobytes()


@pytest.fixture
def an4(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    for part, texts in (("train", TEXTS), ("test", TEST_TEXTS)):
        (tmp_path / f"etc/an4_{part}.fileids").write_text("".join(f"{name}\n" for name in texts))
        lines = [f"{text} ({Path(name).name})\n" for name, text in texts.items()]
        (tmp_path / f"etc/an4_{part}.transcription").write_text("".join(lines))
        for i, name in enumerate(texts):
            file = tmp_path / "wav" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".sph").write_bytes(sphere(speech(name), ("01", "10")[i]))
    return tmp_path


def test_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Speech(Settings()).parameters()) == 27_569_568


@pytest.mark.parametrize("raw", [False, True])
def test_speech_is_read_back(an4: Path, raw: bool) -> None:
    if raw:
        for file in list(an4.rglob("*.sph")):
            name = file.relative_to(an4 / "wav").with_suffix("").as_posix()
            file.unlink()
            file.with_suffix(".raw").write_bytes(speech(name).astype(">i2").tobytes())
    folder = Folder(str(an4), {})
    for part, texts, expected in (("train", TEXTS, ["YES", "GO"]), ("test", TEST_TEXTS, ["RUBOUT G M"])):
        utterances = read_an4(folder, part)
        assert [text for _, text in utterances] == expected
        for (audio, _), name in zip(utterances, texts, strict=True):
            np.testing.assert_array_equal(audio, speech(name))
    task = build(SMALL.model_copy(update={"path": str(an4)}), 1)
    assert task.data.startswith("real: AN4, 7 files")
    assert (task.train_samples, task.eval_samples) == (2, 1)
    assert np.isfinite(task.loss(task.model, np.array([0, 1])).item())


@pytest.mark.parametrize(
    "content, says",
    [
        (sphere(speech("x"))[:-2], "bytes of speech"),
        (sphere(speech("x"), sample_rate="-i 8000"), "plain 16-bit speech"),
        (sphere(speech("x"), channel_count="-i 2"), "plain 16-bit speech"),
        (sphere(speech("x"), sample_coding="-s20 pcm,embedded-shorten"), "plain 16-bit speech"),
        (sphere(speech("x"))[1:], "NIST Sphere"),
        (sphere(speech("x")[:300]), "cut short"),
        (b"", "0 bytes"),
    ],
)
def test_damaged_speech_is_named(an4: Path, content: bytes, says: str) -> None:
    (an4 / "wav/an4_clstk/fash/an253-fash-b.sph").write_bytes(content)
    with pytest.raises(UsageError, match=f"an253-fash-b.*{says}"):
        read_an4(Folder(str(an4), {}), "train")


def test_missing_and_altered_files_are_named(an4: Path) -> None:
    name = "wav/an4_clstk/fash/an251-fash-b.sph"
    right = hashlib.sha256((an4 / name).read_bytes()).hexdigest()
    read_an4(Folder(str(an4), {name: right}), "train")
    content = bytearray((an4 / name).read_bytes())
    content[-1] ^= 1
    (an4 / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"an251-fash-b.sph is altered.*expected {right}"):
        read_an4(Folder(str(an4), {name: right}), "train")
    (an4 / name).unlink()
    with pytest.raises(UsageError, match=r"an251-fash-b.raw is missing"):
        read_an4(Folder(str(an4), {}), "train")


@pytest.mark.parametrize(
    "lines, says",
    [
        ("<s> YES </s> (an251-fash-b)\n", "1 lines"),
        ("<s> GO </s> (an253-fash-b)\n<s> YES </s> (an251-fash-b)\n", "where an4_clstk/fash/an251-fash-b is expected"),
        ("<s> YES </s> (an251-fash-b)\n<s> G0 </s> (an253-fash-b)\n", "G0"),
    ],
)
def test_wrong_transcriptions_are_named(an4: Path, lines: str, says: str) -> None:
    (an4 / "etc/an4_train.transcription").write_text(lines)
    with pytest.raises(UsageError, match=f"an4_train.transcription.*{says}"):
        read_an4(Folder(str(an4), {}), "train")


def test_spectrogram_of_a_tone_peaks_at_its_frequency() -> None:
    tone = (8000 * np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)).astype(np.int16)
    features = spectrogram(tone)
    assert features.shape == (101, BINS)
    assert (features[1:-1].argmax(1) == 20).all()  # bins are 50 Hz apart
    assert features.mean().item() == pytest.approx(0, abs=1e-5) and features.std().item() == pytest.approx(1, abs=1e-4)


def test_an_utterance_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    model = Speech(SMALL).eval()
    utterances = [torch.randn(n, BINS) for n in (31, 80, 44)]
    with torch.no_grad():
        together, lengths = model(pad_sequence(utterances, batch_first=True), torch.tensor([31, 80, 44]))
        for i, utterance in enumerate(utterances):
            alone, length = model(utterance[None], torch.tensor([len(utterance)]))
            assert length.item() == lengths[i] == alone.shape[0]
            torch.testing.assert_close(together[: lengths[i], i], alone[:, 0], atol=1e-5, rtol=1e-4)


def test_greedy_drops_repeats_then_blanks() -> None:
    heard = "__HHEE_L_LL OO_"
    one_hot = torch.eye(len(LETTERS))[[LETTERS.index(c) for c in heard]]
    assert greedy(one_hot) == "HELL O"


@given(st.text("ab", max_size=7), st.text("ab", max_size=7))
def test_edits_are_the_least(found: str, expected: str) -> None:
    def least(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(least(a[1:], b) + 1, least(a, b[1:]) + 1, least(a[1:], b[1:]) + (a[0] != b[0]))

    assert edits(found, expected) == least(found, expected)


def test_learns_and_evaluates() -> None:
    task = build(SMALL, 1)
    assert task.data.startswith("synthetic:")
    assert (task.train_samples, task.eval_samples) == (948, 130)
    optimizer = torch.optim.SGD(task.model.parameters(), 0.001, momentum=0.9)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        loss = task.loss(task.model, np.arange(step * 3, step * 3 + 3))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    task.model.eval()
    with torch.no_grad():
        whole = task.figures(task.model, np.arange(6))
        parts = [task.figures(task.model, np.arange(i, i + 2)) for i in (0, 2, 4)]
    assert list(whole) == ["loss", "letter_error_rate", "word_error_rate"]
    for name, value in whole.items():
        assert value == pytest.approx(sum(p[name] for p in parts), rel=1e-4)


def test_error_rates_of_silence_are_one() -> None:
    task = build(SMALL, 1)

    class Silent(torch.nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            letters = torch.zeros(x.shape[1], x.shape[0], len(LETTERS))
            letters[..., 0] = 1
            return letters.log_softmax(-1), lengths

    figures = task.figures(Silent(), np.arange(task.eval_samples))
    assert figures["letter_error_rate"] / task.eval_samples == pytest.approx(1)
    assert figures["word_error_rate"] / task.eval_samples == pytest.approx(1)


def test_same_seed_same_task() -> None:
    losses = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        task = build(SMALL, seed)
        losses[name] = task.loss(task.model, np.array([3, 900])).item()
    assert losses["a"] == losses["b"] != losses["c"]
