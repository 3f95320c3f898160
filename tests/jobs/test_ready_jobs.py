"""Every ready job trains for a few steps at reduced size, through the command itself, on one rank."""

import json

import h5py
import numpy as np
import pytest

from okrt.cli.train import train
from okrt.train.config import JOBS
from okrt.train.metrics import read_steps

SMALLER = {
    "gpt_bytes": ["task.width=16", "task.layers=1", "task.text_mb=0.05", "task.eval_samples=4"],
    "lstm_bytes": ["task.width=16", "task.text_mb=0.05", "task.eval_samples=4"],
    "cnn_digits": ["task.channels=4", "task.hidden=8"],
    "vgg16_cifar10": ["task.width=0.03", "task.images_per_file=40"],
    "lstm_an4": ["task.width=16", "task.layers=1", "task.channels=2"],
    "bert_wikipedia": ["task.width=16", "task.heads=2", "task.layers=1", "task.words=64", "task.eval_samples=4"],
}


def test_every_job_is_tried():
    assert {file.stem for file in JOBS.glob("*.toml")} == SMALLER.keys()


@pytest.mark.parametrize("name", SMALLER)
def test_job(name, tmp_path, capsys):
    common = ["steps=4", "batch=2", "eval_every=2", "reducer.dense_steps=2", "checkpoint.every=0"]
    assert train(name, None, [*SMALLER[name], *common], tmp_path / "run") == 0
    steps = read_steps(tmp_path / "run" / "run.h5")
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert np.isfinite(steps["loss"]).all()
    assert np.isfinite(steps["eval_loss"]).tolist() == [False, True, False, True]
    with h5py.File(tmp_path / "run" / "run.h5") as file:
        data = file.attrs["data"]
    assert data.split(":")[0] == ("real" if name in ("gpt_bytes", "lstm_bytes", "cnn_digits") else "synthetic")
    assert data in capsys.readouterr().out.replace("\n", "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["step"] == 4
    assert result["figures"]["loss"] == pytest.approx(steps["eval_loss"][-1])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
