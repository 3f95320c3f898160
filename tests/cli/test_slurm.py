"""`okrt slurm` without a Slurm: mistakes, and scripts run by bash where srun, sbatch and scontrol are stand-ins."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from okrt.cli.sbatch import seconds_of
from okrt.cli.slurm import START
from okrt.errors import UsageError
from tests.conftest import Start

Command = Callable[..., tuple[int, str, str]]

NASTY = """it's "$HOME" `x` #1 100%j \\\\ü; & *"""
NASTY_FOR_SBATCH = NASTY.replace("\\", "")
SPEC = "[grid]\nranks = [1, 2, 4]\nreducer = ['dense', 'oktopk']\nelements = [1000]\n"
PATIENCE_S = 60


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "scaling.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes a command, a bash script of that name and text, that runs in place of what Slurm has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, text: str) -> Path:
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return make


def mistake(command: Command, *argv: object, code: int = 64) -> str:
    """The one line it ends with."""
    told, out, err = command("slurm", *argv)
    assert (told, out) == (code, "")
    assert err.startswith("okrt: ")
    assert err.count("\n") == 1
    return err.removeprefix("okrt: ").rstrip("\n")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["render"], "Missing argument 'file'"),
        (["rendr", "gpt_bytes"], "'rendr' is not one of 'render', 'submit'"),
        (["render", "gpt_bites"], "no job file gpt_bites: "),
        (["render", "no/such/job.toml"], "no job file no/such/job.toml: "),
        (
            ["render", "gpt_bytes", "--site", "dain"],
            "--site dain: no such site: choose from alps, daint, generic, perl",
        ),
        (["render", "gpt_bytes", "--set", "stepz=1"], "--set stepz=1: unknown key stepz"),
        (["render", "gpt_bytes", "--array"], "--array and --ranks are for sweeps: gpt_bytes is a job"),
        (["render", "gpt_bytes", "--ranks", 2], "--array and --ranks are for sweeps: gpt_bytes is a job"),
        (["render", "gpt_bytes", "--time", "1h"], "'1h' is no time limit: write HH:MM:SS, D-HH:MM:SS or minutes"),
        (["render", "gpt_bytes", "--time", 2], "--signal-before is 120 s: it must be less than --time, 2"),
        (["render", "gpt_bytes", "--signal-before", 0], "--signal-before"),
        (["render", "gpt_bytes", "--nodes", 0], "--nodes"),
        (["render", "gpt_bytes", "--site", "perlmutter"], "--account is missing: perlmutter runs nothing without one"),
        (
            ["render", "gpt_bytes", "--site", "daint", "--tasks-per-node", 2],
            "--tasks-per-node is 2: a node of daint takes 1 at most",
        ),
        (["render", "gpt_bytes", "--name", "a\n#SBATCH --uid=0"], "'a\\n#SBATCH --uid=0' has a line break or another"),
        (["render", "gpt_bytes", "--name", ""], "--name is empty"),
        (["render", "gpt_bytes", "--out", "runs/\x1b[1m"], "has a line break or another character"),
        (["render", "gpt_bytes", "--out", "runs/a\\b"], "has a backslash, which Slurm cannot take there"),
        (["render", "gpt_bytes", "--set", "seed=1\n"], "has a line break or another character"),
        (["render", "gpt_bytes", "--sbatch", "exclusive"], "'exclusive' is no option: write it as --exclusive"),
        (["render", "gpt_bytes", "--sbatch", "--comment='a"], '"--comment=\'a": No closing quotation'),
        (["render", "gpt_bytes", "--mpi", "pmi2 --x"], "--mpi 'pmi2 --x': a name is needed, such as pmi2"),
        (["render", "SPEC", "--set", "seed=1"], "--set and --resume are for jobs"),
        (["submit", "SPEC", "--resume"], "--set and --resume are for jobs"),
        (["render", "SPEC", "--nodes", 3], "has points of 4 ranks: 3 × 1 (--nodes, --tasks-per-node) is too few"),
        (["render", "SPEC", "--ranks", 2], "--ranks needs --array"),
        (["render", "SPEC", "--array", "--ranks", 3], "has no such points, only those of 1, 2, 4"),
    ],
)
def test_mistakes(command: Command, spec: Path, argv: list, told: str) -> None:
    assert told in mistake(command, *(spec if word == "SPEC" else word for word in argv))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('mpi = "pmi2"\nmodule = ["x"]\n', ":2: unknown key module: allowed are mpi, tasks_per_node, "),
        ("cpus_per_task = 0\n", ":1: cpus_per_task is 0: "),
        ('time = "soon"\n', ":1: time is 'soon': 'soon' is no time limit"),
        ('mpi = ""\n[environment]\n"A B" = "1"\n', "environment"),
        ('sbatch = ["x"]\n', ":1: sbatch is "),
        ('account = "a\\nb"\n', ":1: account is "),
        ("mpi = = 1\n", ": not valid TOML: "),
    ],
)
def test_mistakes_in_a_site_file(command: Command, tmp_path: Path, text: str, told: str) -> None:
    site = tmp_path / "mine.toml"
    site.write_text(text)
    err = mistake(command, "render", "gpt_bytes", "--site", site)
    assert err.startswith(str(site))
    assert told in err


def test_a_lab_is_not_for_slurm(command: Command, spec: Path) -> None:
    spec.write_text(SPEC + "lab = ['1gbit']\n")
    assert "grid.lab is for one machine" in mistake(command, "render", spec)


def test_times() -> None:
    assert [seconds_of(time) for time in ("90", "00:30:00", "24:00:05", "2-01:00:00")] == [5400, 1800, 86405, 176400]
    for wrong in ("", "0", "00:00:00", "1:2:3", "00:60:00", "00:00:60", "-1", "30:00", "1-00", "٣", "90 ", "UNLIMITED"):
        with pytest.raises(UsageError):
            seconds_of(wrong)


def sbatch_lines(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_site_file_of_ones_own(command: Command, tmp_path: Path) -> None:
    site = tmp_path / "mine.toml"
    site.write_text(
        'mpi = "pmix"\ntasks_per_node = 2\ntime = "30"\npartition = "fast"\nsbatch = ["--exclusive"]\n'
        'srun = ["--cpu-bind cores"]\nmodules = ["mpi/4 new"]\n[environment]\nUCX_TLS = "rc,self; x"\n'
    )
    code, out, err = command("slurm", "render", "gpt_bytes", "--site", site, "--qos", "low", "--no-requeue")
    assert (code, err) == (0, "")
    lines = sbatch_lines(out)
    assert {"--ntasks-per-node=2", "--time=30", "--partition=fast", "--qos=low", "--exclusive", "--no-requeue"} <= {
        *lines
    }
    assert "scontrol" not in out
    for line in ("#!/bin/bash -l", "module load 'mpi/4 new'", "export UCX_TLS='rc,self; x'"):
        assert line in out.splitlines()
    assert "srun --mpi=pmix --cpus-per-task=1 --wait=30 --cpu-bind cores \\\n" in out


def test_sizes_of_sweeps(command: Command, spec: Path) -> None:
    def lines(*argv: object) -> list[str]:
        code, out, err = command("slurm", "render", spec, *argv)
        assert (code, err) == (0, "")
        return sbatch_lines(out)

    assert {"--nodes=4", "--ntasks=4"} <= {*lines()}
    assert {"--nodes=2", "--ntasks=6"} <= {*lines("--tasks-per-node", 3)}
    assert {"--nodes=4", "--array=0-5"} <= {*lines("--array")}
    assert {"--nodes=1", "--ntasks-per-node=2", "--array=2-3"} <= {
        *lines("--array", "--ranks", 2, "--tasks-per-node", 2)
    }


# Sends the signal when the first module of okrt is looked for.
EARLY = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "okrt":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGUSR2)

sys.meta_path.insert(0, Finder())
"""
SHOW = 'printf \'%s\\0\' "$@" > "$SHOWN"; exit ${CODE:-0}'


def test_words_reach_the_ranks_as_they_were(
    command: Command, stand_in: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / NASTY_FOR_SBATCH
    folder.mkdir()
    monkeypatch.chdir(folder)
    job = folder / f"{NASTY_FOR_SBATCH}.toml"
    job.write_text('[task]\nmodule = "gpt_bytes"\n')
    (folder / "gpt_bytes.py").write_text("from okrt.jobs.gpt_bytes import Settings, build\n")
    code, out, err = command("slurm", "render", job.name, "--out", "of it", "--set", f"task.module = {NASTY}")
    assert (code, out) == (64, ""), "there is no such module"
    assert NASTY in err
    code, out, err = command("slurm", "render", job.name, "--out", "of it", "--set", "seed = 7")
    assert (code, err) == (0, "")
    stand_in("srun", SHOW)
    subprocess.run(["bash", "-c", out], check=True, env={**os.environ, "SHOWN": str(tmp_path / "shown")})
    words = (tmp_path / "shown").read_text().split("\0")[:-1]
    ours = [str(START), "train", str(job), "--out", str(folder / "of it"), "--resume", "--set=seed = 7"]
    assert words[-len(ours) :] == ours


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (64, False), (75, True), (137, False), (140, True)]
)
def test_only_some_codes_requeue_a_job(
    command: Command, stand_in: Callable[[str, str], Path], tmp_path: Path, code: int, requeued: bool
) -> None:
    _, text, _ = command("slurm", "render", "gpt_bytes")
    stand_in("srun", f"exit {code}")
    stand_in("scontrol", SHOW)
    shown = tmp_path / "shown"
    done = subprocess.run(["bash", "-c", text], env={**os.environ, "SHOWN": str(shown), "SLURM_JOB_ID": "12"})
    assert done.returncode == code
    assert shown.exists() == requeued
    if requeued:
        assert shown.read_text() == "requeue\x0012\0"


# A sweep that, when it is asked to stop, still has something to do; it is started in place of Python.
SWEEP = """
printf '%s\\0' "$@" > "$SHOWN.argv"
trap 'sleep 0.3; touch "$SHOWN.asked"; exit 75' USR2
touch "$SHOWN.ready"
for _ in {1..600}; do sleep 0.1; done
"""


@pytest.mark.parametrize("array", [False, True])
def test_a_sweep_is_asked_to_stop_and_waited_for(
    command: Command,
    stand_in: Callable[[str, str], Path],
    spec: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    array: bool,
) -> None:
    monkeypatch.setattr("sys.executable", str(stand_in("a python", SWEEP)))
    stand_in("scontrol", SHOW)
    _, text, _ = command("slurm", "render", spec, *(["--array"] if array else []))
    shown = tmp_path / "shown"
    ids = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    with subprocess.Popen(["bash", "-c", text], env={**os.environ, **ids, "SHOWN": str(shown)}) as job:
        until = time.monotonic() + PATIENCE_S
        while not Path(f"{shown}.ready").exists() and time.monotonic() < until:
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR2)
        assert job.wait(PATIENCE_S) == 75
    assert Path(f"{shown}.asked").exists()
    assert shown.read_text() == f"requeue\0{'12_3' if array else '12'}\0"
    words = Path(f"{shown}.argv").read_text().split("\0")[:-1]
    assert words[:5] == ["-m", "okrt", "sweep", str(spec), "--out"]
    assert words[6] == "--launcher"
    assert words[7].startswith("srun --mpi=pmi2 ")
    assert words[8:] == (["--point", "3"] if array else [])


def test_submit_without_sbatch(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch here" in mistake(command, "submit", "gpt_bytes", "--out", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_submit_tells_what_one_needs(
    command: Command, stand_in: Callable[[str, str], Path], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("sbatch", 'cat > "$SHOWN"; echo "12;cluster"')
    monkeypatch.setenv("SHOWN", str(tmp_path / "sent"))
    run = tmp_path / "new runs" / "one"
    code, out, err = command("slurm", "submit", "gpt_bytes", "--nodes", 2, "--out", run)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "job 12: gpt_bytes, 2 × 1 ranks, time limit 01:00:00",
        f"log      {run}/slurm-12.log",
        f"results  {run}",
        f"watch    squeue --job 12; tail -F '{run}/slurm-12.log'",
        "stop     scancel 12",
    ]
    assert (run / "slurm-12.sh").read_text() == (tmp_path / "sent").read_text()
    assert f'--output="{run}/slurm-%j.log"' in sbatch_lines((run / "slurm-12.sh").read_text())

    err = mistake(command, "submit", "gpt_bytes", "--out", run)
    assert err == f"{run} holds a run already: --resume goes on with it, another --out starts anew"
    (run / "slurm-12.sh").rename(run / "slurm-11.sh")
    assert command("slurm", "submit", "gpt_bytes", "--out", run, "--resume")[0] == 0

    monkeypatch.chdir(tmp_path)
    code, out, err = command("slurm", "submit", spec, "--array")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:4] == [
        f"log      {tmp_path}/scaling-12_*.log",
        f"results  {tmp_path}/scaling.h5",
        f"watch    squeue --job 12; tail -F {tmp_path}/scaling-12_*.log",
    ]


def test_submit_that_is_refused(command: Command, stand_in: Callable[[str, str], Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    say = "echo 'sbatch: error: {}' >&2; exit 1"
    stand_in("sbatch", say.format("invalid partition specified: x\nsbatch: error: Batch job submission failed"))
    told = "sbatch refused it: invalid partition specified: x; Batch job submission failed"
    assert mistake(command, "submit", "gpt_bytes", "--out", run) == told
    stand_in("sbatch", say.format("Batch job submission failed: Unable to contact slurm controller (connect failure)"))
    assert "Unable to contact" in mistake(command, "submit", "gpt_bytes", "--out", run, code=1)
    assert not run.exists()


def test_outputs_that_cannot_be(
    command: Command, stand_in: Callable[[str, str], Path], spec: Path, tmp_path: Path
) -> None:
    stand_in("sbatch", "echo 12")
    assert re.search("no folder .*/no", mistake(command, "submit", spec, "--out", tmp_path / "no" / "x.h5", code=74))
    assert "is a folder" in mistake(command, "submit", spec, "--out", tmp_path, code=74)
    foreign = tmp_path / "notes.h5"
    foreign.write_text("mine")
    assert str(foreign) in mistake(command, "submit", spec, "--out", foreign, code=74)
    assert "notes.h5" in mistake(command, "submit", "gpt_bytes", "--out", foreign, code=74)
    assert foreign.read_text() == "mine"
    # Nobody can make a folder there, not even root.
    assert "/proc/run" in mistake(command, "submit", "gpt_bytes", "--out", "/proc/run", code=74)


def test_a_signal_while_okrt_is_loaded(start: Start, tmp_path: Path) -> None:
    """It comes before the first line of okrt is read, and waits until the job can save."""
    early = tmp_path / "sitecustomize.py"
    early.write_text(EARLY)
    small = ["task.width=16", "task.layers=1", "task.text_mb=0.05", "task.context=16", "task.eval_samples=8", "steps=9"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = ["train", "gpt_bytes", "--out", tmp_path / "run", *(f"--set={setting}" for setting in small)]
    done = start("python", START, *words, PYTHONPATH=path)
    assert done.returncode == 75, done.stderr
    assert "stopped by SIGUSR2 after step 1" in done.stdout
