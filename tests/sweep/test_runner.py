"""The small decisions of the runner."""

import shutil
from pathlib import Path

import pytest

import okrt
from okrt.sweep import runner
from okrt.sweep.runner import code_version, complaint, config_of, filling_nodes, flat
from okrt.sweep.spec import load_spec

MPIEXEC = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 1
===================================================================================
"""


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("", ""),
        ("one\n\ntwo\n", "two"),
        ("okrt: rank 1: no such thing: do that\n" + MPIEXEC, "okrt: rank 1: no such thing: do that"),
        (
            "rank 0: Traceback (most recent call last):\n  File\nRuntimeError: out of luck\n" + MPIEXEC,
            "RuntimeError: out of luck",
        ),
        (
            "KeyError: 'a'\n\nDuring handling\n\ntorch.cuda.OutOfMemoryError: too large\n",
            "torch.cuda.OutOfMemoryError: too large",
        ),
        ("srun: error: n1: task 0: Killed\n", "srun: error: n1: task 0: Killed"),
        ("okrt: " + "x" * 2000, "okrt: " + "x" * 494),
    ],
)
def test_the_line_that_tells_most(printed: str, told: str) -> None:
    assert complaint(printed) == told


def test_ranks_fill_one_node_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    assert filling_nodes("srun --mpi=pmi2", 4) == "srun --mpi=pmi2"
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    nodes = {ranks: filling_nodes("/usr/bin/srun --mpi=pmi2", ranks) for ranks in (1, 4, 5, 8)}
    assert nodes == {ranks: f"/usr/bin/srun --mpi=pmi2 -N {n}" for ranks, n in ((1, 1), (4, 1), (5, 2), (8, 2))}
    assert filling_nodes("mpiexec -bind-to core", 4) == "mpiexec -bind-to core"


def test_another_module_of_the_job_is_another_spec(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[task]\nmodule = "model"\n')
    (tmp_path / "spec.toml").write_text('job = "job.toml"\n[grid]\nranks = [2]\n')
    text = "import pydantic\nclass Settings(pydantic.BaseModel): pass\ndef build(settings, seed): pass\n"
    seen = set()
    for module in (text, text, text + "WIDTH = 3\n"):
        (tmp_path / "model.py").write_text(module)
        seen.add(config_of(load_spec(tmp_path / "spec.toml"))["job_sha256"])
    assert len(seen) == 2


def test_keys_with_dots() -> None:
    assert flat({"a": {"b": [1], "c": {"d": None}}, "e": 2}) == {"a.b": [1], "a.c.d": None, "e": 2}


def test_every_change_of_what_is_measured_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "okrt"
    shutil.copytree(Path(okrt.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    same = code_version()
    monkeypatch.setattr(runner.okrt, "__file__", str(copy / "__init__.py"))
    assert code_version() == same
    for file, changes in (("report/statistics.py", False), ("kernels/cpu.py", True), ("reducers/dense.py", True)):
        (copy / file).write_text((copy / file).read_text() + "\n")
        assert (code_version() != same) == changes
        same = code_version()
