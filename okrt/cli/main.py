"""The command `okrt`: a user's mistake ends in one line and exit code 64, trouble with files in 74."""

import sys
from typing import Any

import typer

from okrt.cli import bench
from okrt.cli.doctor import doctor
from okrt.cli.mistakes import KnownToAll
from okrt.cli.point import point
from okrt.cli.report import report
from okrt.cli.selftest import selftest
from okrt.cli.slurm import slurm
from okrt.cli.sweep import sweep
from okrt.cli.train import train
from okrt.errors import EX_USAGE, UsageError, exit_code
from okrt.world import install_abort_hook, job_rank

HELP = "Sparse collectives for training on slow networks. Start it with srun or mpirun, or let --ranks start it."

# Wrong options and commands; typer brings its own copy of click, and shows of it only this subclass.
CommandLineError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(help=HELP, add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True)
app.add_typer(bench.app, name="bench")
app.command()(train)
app.command()(doctor)
app.command()(selftest)
app.command()(slurm)
app.command()(sweep)
app.command(hidden=True)(point)
app.command()(report)


@app.callback()
def okrt(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    install_abort_hook()
    try:
        code = app(standalone_mode=False)
    except CommandLineError as error:
        print(f"okrt: {error.format_message()} (see okrt --help)", file=sys.stderr)
        code = EX_USAGE
    except typer.Abort:
        code = 130
    except KnownToAll as error:
        if not job_rank():
            print(f"okrt: {error}", file=sys.stderr)
        code = error.code
    except (UsageError, OSError) as error:
        if job_rank() is not None:
            raise
        print(f"okrt: {error}", file=sys.stderr)
        code = exit_code(error)
    sys.exit(code)
