"""okrt doctor: a page on what the ranks of a job find, and what to do where it is not as it should be."""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from okrt.cli.facts import gather
from okrt.cli.findings import NOTE, OK, WRONG, Finding, findings
from okrt.cli.launch import console, start_ranks, started_by_launcher
from okrt.errors import UsageError
from okrt.world import World, join, launcher_size

STYLES = {OK: "green", NOTE: "yellow", WRONG: "bold red"}
LAUNCHER_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def doctor(
    ranks: Annotated[int | None, typer.Option(help="ranks to start, when no launcher did")] = None,
) -> int:
    """Shows what okrt finds here: MPI, launcher, GPUs and who uses which, CUDA-awareness, cores, HDF5, Slurm.

    Start it as the job would be started. Where something is not as it should be, the page says what to do, and the
    exit code is 1.
    """
    if not started_by_launcher(ranks) and ranks not in (None, 1):
        return start_ranks(ranks, None)
    check_mpi()
    world = join()
    found = findings(gather(world))
    if speaks(world):
        show(found, console(world, sys.stdout))
    return int(any(finding.mark == WRONG for finding in found))


def check_mpi() -> None:
    """Without MPI there are no ranks to speak of."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        why = "; ".join(str(error).splitlines())
        raise UsageError(
            f"MPI cannot be loaded: {why}. Load the MPI module of the machine, or pip install 'okrt[mpich]'"
        ) from None


def speaks(world: World) -> bool:
    """One process does, also where each of them is rank 0 of a world of its own."""
    told = launcher_size()
    if told and told[1] != world.size:
        return all(os.environ.get(name, "0") == "0" for name in LAUNCHER_RANKS)
    return world.rank == 0


def show(found: list[Finding], out: Console) -> None:
    page = Table.grid(padding=(0, 2, 0, 0))
    page.add_column(no_wrap=True)
    page.add_column(no_wrap=True)
    page.add_column(overflow="fold")
    for finding in found:
        style = STYLES[finding.mark]
        page.add_row(Text(finding.mark, style), finding.topic, Text(finding.text))
        if finding.remedy:
            page.add_row("", "", Text(f"→ {finding.remedy}", style))
    out.print(page)
    wrong = [finding.topic for finding in found if finding.mark == WRONG]
    out.print(Text(f"wrong: {', '.join(dict.fromkeys(wrong))}" if wrong else "nothing is wrong"))
