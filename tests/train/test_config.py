"""Job files: what is wrong is named, with its place and what would be right."""

from pathlib import Path

import pytest

from okrt.errors import UsageError
from okrt.train.config import JOBS, find_job, load_job

MODULE = """
from pydantic import BaseModel, ConfigDict, Field

class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = Field(8, ge=1)

def build(settings, seed):
    raise NotImplementedError
"""
JOB = """# a comment: batch = 0
steps = 20
batch = 2  # of a rank

[task]
module = "tiny"
width = 4

[reducer]  # [optimizer]
density_schedule = [
    [5, 0.5],
    [10, 0.1],
]
density = 0.05
name = "oktopk"
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(MODULE)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as refused:
        load_job(path, overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_file_defaults_and_overrides(job: Path) -> None:
    config, module, settings = load_job(job, ["reducer.density=0.5", "optimizer.name = sgd", "task.width=7", "seed=3"])
    assert (config.steps, config.batch, config.accumulate, config.seed) == (20, 2, 1, 3)
    assert (config.reducer.name, config.reducer.density) == ("oktopk", 0.5)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.momentum) == ("sgd", 1e-3, 0.9)
    assert isinstance(settings, module.Settings)
    assert settings.model_dump() == {"width": 7}


def test_the_last_of_two_overrides_holds(job: Path) -> None:
    assert load_job(job, ["steps=3", "steps=4"])[0].steps == 4
    assert "--set steps=-4" in refusal(job, "steps=3", "steps=-4")


def test_density_schedule(job: Path) -> None:
    config = load_job(job)[0]
    assert [config.density(step) for step in (0, 4, 5, 9, 10, 19)] == [0.5, 0.5, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("batch = 2", "batch = 0", 3, "batch is 0: input should be greater than or equal to 1"),
        ("batch = 2", "bach = 2", 3, "unknown key bach: allowed are steps, batch, accumulate, seed"),
        ("density = 0.05", "density = 1.5", 14, "reducer.density is 1.5: input should be less than or equal to 1"),
        ("density = 0.05", "densty = 0.5", 14, "unknown key reducer.densty: allowed are name, density,"),
        ('"oktopk"', '"oktop"', 15, "reducer.name is 'oktop': input should be 'dense', "),
        ("[10, 0.1]", "[10, 7.0]", 10, "reducer.density_schedule is 7.0: input should be less"),
        ("[10, 0.1]", "[5, 0.1]", 10, "the steps must rise"),
        ("lr = 1e-3", "lr = 'fast'", 17, "optimizer.lr is 'fast': input should be a valid number"),
        ("lr = 1e-3", "lr = nan", 17, "optimizer.lr is nan"),
        ("lr = 1e-3", "betas = [0.9, 1.0]", 17, "optimizer.betas is 1.0: input should be less than 1"),
        ("width = 4", "width = 0", 7, "task.width is 0: input should be greater than or equal to 1"),
        ("width = 4", "wide = 4", 7, "unknown key task.wide: allowed are width"),
        ("[reducer]", "[reduce]", 9, "unknown key reduce: allowed are"),
        ('module = "tiny"', 'module = "tinny"', 6, "task.module is 'tinny': a module beside the job is needed (tiny)"),
        ('module = "tiny"', "", 5, "task.module is None: a module beside the job is needed (tiny)"),
        ("lr = 1e-3", "[checkpoint]\nkeep = 0", 18, "checkpoint.keep is 0"),
        ("density = 0.05", "momentum_masking = true", 14, "needs reducer.apply = 'updates'"),
    ],
)
def test_what_is_wrong_in_a_file(job: Path, old: str, new: str, line: int, told: str) -> None:
    text = job.read_text().replace(old, new)
    assert text != JOB
    job.write_text(text)
    message = refusal(job)
    assert f"{job}:{line}: " in message
    assert told in message


def test_an_inline_table(job: Path) -> None:
    job.write_text('checkpoint = {every = -1}\ntask = {module = "tiny"}\n')
    assert refusal(job).startswith(f"{job}:1: checkpoint.every is -1")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("reducer.density=2", "reducer.density is 2: input should be less than or equal to 1"),
        ("reducer.name=oktop", "reducer.name is 'oktop': input should be 'dense', "),
        ("reducer.densty=0.1", "unknown key reducer.densty: allowed are name, density,"),
        ("reduser.density=0.1", "unknown key reduser: allowed are steps,"),
        ("checkpoint.every.x=1", "checkpoint.every is {'x': 1}"),
        ("task.wide=3", "unknown key task.wide: allowed are width"),
        ("task.module=other", "task.module is 'other': a module beside the job is needed (tiny)"),
        ("reducer=3", "reducer is 3"),
        ("steps", "write it as key=value, such as reducer.density=0.02"),
        ("=3", "write it as key=value"),
        ("reducer..density=3", "write it as key=value"),
        ("steps.x=3", "steps is a value, not a table"),
    ],
)
def test_what_is_wrong_in_an_override(job: Path, override: str, told: str) -> None:
    message = refusal(job, "batch=3", override)
    assert message.startswith(f"--set {override}: ")
    assert told in message


def test_all_that_is_wrong_is_told_at_once(job: Path) -> None:
    message = refusal(job, "batch=0", "reducer.density=3")
    assert "--set batch=0: " in message
    assert "--set reducer.density=3: " in message


def test_broken_toml(job: Path) -> None:
    job.write_text("steps = 3\nbatch = = 2\n")
    assert f"{job}: not valid TOML: " in refusal(job)
    assert "line 2" in refusal(job)
    job.write_bytes(b"name = '\xff'\n")
    assert f"{job}: not valid TOML: " in refusal(job)


def test_no_task(job: Path) -> None:
    job.write_text("steps = 3\n")
    assert refusal(job) == f"{job}: task is missing"


def test_a_module_without_what_it_needs(job: Path) -> None:
    module = job.with_name("tiny.py")
    module.write_text("class Settings: pass\n")
    assert refusal(job) == f"{module} has no build: a job's module defines Settings and build(settings, seed)"


def test_find_job(job: Path) -> None:
    assert find_job(str(job)) == job
    for name in ("gpt_bytes", "gpt_bytes.toml"):
        assert find_job(name) == JOBS / "gpt_bytes.toml"
    with pytest.raises(UsageError, match=r"no job file gpt_bites: .*\(.*cnn_digits, gpt_bytes.*\)"):
        find_job("gpt_bites")


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.toml")), ids=lambda path: path.stem)
def test_ready_jobs_are_valid(path: Path) -> None:
    job, module, _ = load_job(path)
    assert job.task["module"] == path.stem
    assert callable(module.build)


@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        ([], []),
        (["reducer.name=dense"], ["reducer.density", "reducer.dense_steps", "reducer.complete"]),
        (["optimizer.name=sgd"], ["optimizer.betas"]),
        (["optimizer.momentum=0.5", "optimizer.schedule=constant"], ["optimizer.momentum"]),
        (["reducer.apply=updates", "reducer.bucket_mb=3"], ["reducer.bucket_mb"]),
    ],
)
def test_keys_without_effect_are_known(overrides, unused):
    assert load_job(find_job("gpt_bytes"), overrides)[0].without_effect() == unused
