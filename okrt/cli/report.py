"""`okrt report`: a sweep or a run as a page with plots, tables and plain words."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from okrt.report.page import Table as Rows

MOST_ROWS = 40
"""of the table on the screen; the page has all"""


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.h5", help="a sweep.h5 or a run.h5, finished or not")],
    out: Annotated[Path, typer.Option(help="folder for report.html, summary.csv and the pictures (PNG and SVG)")],
) -> int:
    """Turns the file of a sweep or a run into a report.

    The page is one file that needs no network. A run may still be going or have been killed, a sweep may be unfinished.
    """
    # Only here: drawing takes a second to load, which the other commands need not wait for.
    from okrt.report.build import report_of
    from okrt.report.page import PAGE, check, write

    check(out, ())
    made = report_of(file)
    write(made, out)
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    for text in (made.title, *made.lead, *made.warnings):
        console.print(Text(text, style="bold" if text is made.title else ""))
    for table in made.tables[:1]:
        console.print(shown(table))
        if len(table.rows) > MOST_ROWS:
            console.print(Text(f"… {len(table.rows) - MOST_ROWS} more rows are in the report."))
    for text in made.headlines:
        console.print(Text(text))
    if made.losses:
        console.print(Text(f"{made.losses_title}:", style="bold red"))
        for text in made.losses:
            console.print(Text(f"  {text}", style="red"))
    console.print(Text(f"Report: {out / PAGE}"), soft_wrap=True)
    return 0


def shown(table: "Rows") -> Table:
    """The table of the page, as a terminal has it; rows that deserve a look in red."""
    screen = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, heading in enumerate(table.headings):
        screen.add_column(Text(heading), justify="left" if place < table.texts else "right", no_wrap=True)
    for place, row in enumerate(table.rows[:MOST_ROWS]):
        style = "red" if table.marked and table.marked[place] else ""
        screen.add_row(*(Text(cell) for cell in row), style=style)
    return screen
