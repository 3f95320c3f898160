"""The spec of a sweep: which points a grid has, what each changes in a job, and what is refused."""

import itertools
from pathlib import Path

import pytest

from okrt.errors import UsageError
from okrt.sweep.spec import Spec, load_spec
from okrt.train.config import load_job

GRID = """
[grid]
ranks = [1, 2, 4]
reducer = ["oktopk", "dense", "gloo"]
density = [0.01, 0.1]
elements = [1000, 2000]
lab = ["", "1gbit"]
"""
JOB = """
job = "gpt_bytes"
scaling = "{scaling}"
seed = 3
[settings]
batch = 8
"task.width" = 32
[grid]
ranks = [2, 4]
reducer = ["dense", "topka"]
density = [0.02]
"optimizer.lr" = [1e-3, 2e-3]
"""


def load(tmp_path: Path, text: str) -> Spec:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    return load_spec(file)


def test_every_combination_is_a_point_and_exact_reducers_have_no_density(tmp_path: Path) -> None:
    points = load(tmp_path, GRID).points
    sparse = itertools.product([1, 2, 4], [1000, 2000], ["", "1gbit"], ["oktopk"], [0.01, 0.1])
    exact = itertools.product([1, 2, 4], [1000, 2000], ["", "1gbit"], ["dense", "gloo"], [1.0])
    assert {tuple(point.values()) for point in points} == {*sparse, *exact}
    assert len(points) == 3 * 2 * 2 * 4
    assert {tuple(point) for point in points} == {("ranks", "elements", "lab", "reducer", "density")}
    assert [point["ranks"] for point in points] == sorted(point["ranks"] for point in points)


def test_weak_scaling_gives_each_rank_the_elements(tmp_path: Path) -> None:
    points = load(tmp_path, 'scaling = "weak"\n' + GRID).points
    assert {(point["ranks"], point["elements"]) for point in points} == {
        (ranks, ranks * elements) for ranks in (1, 2, 4) for elements in (1000, 2000)
    }


@pytest.mark.parametrize(("scaling", "batches"), [("strong", {2: 4, 4: 2}), ("weak", {2: 8, 4: 8})])
def test_a_job_is_changed_by_the_settings_and_the_point(tmp_path: Path, scaling: str, batches: dict[int, int]) -> None:
    spec = load(tmp_path, JOB.format(scaling=scaling))
    assert len(spec.points) == 2 * 2 * 2
    assert spec.job is not None
    for point in spec.points:
        job, _, settings = load_job(spec.job, spec.overrides(point))
        assert (job.reducer.name, job.optimizer.lr) == (point["reducer"], point["optimizer.lr"])
        assert (job.batch, job.seed, settings.width) == (batches[point["ranks"]], 3, 32)
        assert job.reducer.dense_steps == 0, "steps of the sparse kind are what is measured"
        assert job.reducer.density == (0.02 if point["reducer"] == "topka" else 0.01)


def test_a_job_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[task]\nmodule = "mine"\n')
    (tmp_path / "mine.py").write_text(
        "import pydantic\nclass Settings(pydantic.BaseModel): pass\ndef build(settings, seed): pass\n"
    )
    spec = load(tmp_path, 'job = "mine.toml"\n[grid]\nranks = [2]\n')
    assert spec.job == tmp_path / "mine.toml"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "grid is missing"),
        ("[grid]\n", "grid.ranks is missing"),
        ("[grid]\nranks = []\nelements = [10]\n", "spec.toml:2: grid.ranks is []"),
        ("[grid]\nranks = 4\nelements = [10]\n", "spec.toml:2: grid.ranks is 4"),
        ("[grid]\nranks = [0]\nelements = [10]\n", "spec.toml:2: grid.ranks is 0"),
        ("[grid]\nranks = [2, 2]\nelements = [10]\n", "ranks has a value twice"),
        ("[grid]\nranks = [2]\n", "grid.elements is missing"),
        ("[grid]\nranks = [2]\nelements = [0]\n", "spec.toml:3: grid.elements is 0"),
        ("[grid]\nranks = [2]\nelements = [10]\ndensity = [1.5]\n", "spec.toml:4: grid.density is 1.5"),
        ('[grid]\nranks = [2]\nelements = [10]\nreducer = ["oktop"]\n', "spec.toml:4: grid.reducer is 'oktop'"),
        ("[grid]\nranks = [2]\nelements = [10]\nwidth = [3]\n", "width needs a job"),
        ('scaling = "week"\n[grid]\nranks = [2]\nelements = [10]\n', "spec.toml:1: scaling is 'week'"),
        ('scaling = "weak"\n[grid]\nranks = [4]\nelements = [1000000000]\n', "4000000000 elements are more than"),
        ("[grid]\nranks = [2]\nelements = [10]\n[repeat]\nat_least = 9\nat_most = 5\n", "less than at_least, 9"),
        ("[grid]\nranks = [2]\nelements = [10]\n[repeat]\nonce = 1\n", "unknown key repeat.once"),
        ("[grid\n", "not valid TOML"),
        ('job = "no_such_job"\n[grid]\nranks = [2]\n', "no job file no_such_job"),
        ('job = "gpt_bytes"\n[grid]\nranks = [2]\nelements = [10]\n', "the job's model says how many"),
        ('job = "gpt_bytes"\n[grid]\nranks = [2]\nreducer = ["gloo"]\n', "gloo cannot train a job"),
        ('job = "gpt_bytes"\n[grid]\nranks = [2]\n"optimizer.rate" = [1.0]\n', "unknown key optimizer.rate"),
        ('job = "gpt_bytes"\n[grid]\nranks = [2]\n"reducer.density" = [0.1]\n', "is called density in a grid"),
        ('job = "gpt_bytes"\n[grid]\nranks = [2]\n"task.width" = 64\n', "task.width must be a list"),
        ('job = "gpt_bytes"\n[settings]\ntask.width = 3\n[grid]\nranks = [2]\n', '"task.width" = '),
        ('job = "gpt_bytes"\n[grid]\nranks = [3]\n', "a batch of 8 cannot be shared evenly by 3 ranks"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load(tmp_path, text)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "spec.toml" in str(refusal.value) or "no job file" in told
