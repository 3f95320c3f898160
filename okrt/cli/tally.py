"""What `okrt selftest` has checked, and what failed on which rank: known alike on all ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from okrt.errors import UsageError
from okrt.transport import Transport


class SelftestFailure(RuntimeError):
    """A rank cannot go on with a check that the others are in the middle of."""


@dataclass
class Row:
    """A line of the table."""

    what: str
    checks: int = 0
    note: str = ""
    gb_per_s: float = math.nan
    share: float = math.nan
    """of the speed of a copy"""


class Tally:
    """Every check is passed through `add` by all ranks, in the same order."""

    def __init__(self, transport: Transport, progress: Progress) -> None:
        self._transport, self._progress = transport, progress
        self._task: TaskID | None = None
        self.rows: dict[str, Row] = {}
        self.failures: dict[str, dict[int, str]] = {}
        """of each thing that failed, what is wrong on which rank"""

    @property
    def checks(self) -> int:
        return sum(row.checks for row in self.rows.values())

    def begin(self, stage: str, parts: int) -> None:
        """Of the progress bar."""
        self._task = self._progress.add_task(stage, total=parts)

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def add(self, what: str, checks: Iterable[str], is_collective: bool = False) -> None:
        """Goes through the checks, each of which gives what is wrong (empty if nothing is), and tells all ranks.

        An exception is a failure too. In a collective check it ends the job, unless all ranks have it at once: the
        others wait for what this rank will not send.
        """
        row = self.rows[what] = Row(what)
        complaints = []
        try:
            for complaint in checks:
                row.checks += 1
                if complaint:
                    complaints.append(complaint)
        except Exception as error:
            complaints.append(" ".join(f"{type(error).__name__}: {error}".split()))
            if is_collective and self._transport.size > 1 and not isinstance(error, UsageError):
                self.failures[what] = {self._transport.rank: ""}
                raise SelftestFailure(f"{self.verdict()}: {complaints[-1]}") from error
        mine = f"{len(complaints)} of {row.checks} checks, the first: {complaints[0]}" if complaints else ""
        told = {rank: text for rank, text in enumerate(self._transport.gather_texts(mine)) if text}
        if told:
            self.failures[what] = told
        row.note = f"failed on {named(told)}" if told else "ok"
        self.advance()

    def note(self, what: str, note: str) -> None:
        """Something that cannot be checked here."""
        self.rows[what] = Row(what, note=note)
        self.advance()

    def verdict(self) -> str:
        """The last line, without the number of checks."""
        if not self.failures:
            return "selftest passed"
        return "selftest failed: " + ", ".join(f"{what} ({named(ranks)})" for what, ranks in self.failures.items())

    def show(self, out: Console, title: str) -> None:
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for heading in ("", "checks", "outcome", "GB/s", "of a copy"):
            table.add_column(heading, justify="left" if heading in ("", "outcome") else "right")
        for row in self.rows.values():
            speed = ("", "") if math.isnan(row.gb_per_s) else (f"{row.gb_per_s:.3g}", f"{row.share:.0%}")
            style = "bold red" if row.what in self.failures else ""
            table.add_row(row.what, str(row.checks or ""), Text(row.note, style), *speed)
        out.print(table)
        for what, told in self.failures.items():
            for text in dict.fromkeys(told.values()):
                who = named([rank for rank, said in told.items() if said == text])
                out.print(Text(f"{what}, {who}: {text}"), soft_wrap=True)


def named(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
