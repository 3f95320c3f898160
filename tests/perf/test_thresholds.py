"""The comparisons of selectors and of packed messages, at small sizes."""

import json

import numpy as np
import pytest

import okrt
from okrt.perf import codec, thresholds


def call(module, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["command", *map(str, options)])
    module.main()


def test_selectors_on_laws_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(thresholds, "LAWS", dict(list(thresholds.LAWS.items())[:2]))
    call(thresholds, monkeypatch, "laws", "--steps", 8, "--elements", 20_000, "--densities", 0.01, "--out", tmp_path)
    rows = json.loads((tmp_path / "thresholds.json").read_text())["laws"]
    assert len(rows) == 2 * 2 * len(thresholds.SELECTORS)
    for row in rows:
        assert len(row["found_over_target"]) == row["steps"] == 8
        assert row["lowest"] >= (0.7 if row["selector"] == "gaussian" else 0.95)
        assert row["median_ms"] > 0
        assert len(row["by_law_alone"] or []) == (8 if row["selector"].startswith("sidco") else 0)
    assert (tmp_path / "thresholds.png").read_bytes().startswith(b"\x89PNG")
    assert "sidco-exponential" in capsys.readouterr().out


def test_speed_is_of_one_thread_beside_topk(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OKRT_THREADS", raising=False)
    monkeypatch.delitem(vars(okrt.init()), "threads", raising=False)  # what it has found before
    monkeypatch.setattr(thresholds, "ELEMENTS_OF_SPEED", 30_000)
    threads = []
    make = thresholds.selected

    def selected(*options):
        made = make(*options)
        threads.append(made._kernels.threads)
        return made

    monkeypatch.setattr(thresholds, "selected", selected)
    call(thresholds, monkeypatch, "speed", "--densities", 0.1, 0.01, "--out", tmp_path)
    rows = json.loads((tmp_path / "thresholds.json").read_text())["speed"]
    assert len(rows) == 2 * len(thresholds.SELECTORS)
    assert all(row["topk_ms"] > 0 and row["elements"] == 30_000 for row in rows)
    assert set(threads) == {1}
    assert (tmp_path / "thresholds_speed.png").read_bytes().startswith(b"\x89PNG")
    assert "one thread" in capsys.readouterr().out


def test_what_the_law_alone_finds_is_that_of_its_threshold():
    """Exponential data by the exponential law: as many as there should be, whatever was selected."""
    rng = np.random.default_rng(0)
    rows = thresholds.compare(
        "exponential", (rng.laplace(size=50_000).astype(np.float32) for _ in range(8)), 0.02, False
    )
    alone = {row.selector: row.by_law_alone for row in rows}
    assert np.median(alone["sidco-exponential"][thresholds.SETTLED :]) == pytest.approx(1, abs=0.1)


def test_gradients_of_a_job_change_as_it_trains(monkeypatch):
    settings = ["batch=2", "task.width=16", "task.layers=1", "task.context=16"]
    monkeypatch.setitem(thresholds.JOBS, "gpt_bytes", settings)
    first, second = thresholds.of_job("gpt_bytes", 2)
    assert first.dtype == np.float32 and first.shape == second.shape
    assert np.isfinite(first).all() and (first != second).any()


def test_packed_messages(tmp_path, monkeypatch, capsys):
    options = ("--elements", 100_000, "--densities", 0.01, "--rounds", 1, "--json", tmp_path / "codec.json")
    call(codec, monkeypatch, *options)
    rows = json.loads((tmp_path / "codec.json").read_text())
    assert [row["values"] for row in rows] == 2 * ["fp32", "fp16", "bf16"]
    for row in rows:
        assert 2 < row["bytes_per_entry"] < (5.4 if row["values"] == "fp32" else 3.4)
        assert row["million_entries_per_s"] > 0
    assert "bytes/entry" in capsys.readouterr().out
