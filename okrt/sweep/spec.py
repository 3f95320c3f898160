"""The spec of a sweep: a TOML file with a grid, every combination of which is a point."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from okrt.errors import UsageError
from okrt.reducers import REDUCERS
from okrt.train.config import Density, Place, Table, checked, find_job, load_job, read_toml

GLOO = "gloo"
EXACT = ("dense", GLOO)
"""reducers without a density: one point stands for all densities of the grid"""
MOST_ELEMENTS = 2**31 - 1
NAMES = (*REDUCERS, GLOO)
OF_A_JOB = {"reducer": "reducer.name", "density": "reducer.density"}
"""keys of the grid that a job has under another name"""


class Grid(Table):
    """Lists; keys of a job are allowed beside these, in quotes: "optimizer.lr" = [2e-3, 4e-3]."""

    model_config = ConfigDict(extra="allow", frozen=True)

    ranks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    reducer: Annotated[tuple[Literal[NAMES], ...], Field(min_length=1)] = ("dense", "oktopk")  # type: ignore[valid-type]
    density: Annotated[tuple[Density, ...], Field(min_length=1)] = (0.01,)
    elements: Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_ELEMENTS)], ...], Field(min_length=1)] | None = None
    """length of the gradient; not for a job, whose model says it"""
    lab: Annotated[tuple[str, ...], Field(min_length=1)] = ("",)
    """one host per rank at this rate, such as 1gbit; "" for none"""

    @model_validator(mode="after")
    def each_once(self) -> "Grid":
        for name, values in self.lists().items():
            if not isinstance(values, (list, tuple)) or not values:
                raise ValueError(f"{name} must be a list with at least one value")
            if any(values.count(value) > 1 for value in values):
                raise ValueError(f"{name} has a value twice")
        return self

    def lists(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("ranks", "elements", "lab", "reducer", "density")}
        return {name: values for name, values in own.items() if values is not None} | (self.model_extra or {})


class Repeat(Table):
    """How often a point is measured."""

    warmup: int = Field(5, ge=0)
    """steps that do not count"""
    at_least: int = Field(10, ge=1)
    at_most: int = Field(100, ge=1)
    within: float = Field(0.05, ge=0)
    """enough when the 95 % interval of the median is within this share of it, to either side"""
    max_seconds: float = Field(60, ge=0)
    """of measured steps, past which at_least is enough"""
    timeout_s: float = Field(900, gt=0)
    """of the whole point; one that takes longer is ended, and has failed"""

    @model_validator(mode="after")
    def room(self) -> "Repeat":
        if self.at_most < self.at_least:
            raise ValueError(f"at_most is {self.at_most}, less than at_least, {self.at_least}")
        return self


class SpecFile(Table):
    title: str = ""
    """of the report"""
    job: str | None = None
    """a job file or the name of a ready job, whose training steps are measured; without it, allreduces are"""
    settings: dict[str, Any] = Field(default_factory=dict)
    """of a job, for all points, as with --set: "task.width" = 64"""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: `elements`, or the batch of the job, is shared by all ranks of a point; weak: it is that of one rank"""
    seed: int = Field(0, ge=0)
    grid: Grid
    repeat: Repeat = Repeat()

    @field_validator("settings")
    @classmethod
    def not_nested(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name, value in settings.items():
            if isinstance(value, dict):
                raise ValueError(f'write the keys of {name} in quotes: "{name}.{next(iter(value), "key")}" = …')
        return settings


@dataclass(frozen=True)
class Spec:
    """A spec that can be run."""

    file: SpecFile
    points: list[dict[str, Any]]
    """the settings of each point, alike in their keys: ranks, elements (without a job), lab, reducer, density, …"""
    job: Path | None

    @property
    def phases(self) -> tuple[str, ...]:
        return ("compute", "communication") if self.job else ("select", "exchange", "scatter", "other")

    def overrides(self, point: dict[str, Any]) -> list[str]:
        """What a point changes in the job."""
        assert self.job is not None
        own = {OF_A_JOB.get(name, name): value for name, value in point.items() if name not in ("ranks", "lab")}
        if point["reducer"] in EXACT:
            del own["reducer.density"]
        # The dense steps at the start of a job are not those that the sweep is about.
        always = {"seed": self.file.seed, "reducer.dense_steps": 0}
        changes = [f"{key}={toml_value(value)}" for key, value in (always | self.file.settings | own).items()]
        if self.file.scaling == "strong":
            batch = load_job(self.job, changes)[0].batch
            if batch % point["ranks"]:
                raise UsageError(f"a batch of {batch} cannot be shared evenly by {point['ranks']} ranks")
            changes.append(f"batch={batch // point['ranks']}")
        return changes


def toml_value(value: Any) -> str:
    """As --set takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def load_spec(path: Path) -> Spec:
    """The spec with its points, all of which can be measured as far as one can tell without trying."""
    text, tree = read_toml(path)
    file: SpecFile = checked(SpecFile, tree, (), Place(path, text, ()))
    job = None
    if file.job is not None:
        beside = path.parent / file.job
        job = beside if beside.is_file() else find_job(file.job)
    spec = Spec(file, list(points_of(file)), job)
    for point in spec.points:
        check(spec, point, path)
    return spec


def points_of(file: SpecFile) -> Iterator[dict[str, Any]]:
    """Every combination once; ranks vary slowest."""
    lists = file.grid.lists()
    for values in itertools.product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        if point["reducer"] in EXACT:
            if point["density"] != lists["density"][0]:
                continue
            point["density"] = 1.0
        if file.scaling == "weak" and "elements" in point:
            point["elements"] *= point["ranks"]
        yield point


def check(spec: Spec, point: dict[str, Any], path: Path) -> None:
    try:
        check_possible(spec, point)
    except UsageError as error:
        settings = ", ".join(f"{name} {value}" for name, value in point.items())
        raise UsageError(f"{path}: the point {settings} is impossible: {error}") from None


def check_possible(spec: Spec, point: dict[str, Any]) -> None:
    extra = spec.file.grid.model_extra or {}
    if spec.job is None:
        if extra or spec.file.settings:
            raise UsageError(f"{', '.join([*extra, *spec.file.settings])} needs a job")
        if "elements" not in point:
            raise UsageError("grid.elements is missing: the length of the gradient, or a job, is needed")
        if point["elements"] > MOST_ELEMENTS:
            raise UsageError(f"{point['elements']} elements are more than the {MOST_ELEMENTS} of one call")
        return
    for short, key in OF_A_JOB.items():
        if key in extra or key in spec.file.settings:
            raise UsageError(f"{key} is called {short} in a grid")
    if "elements" in point:
        raise UsageError("elements is for sweeps without a job: the job's model says how many there are")
    if point["reducer"] == GLOO:
        raise UsageError("gloo cannot train a job: it is for sweeps without one")
    load_job(spec.job, spec.overrides(point))
