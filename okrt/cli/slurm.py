"""okrt slurm: a job or a sweep becomes a script for Slurm, to look at or to submit."""

import os
import shlex
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from okrt.cli.sbatch import MPI, Script, load_site, script_text, seconds_of, shown
from okrt.errors import UsageError
from okrt.report import sweep_file
from okrt.sweep.spec import load_spec
from okrt.train.config import find_job, load_job, read_toml

START = Path(__file__).with_name("start.py")
UNREACHABLE = ("contact slurm controller", "timed out", "communication")


class Action(str, Enum):
    render = "render"
    submit = "submit"


def slurm(
    action: Annotated[Action, typer.Argument(help="write the script to stdout, or send it with sbatch")],
    file: Annotated[str, typer.Argument(help="a job file, the name of a ready job, or the spec of a sweep")],
    site: Annotated[str, typer.Option(help="generic, daint, alps, perlmutter, or the path of a site file")] = "generic",
    nodes: Annotated[int | None, typer.Option(help="[default: 1, or as many as the sweep needs]", min=1)] = None,
    tasks_per_node: Annotated[int | None, typer.Option(help="ranks on a node  [default: the site's]", min=1)] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="cores of a rank  [default: the site's]", min=1)] = None,
    time: Annotated[
        str | None, typer.Option(help="limit: HH:MM:SS, D-HH:MM:SS or minutes  [default: the site's]")
    ] = None,
    account: Annotated[str | None, typer.Option(help="who pays")] = None,
    partition: Annotated[str | None, typer.Option(help="where to queue")] = None,
    qos: Annotated[str | None, typer.Option(help="quality of service")] = None,
    name: Annotated[str | None, typer.Option(help="in the queue  [default: that of the file]")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of a job, HDF5 file of a sweep; logs go there too  [default: runs/JOB, SPEC.h5]"),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="change a key of the job: reducer.density=0.02 (may be repeated)")
    ] = None,
    array: Annotated[bool, typer.Option("--array", help="a sweep as a job array, one task per point")] = False,
    ranks: Annotated[
        int | None, typer.Option(help="with --array: only points of so many ranks, on nodes for that many", min=1)
    ] = None,
    signal_before: Annotated[
        int, typer.Option(help="seconds before the time limit at which to save and requeue", min=1, max=65535)
    ] = 120,
    requeue: Annotated[bool, typer.Option(help="queue it again when the time limit cut it off")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="submit although --out holds a run: go on with it")] = False,
    mpi: Annotated[str | None, typer.Option(help="pmi2, pmix, …: how srun starts MPI  [default: the site's]")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--sbatch", help="more options of sbatch: --mem=8G (may be repeated)")
    ] = None,
) -> int:
    """Makes a job script for Slurm, or submits it.

    The script trains a job, or runs a sweep in one allocation or as a job array (--array). Before the time limit it is
    signalled: it saves, queues itself again, and goes on where it was. With submit, the script is kept beside its log.
    """
    path, is_sweep = find(file)
    place = load_site(site)
    per_node = tasks_per_node or place.tasks_per_node
    points: tuple[int, ...] = ()
    if is_sweep:
        if overrides or resume:
            raise UsageError(
                "--set and --resume are for jobs: a sweep has its settings in its file, and always goes on"
            )
        most, points = points_of(path, array, ranks)
        nodes = nodes or -(-most // per_node)
        if nodes * per_node < most:
            raise UsageError(
                f"{path} has points of {most} ranks: {nodes} × {per_node} (--nodes, --tasks-per-node) is too few"
            )
        results = Path.cwd() / (out or f"{path.stem}.h5")
        if results.is_dir():
            raise IsADirectoryError(f"{results} is a folder: --out of a sweep is a file")
        log = results.with_name(results.stem)
        command = ["-m", "okrt", "sweep", path, "--out", results]
    else:
        if array or ranks:
            raise UsageError(
                f"--array and --ranks are for sweeps: {file} is a job, on --nodes × --tasks-per-node ranks"
            )
        load_job(path, overrides or ())
        results = Path.cwd() / (out or Path("runs", path.stem))
        log = results / "slurm"
        command = [START, "train", path, "--out", results, "--resume", *(f"--set={text}" for text in overrides or ())]
    script = Script(
        kind="array" if array else "sweep" if is_sweep else "job",
        site_name=Path(site).stem,
        site=place,
        name=path.stem if name is None else name,
        chdir=Path.cwd(),
        log=log,
        nodes=nodes or 1,
        tasks_per_node=per_node,
        cpus_per_task=cpus_per_task or place.cpus_per_task,
        time=place.time if time is None else time,
        account=place.account if account is None else account,
        partition=place.partition if partition is None else partition,
        qos=place.qos if qos is None else qos,
        signal_before_s=signal_before,
        requeue=requeue,
        mpi=place.mpi if mpi is None else mpi,
        options=tuple(options or ()),
        command=(sys.executable, *map(str, command)),
        points=points,
    )
    check(script)
    text = script_text(script)
    if action is Action.submit:
        return submit(script, text, results, resume)
    print(text, end="")
    return 0


def find(file: str) -> tuple[Path, bool]:
    """The absolute path, and whether it is the spec of a sweep."""
    path = find_job(shown(file)).absolute()
    return path, "grid" in read_toml(path)[1]


def points_of(path: Path, array: bool, ranks: int | None) -> tuple[int, tuple[int, ...]]:
    """The most ranks of a point, and the numbers of the points if each is to be a task of its own."""
    if ranks and not array:
        raise UsageError("--ranks needs --array: in one allocation the sweep runs all its points")
    points = load_spec(path).points
    if any(point["lab"] for point in points):
        raise UsageError(f"{path}: grid.lab is for one machine: under Slurm the network is the real one")
    chosen = tuple(number for number, point in enumerate(points) if ranks in (None, point["ranks"]))
    if not chosen:
        there = ", ".join(map(str, sorted({point["ranks"] for point in points})))
        raise UsageError(f"--ranks {ranks}: {path} has no such points, only those of {there}")
    return max(points[number]["ranks"] for number in chosen), chosen if array else ()


def check(script: Script) -> None:
    """What neither typer nor the templates see."""
    most = script.site.max_tasks_per_node
    if most and script.tasks_per_node > most:
        raise UsageError(
            f"--tasks-per-node is {script.tasks_per_node}: a node of {script.site_name} takes {most} at most"
        )
    if script.site.needs_account and not script.account:
        raise UsageError(f"--account is missing: {script.site_name} runs nothing without one")
    if not script.name:
        raise UsageError("--name is empty")
    if not MPI.fullmatch(script.mpi):
        raise UsageError(f"--mpi {script.mpi!r}: a name is needed, such as pmi2 (srun --mpi=list shows what there is)")
    if script.signal_before_s >= seconds_of(script.time):
        raise UsageError(f"--signal-before is {script.signal_before_s} s: it must be less than --time, {script.time}")


def submit(script: Script, text: str, results: Path, resume: bool) -> int:
    """Sends it, and tells what the user needs to know from now on."""
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here: submit on a node of the cluster, or take the script with render")
    made = make_room(script, results, resume)
    sent = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    said = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in sent.stderr.splitlines())
    if sent.returncode:
        if made:
            results.rmdir()
        if not any(sign in said for sign in UNREACHABLE):
            raise UsageError(f"sbatch refused it: {said}")
        print(f"okrt: sbatch: {said}", file=sys.stderr)
        return 1
    if said:
        print(f"sbatch: {said}", file=sys.stderr)
    number = sent.stdout.strip().partition(";")[0]
    with script.log_of(number).with_suffix(".sh").open("x") as kept:
        kept.write(text)
    log, logs = str(script.log_of(number)), shlex.quote(str(script.log_of(number)))
    if script.kind == "array":
        log, logs = f"{script.log}-{number}_*.log", f"{shlex.quote(f'{script.log}-{number}_')}*.log"
    print(f"job {number}: {script.name}, {script.nodes} × {script.tasks_per_node} ranks, time limit {script.time}")
    print(f"log      {log}\nresults  {results}")
    print(f"watch    squeue --job {number}; tail -F {logs}\nstop     scancel {number}")
    return 0


def make_room(script: Script, results: Path, resume: bool) -> bool:
    """Sees to it that the log and the results can be written; True if a folder was made for that."""
    if script.kind != "job":
        if not results.parent.is_dir():
            raise FileNotFoundError(f"{results} cannot be written: there is no folder {results.parent}")
        if results.exists():
            sweep_file.read(results)  # one that is none is refused
        folder = results.parent
    else:
        if not resume and any(any(results.glob(name)) for name in ("run.h5", "checkpoints", "slurm-*.sh")):
            raise UsageError(f"{results} holds a run already: --resume goes on with it, another --out starts anew")
        folder = results
        if not folder.is_dir():
            folder.mkdir(parents=True)
            return True
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")
    return False
