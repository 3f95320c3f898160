"""The text of a job script for Slurm, and what is particular to a site."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from okrt.cli.findings import spans
from okrt.errors import UsageError
from okrt.train.config import Place, Table, checked, read_toml

SLURM = Path(__file__).parent.parent / "slurm"
TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]{2}):([0-9]{2})|([0-9]+)")
LOST_S = 30  # that the ranks may go on when one has ended
MPI = re.compile(r"[a-z0-9_]*")

Word = Annotated[str, Field(min_length=1)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Site(Table):
    """A site file."""

    mpi: str = "pmi2"
    """--mpi of srun; empty: what the site has as its default"""
    tasks_per_node: int = Field(1, ge=1)
    max_tasks_per_node: int | None = Field(None, ge=1)
    cpus_per_task: int = Field(1, ge=1)
    time: str = "01:00:00"
    needs_account: bool = False
    account: str = ""
    partition: str = ""
    qos: str = ""
    sbatch: tuple[Word, ...] = ()
    """more options of the allocation"""
    srun: tuple[Word, ...] = ()
    """more options of each start of ranks"""
    modules: tuple[Word, ...] = ()
    environment: dict[Variable, str] = Field(default_factory=dict)

    @field_validator("time")
    @classmethod
    def is_time(cls, text: str) -> str:
        seconds_of(text)
        return text

    @field_validator("mpi")
    @classmethod
    def is_mpi(cls, text: str) -> str:
        if not MPI.fullmatch(text):
            raise ValueError('a name is needed, such as pmi2, or "" for the default of the site')
        return text

    @field_validator("sbatch", "srun")
    @classmethod
    def are_options(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            words_of(text)
        return texts

    @field_validator("account", "partition", "qos")
    @classmethod
    def has_one_line(cls, text: str) -> str:
        return sbatch_quoted(text) and text

    @field_validator("modules", "environment")
    @classmethod
    def have_one_line(cls, texts: tuple[str, ...] | dict[str, str]) -> tuple[str, ...] | dict[str, str]:
        shell(texts.values() if isinstance(texts, dict) else texts)
        return texts


def load_site(name: str) -> Site:
    """The site of that name, or of the file at that path."""
    known = sorted(file.stem for file in (SLURM / "sites").glob("*.toml"))
    path = SLURM / "sites" / f"{name}.toml" if name in known else Path(name)
    if not path.is_file():
        raise UsageError(
            f"--site {name}: no such site: choose from {', '.join(known)}, or give the path of a site file"
        )
    text, tree = read_toml(path)
    return checked(Site, tree, (), Place(path, text, ()))


@dataclass(frozen=True)
class Script:
    """All that a job script says. Paths are absolute."""

    kind: Literal["job", "sweep", "array"]
    site_name: str
    site: Site
    name: str
    chdir: Path
    log: Path
    """without its end, the number of the job"""
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    time: str
    account: str
    partition: str
    qos: str
    signal_before_s: int
    requeue: bool
    mpi: str
    options: tuple[str, ...]
    """more of sbatch, after those of the site"""
    command: tuple[str, ...]
    """what the ranks run; of a sweep, what starts the ranks"""
    points: tuple[int, ...] = ()
    """of an array"""

    def log_of(self, number: str) -> Path:
        return self.log.with_name(f"{self.log.name}-{number}.log")


def script_text(script: Script) -> str:
    """The job script; nothing but the arguments and the templates has a part in it."""
    import jinja2  # here: no other command needs it

    srun = ["srun", *([f"--mpi={script.mpi}"] if script.mpi else ()), f"--cpus-per-task={script.cpus_per_task}"]
    srun += [f"--wait={LOST_S}"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SLURM / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"shell": shell, "sbatch": sbatch_quoted}
    return environment.get_template(f"{script.kind}.j2").render(
        vars(script)
        | {
            "folder": script.log.parent,
            "log": f"{script.log}-".replace("%", "%%") + ("%A_%a.log" if script.kind == "array" else "%j.log"),
            "srun": (*srun, *(word for text in script.site.srun for word in words_of(text))),
            "options": [
                " ".join(map(sbatch_quoted, words_of(text))) for text in (*script.site.sbatch, *script.options)
            ],
            "points": spans(script.points).replace(" ", ""),
        }
    )


def shown(text: object) -> str:
    """The text, if it can stand in a line of a script."""
    if not str(text).isprintable():
        raise UsageError(f"{str(text)!r} has a line break or another character that a job script cannot hold")
    return str(text)


def words_of(options: str) -> list[str]:
    """The words of options that were written as in a shell."""
    shown(options)
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"{options!r}: {error}") from None
    if not words or not words[0].startswith("-"):
        raise UsageError(f"{options!r} is no option: write it as --exclusive or --mem=8G")
    return words


def shell(words: Iterable[object]) -> str:
    return shlex.join(map(shown, words))


def sbatch_quoted(text: object) -> str:
    """As sbatch reads a word of its own lines: in double quotes all but these and the backslash is itself."""
    if "\\" in shown(text):
        raise UsageError(f"{str(text)!r} has a backslash, which Slurm cannot take there")
    return str(text) if re.fullmatch(r"[\w./:=,@%+-]+", str(text)) else '"{}"'.format(str(text).replace('"', '\\"'))


def seconds_of(time: str) -> int:
    """Of a time limit as Slurm writes it."""
    match = TIME.fullmatch(time)
    if match:
        days, hours, minutes, seconds, only_minutes = (int(part or 0) for part in match.groups())
        total = ((24 * days + hours) * 60 + minutes + only_minutes) * 60 + seconds
        if total and minutes < 60 and seconds < 60:
            return total
    raise UsageError(f"{time!r} is no time limit: write HH:MM:SS, D-HH:MM:SS or minutes")
