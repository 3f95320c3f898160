"""Job files: TOML with overrides; a wrong key or value is named with its line and what would be right."""

import importlib.util
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from okrt.codec import CODECS, VALUES
from okrt.errors import UsageError
from okrt.reducers import REDUCERS
from okrt.select import SELECTORS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNUSED_BY_OPTIMIZER: dict[str, tuple[str, ...]] = {
    "sgd": ("betas", "lag_cap", "balance", "noise"),
    "adamw": ("momentum", "lag_cap", "balance", "noise"),
    "lag_adamw": ("momentum",),
}
UNUSED_BY_DENSE = ("density", "density_schedule", "dense_steps", "complete", "selector", "codec", "values")
JOBS = Path(__file__).parent.parent / "jobs"
HEADING = re.compile(r"\[\[?([^\[\],]+)\]\]?\s*(#.*)?")

Beta = Annotated[float, Field(ge=0, lt=1)]
Density = Annotated[float, Field(gt=0, le=1)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerTable(Table):
    name: Literal["sgd", "adamw", "lag_adamw"] = "lag_adamw"
    lr: float = Field(4e-3, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    """of sgd"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """of adamw and lag_adamw"""
    weight_decay: float = Field(0.1, ge=0)
    lag_cap: float = Field(30, ge=1)
    """of lag_adamw: a coordinate moves at most as far as in this many steps at lr"""
    balance: float = Field(0.5, ge=0, le=1)
    """of lag_adamw: coordinates compete for delivery by gradient / v**(balance/2)"""
    noise: float = Field(0, ge=0, le=1)
    """of lag_adamw: whether the gradients of a lag count as a steady signal (0) or as noise (1)"""
    warmup_steps: int = Field(0, ge=0)
    """the learning rate rises to lr over these"""
    schedule: Literal["constant", "cosine"] = "cosine"
    final_lr: float = Field(0.1, ge=0, le=1)
    """share of lr that the cosine ends with"""


class ReducerTable(Table):
    name: Literal[tuple(REDUCERS)] = "oktopk"  # type: ignore[valid-type]
    density: Density = 0.01
    density_schedule: tuple[tuple[int, Density], ...] = ()
    """pairs of a step and the density before it, steps rising; after the last one `density` holds"""
    dense_steps: int = Field(0, ge=0)
    """exact reduction in the first steps"""
    complete: bool = False
    """what is delivered of a coordinate is all that any rank holds of it"""
    selector: Literal[tuple(SELECTORS)] | None = None  # type: ignore[valid-type]
    codec: Literal[CODECS] = "packed"  # type: ignore[valid-type]
    values: Literal[VALUES] = "fp32"  # type: ignore[valid-type]
    """as which values travel; 16 bits need codec = 'packed'"""
    nan: Literal["raise", "skip"] = "raise"
    bucket_mb: float | None = Field(None, gt=0)
    clip_norm: float | None = Field(None, gt=0)
    """of each rank's gradient, before error feedback"""
    apply: Literal["gradients", "updates"] = "gradients"
    """what is reduced: gradients (DataParallel), or the changes by each rank's optimizer (DistributedOptimizer)"""
    momentum_masking: bool = False
    """with updates of sgd"""

    @field_validator("density_schedule")
    @classmethod
    def steps_rise(cls, pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(later[0] <= sooner[0] for sooner, later in itertools.pairwise(pairs)):
            raise ValueError("the steps must rise")
        return pairs

    @field_validator("values")
    @classmethod
    def are_packed(cls, values: str, info: ValidationInfo) -> str:
        if values != "fp32" and info.data.get("codec") != "packed":
            raise ValueError("needs reducer.codec = 'packed'")
        return values

    @field_validator("momentum_masking")
    @classmethod
    def has_updates(cls, masking: bool, info: ValidationInfo) -> bool:
        if masking and info.data.get("apply") == "gradients":
            raise ValueError("needs reducer.apply = 'updates'")
        return masking


class CheckpointTable(Table):
    every: int = Field(0, ge=0)
    """steps; 0: only at the end and on a signal"""
    keep: int = Field(2, ge=1)


class Job(Table):
    steps: int = Field(1000, ge=1)
    batch: int = Field(8, ge=1)
    """samples of a rank in a backward"""
    accumulate: int = Field(1, ge=1)
    """backwards in a step"""
    seed: int = Field(0, ge=0)
    eval_every: int = Field(100, ge=0)
    """steps; 0: only at the end"""
    log_every: int = Field(50, ge=1)
    """steps between lines of a log; a terminal shows every step"""
    task: dict[str, Any]
    """`module`, and the settings of that module"""
    optimizer: OptimizerTable = OptimizerTable()
    reducer: ReducerTable = ReducerTable()
    checkpoint: CheckpointTable = CheckpointTable()

    def without_effect(self) -> list[str]:
        """Keys that were given but do not apply to what was chosen."""
        unused = {"optimizer": UNUSED_BY_OPTIMIZER[self.optimizer.name], "reducer": ()}
        if self.reducer.name == "dense":
            unused["reducer"] += UNUSED_BY_DENSE
        if self.reducer.apply == "updates":
            unused["reducer"] += ("bucket_mb",)
        if self.optimizer.schedule == "constant":
            unused["optimizer"] += ("final_lr",)
        return [
            f"{table}.{key}"
            for table, keys in unused.items()
            for key in keys
            if key in getattr(self, table).model_fields_set
        ]

    def density(self, step: int) -> float:
        for until, density in self.reducer.density_schedule:
            if step < until:
                return density
        return self.reducer.density


def find_job(name: str) -> Path:
    """The file of that path, or the ready job of that name."""
    path = Path(name)
    if path.is_file():
        return path
    ready = JOBS / f"{path.name.removesuffix('.toml')}.toml"
    if path.parent == Path() and ready.is_file():
        return ready
    names = ", ".join(sorted(file.stem for file in JOBS.glob("*.toml")))
    raise UsageError(f"no job file {name}: give the path of one, or the name of a ready job ({names})")


def read_job(path: Path, overrides: Sequence[str] = ()) -> tuple[Job, Path, "Place"]:
    """The job with overrides such as "reducer.density=0.02", the file of the module it names, and where its keys are.

    All is checked but for what only the module knows: loading that takes seconds.
    """
    text, tree = read_toml(path)
    for override in overrides:
        put(tree, override)
    where = Place(path, text, overrides)
    job = checked(Job, tree, (), where)
    return job, module_file(path, job.task.get("module"), where), where


def load_job(path: Path, overrides: Sequence[str] = ()) -> tuple[Job, ModuleType, BaseModel]:
    """The job, the module it names, and that module's settings."""
    job, file, where = read_job(path, overrides)
    module = load_module(file)
    settings = {key: value for key, value in job.task.items() if key != "module"}
    return job, module, checked(module.Settings, settings, ("task",), where)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text, and what it says."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def put(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise UsageError(f"--set {override}: write it as key=value, such as reducer.density=0.02")
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {override}: {name} is a value, not a table")
    try:
        tree[names[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[names[-1]] = text.strip()


def module_file(path: Path, name: Any, where: "Place") -> Path:
    """name.py beside the job file."""
    file = path.parent / f"{name}.py"
    if not isinstance(name, str) or not file.is_file():
        beside = ", ".join(sorted(f.stem for f in path.parent.glob("*.py") if f.stem != "__init__")) or "none"
        place = where.of(("task", "module"))
        raise UsageError(f"{place}: task.module is {name!r}: a module beside the job is needed ({beside})")
    return file


def load_module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"okrt_job_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where pydantic looks up the types of Settings
    spec.loader.exec_module(module)
    for needed in ("Settings", "build"):
        if not hasattr(module, needed):
            raise UsageError(f"{file} has no {needed}: a job's module defines Settings and build(settings, seed)")
    return module


class Place:
    """Where in a job file, or in which override, a key is."""

    def __init__(self, path: Path, text: str, overrides: Sequence[str]) -> None:
        self._path, self._lines = path, text.splitlines()
        self._overrides = {override.partition("=")[0].strip(): override for override in overrides}

    def of(self, key: tuple[str, ...]) -> str:
        """The override that sets it or a part of it, or its line, or that of the table it is or should be in."""
        name = ".".join(key)
        for overridden, override in reversed(self._overrides.items()):
            if f"{overridden}.".startswith(f"{name}.") or f"{name}.".startswith(f"{overridden}."):
                return f"--set {override}"
        for length in range(len(key), 0, -1):
            if line := self._line(key[:length]):
                return f"{self._path}:{line}"
        return str(self._path)

    def _line(self, key: tuple[str, ...]) -> int:
        table = ""
        for number, line in enumerate(self._lines, 1):
            bare = line.strip()
            if heading := HEADING.fullmatch(bare):
                table = heading[1].strip()
                if table == ".".join(key):
                    return number
            full = ".".join(filter(None, [table, bare.partition("=")[0].strip()]))
            if "=" in bare and full == ".".join(key):
                return number
        return 0


def checked(kind: type[BaseModel], tree: dict[str, Any], prefix: tuple[str, ...], where: Place) -> Any:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError("; ".join(complaint(kind, one, prefix, where) for one in error.errors())) from None


def complaint(kind: type[BaseModel], error: Any, prefix: tuple[str, ...], where: Place) -> str:
    # A value inside a list or union is reported under the key that a file has.
    names = [part for part in error["loc"] if isinstance(part, str)]
    table: Any = kind
    key: list[str] = []
    for name in names:
        field = getattr(table, "model_fields", {}).get(name)
        key.append(name)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            break
        table = field.annotation
    full = (*prefix, *key)
    place, name = where.of(full), ".".join(full)
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key {name}: allowed are {', '.join(table.model_fields)}"
    if error["type"] == "missing":
        return f"{place}: {name} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {name} is {error['input']!r}: {message[0].lower()}{message[1:]}"
