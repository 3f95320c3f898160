"""`okrt train`, as a user starts it, on one rank in this process where nothing needs more."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import okrt
from okrt.train.checkpoint import Checkpoints
from okrt.train.metrics import read_steps

SETTINGS = {
    "task.width": 16,
    "task.layers": 1,
    "task.text_mb": 0.05,
    "task.context": 16,
    "task.eval_samples": 8,
    "batch": 2,
    "steps": 6,
    "log_every": 2,
    "eval_every": 3,
    "checkpoint.every": 2,
    "checkpoint.keep": 3,
}
SMALL = ["train", "gpt_bytes", *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}"))]

Command = Callable[..., tuple[int, str, str]]


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_run(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "run"
    code, out, err = command(*SMALL, "--out", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("gpt_bytes: ")
    assert "1 ranks, oktopk at density 0.01, lag_adamw; data real: 0.1 MB of Python's standard library" in lines[0]
    assert lines[0].endswith(f"into {folder}")
    assert [line.split("  ")[0] for line in lines[1:]] == [f"step {step}/6" for step in (1, 2, 3, 4, 6)]
    assert not any("\x1b" in line for line in lines)
    columns = read_steps(folder / "run.h5")
    np.testing.assert_array_equal(columns["step"], np.arange(1, 7))
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(columns["eval_loss"])) + 1, [3, 6])
    assert steps_of(folder) == ["step_00000002", "step_00000004", "step_00000006"]
    result = json.loads((folder / "result.json").read_text())
    assert result == {"step": 6, "samples": 12, "figures": {"loss": pytest.approx(columns["eval_loss"][-1])}}
    assert f"held out: loss {columns['eval_loss'][-1]:.4f}" in lines[-1]

    code, out, _ = command(*SMALL, "--out", folder, "--resume")
    assert code == 0
    assert out.splitlines()[1:] == ["resumed step_00000006"], "there is nothing left to do"
    code, out, _ = command(*SMALL, "--set", "steps=8", "--out", folder, "--resume")
    assert code == 0
    np.testing.assert_array_equal(read_steps(folder / "run.h5")["step"], np.arange(1, 9))

    shutil.rmtree(folder / "checkpoints")
    code, out, _ = command(*SMALL, "--out", folder, "--resume")
    assert code == 0
    assert "no checkpoint to resume: starting at step 0" in out
    np.testing.assert_array_equal(read_steps(folder / "run.h5")["step"], np.arange(1, 7))


def test_a_damaged_checkpoint_is_passed_over(command: Command, tmp_path: Path) -> None:
    """One that was cut short, then one with a flipped bit; each time the one before is resumed."""
    run = tmp_path / "run"
    assert command(*SMALL, "--out", run)[0] == 0
    before = read_steps(run / "run.h5")
    expected = newest_model(run)
    model = run / "checkpoints" / "step_00000006" / "model.safetensors"
    whole = model.read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 4
    for damaged, told in ((whole[:-1000], "bytes, not"), (bytes(flipped), "is not as it was written")):
        model.write_bytes(damaged)
        code, out, err = command(*SMALL, "--out", run, "--resume")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[1].startswith(f"checkpoint {model.parent} is passed over: ")
        assert "model.safetensors" in lines[1]
        assert told in lines[1]
        assert lines[2] == "resumed step_00000004"
        after = read_steps(run / "run.h5")
        for column in ("step", "loss", "eval_loss", "samples"):
            np.testing.assert_array_equal(after[column], before[column])
        assert newest_model(run) == expected


EARLY = """
import os
import signal

from okrt.jobs.gpt_bytes import Settings, build as later

def build(settings, seed):
    os.kill(os.getpid(), signal.SIGUSR2)
    return later(settings, seed)

os.kill(os.getpid(), signal.SIGTERM)
"""


def test_signals_before_the_first_step(command: Command, tmp_path: Path) -> None:
    """While the job is loaded, and while its data is: one step is taken and saved."""
    (tmp_path / "early.py").write_text(EARLY)
    (tmp_path / "early.toml").write_text('[task]\nmodule = "early"\n')
    missed: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: missed.append(n)) for number in (signal.SIGTERM, signal.SIGUSR2)
    }
    try:
        code, out, _ = command("train", tmp_path / "early.toml", *SMALL[2:], "--out", tmp_path / "run")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert missed == []
    assert code == 75
    assert out.splitlines()[-1] == "stopped by SIGTERM, SIGUSR2 after step 1"
    assert steps_of(tmp_path / "run") == ["step_00000001"]


def newest_model(run: Path) -> dict[str, bytes]:
    saved = Checkpoints(run / "checkpoints", okrt.init().transport).newest()
    assert saved is not None
    assert saved.step == 6
    return {name: tensor.numpy().tobytes() for name, tensor in saved.model().items()}


@pytest.mark.parametrize("left", ["run.h5", "checkpoints"])
def test_a_folder_that_holds_a_run(command: Command, tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    code, out, err = command(*SMALL, "--out", tmp_path)
    assert (code, out) == (64, "")
    assert err == f"okrt: {tmp_path} holds a run already: --resume goes on with it, another --out starts anew\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "gpt_bites"], "no job file gpt_bites: "),
        (
            [*SMALL, "--set", "reducer.densty=1"],
            "--set reducer.densty=1: unknown key reducer.densty: allowed are name,",
        ),
        ([*SMALL, "--set", "reducer.name=oktop"], "reducer.name is 'oktop': input should be 'dense', "),
        ([*SMALL, "--set", "task.heads=0"], "--set task.heads=0: task.heads is 0: "),
        ([*SMALL, "--set", "task.module=gpt"], "a module beside the job is needed ("),
        ([*SMALL, "--ranks", 0], "--ranks is 0"),
        ([*SMALL, "--ranks", 2, "--lab", "fast"], "rate 'fast'"),
        (["train"], "Missing argument 'job'"),
    ],
)
def test_mistakes(command: Command, tmp_path: Path, argv: list, told: str) -> None:
    out_option = ["--out", tmp_path / "run"] if len(argv) > 1 else []
    code, out, err = command(*argv, *out_option)
    assert (code, out) == (64, "")
    assert told in err
    assert err.startswith("okrt: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_a_file(command: Command, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    for text, told in (
        ("steps = 3\n[reducer]\ndensity = 7\n[task]\nmodule = 'x'\n", f"{job}:3: reducer.density is 7: "),
        ("steps = = 3\n", f"{job}: not valid TOML: "),
        (
            "[task]\nmodule = 'missing'\n",
            f"{job}:2: task.module is 'missing': a module beside the job is needed (none)",
        ),
    ):
        job.write_text(text)
        code, out, err = command("train", job, "--ranks", 2, "--out", tmp_path / "run")
        assert (code, out, err.count("\n")) == (64, "", 1)
        assert told in err


def test_a_mistake_under_a_launcher_is_said_once(start: Callable, tmp_path: Path) -> None:
    done = start("okrt", *SMALL, "--set", "reducer.density=7", "--out", tmp_path / "run", ranks=2)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("okrt: --set reducer.density=7: reducer.density is 7: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
