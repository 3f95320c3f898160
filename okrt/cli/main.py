"""The command `okrt`: a user's mistake ends in one line and exit code 64, trouble with files in 74."""

import sys

import click
import typer

from okrt.cli import bench
from okrt.errors import EX_USAGE, UsageError, exit_code
from okrt.world import install_abort_hook, job_rank

app = typer.Typer(
    help="Sparse collectives for training on slow networks. Start it with srun or mpirun, or let --ranks start it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


@app.callback()
def okrt() -> None:
    """One file per command; this makes `okrt` a group of them."""


def main() -> None:
    install_abort_hook()
    try:
        code = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        code = 0
    except click.ClickException as error:
        print(f"okrt: {error.format_message()} (see okrt --help)", file=sys.stderr)
        code = EX_USAGE
    except click.Abort:
        code = 130
    except (UsageError, OSError) as error:
        if job_rank() is not None:
            raise
        print(f"okrt: {error}", file=sys.stderr)
        code = exit_code(error)
    sys.exit(code)
