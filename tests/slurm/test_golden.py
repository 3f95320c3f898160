"""Every site and kind of script, letter by letter. `python -m tests.slurm.test_golden` writes the files anew."""

import subprocess
from pathlib import Path

import pytest

from okrt.cli.sbatch import SLURM, Script, load_site, script_text

GOLDEN = Path(__file__).parent / "golden"
SITES = sorted(file.stem for file in (SLURM / "sites").glob("*.toml"))
COMMANDS = {
    "job": (
        "/opt/okrt/cli/start.py",
        "train",
        "/home/ada/it's here/job.toml",
        "--out",
        "/scratch/run 100%",
        "--resume",
        "--set=task.path=a b",
    ),
    "sweep": ("-m", "okrt", "sweep", "/home/ada/scaling.toml", "--out", "/scratch/scaling.h5"),
    "array": ("-m", "okrt", "sweep", "/home/ada/scaling.toml", "--out", "/scratch/scaling.h5"),
}


def script(site_name: str, kind: str) -> Script:
    site = load_site(site_name)
    return Script(
        kind=kind,  # type: ignore[arg-type]
        site_name=site_name,
        site=site,
        name="first try" if kind == "job" else "scaling",
        chdir=Path("/home/ada"),
        log=Path("/scratch/run 100%/slurm" if kind == "job" else "/scratch/scaling"),
        nodes=2,
        tasks_per_node=site.tasks_per_node,
        cpus_per_task=site.cpus_per_task,
        time=site.time,
        account="g42" if site.needs_account else site.account,
        partition=site.partition,
        qos=site.qos,
        signal_before_s=120,
        requeue=True,
        mpi=site.mpi,
        options=("--mem=8G --comment 'for \"all\"'",) if site_name == "generic" else (),
        command=("/opt/okrt/bin/python", *COMMANDS[kind]),
        points=(0, 1, 2, 5) if kind == "array" else (),
    )


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("site", SITES)
def test_text(site: str, kind: str) -> None:
    golden = GOLDEN / f"{site}-{kind}.sh"
    assert script_text(script(site, kind)) == golden.read_text()
    subprocess.run(["bash", "-n", golden], check=True)


def test_nothing_else_is_there() -> None:
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted(f"{s}-{k}.sh" for s in SITES for k in COMMANDS)


if __name__ == "__main__":
    for one in SITES:
        for other in COMMANDS:
            (GOLDEN / f"{one}-{other}.sh").write_text(script_text(script(one, other)))
