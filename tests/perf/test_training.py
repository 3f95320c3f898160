"""The benchmarks of training steps and of optimizer steps, at sizes that show nothing but that they work."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from okrt.jobs.gpt_bytes import build
from okrt.perf import optimizer, training

TINY = ("--parameters", "0.1", "--batch", "1", "--steps", "2", "--warmup", "3")


@pytest.mark.timeout(200)
def test_schemes_side_by_side(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = start("python", "-m", "okrt.perf.training", *TINY, "--json", file, ranks=2, limit_s=180)
    assert done.returncode == 0, done.stderr
    rows = {row["scheme"]: row for row in json.loads(file.read_text())}
    assert tuple(rows) == training.SCHEMES
    settings = training.wide_enough(1e5, 16)
    parameters = training.parameter_count(settings)
    task = build(settings, seed=0)
    with torch.no_grad():
        start_loss = task.figures(task.model, np.arange(settings.eval_samples))["loss"] / settings.eval_samples
    for scheme, row in rows.items():
        assert scheme in done.stdout
        assert set(row) == {field.name for field in dataclasses.fields(training.Row)}
        assert (row["ranks"], row["parameters"], row["batch"], row["steps"]) == (2, parameters, 1, 2)
        assert (row["lab"], row["wire_bytes"], row["unavailable"]) == (None, None, None)
        assert row["samples_per_s"] == pytest.approx(2 / (row["median_ms"] / 1e3))
        assert row["times_ddp"] == pytest.approx(rows["ddp"]["median_ms"] / row["median_ms"])
        assert (row["hidden"] is None) == scheme.startswith("ddp")
        assert row["loss"] < start_loss
    assert rows["dense"]["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-6)
    assert rows["ddp"]["bytes_received"] == 4 * parameters
    assert rows["ddp-fp16"]["bytes_received"] == 2 * parameters
    assert rows["dense"]["bytes_received"] == pytest.approx(4 * parameters, rel=0.01)
    assert rows["oktopk"]["bytes_received"] < 0.06 * rows["dense"]["bytes_received"]
    # Two factors of rank 4 for each matrix that they make less than half as large; all else travels as it is.
    shapes = [tuple(p.shape) for p in task.model.parameters()]
    elements = sum(4 * sum(shape) if 8 * sum(shape) < np.prod(shape) else np.prod(shape) for shape in shapes)
    assert rows["ddp-powersgd"]["bytes_received"] == pytest.approx(4 * elements)


def test_dense_that_trains_differently_is_an_error() -> None:
    ddp, dense = (training.Row(scheme, 2, 10, 1, 1, None, None, None, loss=2.0) for scheme in ("ddp", "dense"))
    training.check_dense([ddp, dense])
    for wrong in (2.001, float("nan")):
        dense.loss = wrong
        with pytest.raises(RuntimeError, match=f"the loss of dense is {wrong}, of ddp 2.0"):
            training.check_dense([ddp, dense])


def test_sizes_of_buckets_are_tried_where_okrt_makes_them() -> None:
    assert training.cases(["ddp", "oktopk"], [5, 10]) == [
        ("ddp", None),
        ("oktopk", None),
        ("oktopk", 5),
        ("oktopk", 10),
    ]
    assert training.cases(["dense"], []) == [("dense", None)]


def test_as_many_parameters_as_asked_for() -> None:
    settings = training.wide_enough(1e7, 64)
    model = training.Gpt(settings)
    assert sum(p.numel() for p in model.parameters()) == training.parameter_count(settings) >= 1e7
    settings.width -= 48
    assert training.parameter_count(settings) < 1e7


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="measures one process")
@pytest.mark.parametrize("model", optimizer.MODELS)
def test_optimizers_side_by_side(model: str) -> None:
    rows = optimizer.compare(model, parameters=1e5, density=0.01, steps=2, warmup=1)
    assert [row["optimizer"] for row in rows] == list(optimizer.OPTIMIZERS)
    lag = rows[0]
    for row in rows:
        assert row["model"] == model
        assert row["parameters"] >= 0.99e5
        assert row["delivered"] == pytest.approx(0.01, rel=0.05)
        assert row["times_lag"] == pytest.approx(row["median_ms"] / lag["median_ms"])
