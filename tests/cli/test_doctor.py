"""`okrt doctor`: what it makes of facts, most of them made up, and the real page of this machine."""

import io
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import okrt
from okrt.cli.doctor import show
from okrt.cli.facts import Facts, driver_version, gather, installed
from okrt.cli.findings import MANY, NOTE, OK, WRONG, Finding, findings
from okrt.world import join

ON_CPU = Facts(
    rank=0,
    host="nid1",
    okrt="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    torch_cuda="12.8",
    mpi_library="MPICH Version: 5.0.2",
    mpi_threads="MPI_THREAD_MULTIPLE",
    mpi_ranks=1,
    launcher="",
    launcher_ranks=0,
    gpus=[],
    gpu="",
    gpu_nodes=0,
    gpus_hidden=False,
    driver="",
    cupy="",
    numba_cuda="",
    cuda_aware=False,
    cuda_aware_reason="it says that it is not",
    cuda_aware_remedy="use another",
    host_cores=64,
    cores=list(range(64)),
    threads=16,
    kernels="",
    numba="numba 0.68.1",
    h5py="3.16.0",
    hdf5="1.14.6",
    h5py_parallel=False,
    slurm_commands=[],
    slurm_job="",
    slurm_nodes=0,
    slurm_left_s=None,
)
GPUS = [f"A100 GPU-{letter}" for letter in "abcd"]
ON_GPU = replace(
    ON_CPU,
    gpus=GPUS,
    gpu=GPUS[0],
    gpu_nodes=4,
    driver="535.1",
    cupy="cupy-cuda12x 13.6.0",
    numba_cuda="numba-cuda 0.20.0",
    cuda_aware=True,
    cuda_aware_reason="it says so",
    cuda_aware_remedy="",
    threads=16,
)


def ranks(of: Facts, count: int = 4, per_host: int = 4, **columns: list) -> list[Facts]:
    """That many ranks under srun; columns: what differs between them, a value for each."""
    return [
        replace(
            of,
            rank=rank,
            host=f"nid{1 + rank // per_host}",
            mpi_ranks=count,
            launcher="SLURM_STEP_NUM_TASKS",
            launcher_ranks=count,
            **{name: values[rank] for name, values in columns.items()},
        )
        for rank in range(count)
    ]


def about(topic: str, facts: list[Facts]) -> list[Finding]:
    return [finding for finding in findings(facts) if finding.topic == topic]


def the(topic: str, facts: list[Facts]) -> Finding:
    (finding,) = about(topic, facts)
    return finding


def marks(facts: list[Facts]) -> dict[str, str]:
    return {finding.topic: finding.mark for finding in findings(facts) if finding.mark != OK}


def test_one_process_on_cpus_has_notes_only() -> None:
    assert marks([ON_CPU]) == {"GPUs": NOTE, "GPU packages": NOTE, "CUDA-aware": NOTE}


def test_a_gpu_to_each_rank_is_as_it_should_be() -> None:
    found = findings(ranks(ON_GPU, gpu=GPUS))
    assert {finding.mark for finding in found} == {OK}
    assert not any(finding.remedy for finding in found)
    assert the("GPUs", ranks(ON_GPU, gpu=GPUS)).text.splitlines()[1] == "nid1: rank 1 uses A100 GPU-b"


@pytest.mark.parametrize("facts", [[ON_CPU], ranks(ON_CPU), ranks(ON_GPU), ranks(ON_GPU, 1)])
def test_what_is_not_ok_says_what_to_do(facts: list[Facts]) -> None:
    assert all(bool(finding.remedy) == (finding.mark != OK) for finding in findings(facts))


@pytest.mark.parametrize(
    ("topic", "column", "values", "text"),
    [
        ("okrt", "okrt", ["0.1.0", "0.1.0", "0.2.0", "0.1.0"], "torch 2.13.0 on rank 2"),
        ("okrt", "python", ["3.11.7", "3.10.1", "3.10.1", "3.10.1"], "Python 3.10.1, torch 2.13.0 on ranks 1-3"),
        ("MPI", "mpi_library", ["MPICH", "Open MPI", "MPICH", "MPICH"], "MPICH on ranks 0, 2-3\nOpen MPI on rank 1"),
        ("HDF5", "hdf5", ["1.14.6", "1.14.6", "1.14.6", "1.10.0"], "HDF5 1.10.0, serial: rank 0 writes on rank 3"),
    ],
)
def test_ranks_of_several_environments(topic: str, column: str, values: list[str], text: str) -> None:
    found = the(topic, ranks(ON_CPU, **{column: values}))
    assert found.mark == WRONG
    assert text in found.text
    assert found.remedy == "start all ranks from one and the same environment"


def test_mpi_without_thread_multiple() -> None:
    levels = ["MPI_THREAD_MULTIPLE", *["MPI_THREAD_SERIALIZED"] * 3]
    found = the("MPI threads", ranks(ON_CPU, mpi_threads=levels))
    assert found.mark == WRONG
    assert found.text.startswith("MPI_THREAD_SERIALIZED on ranks 1-3: reductions will not overlap")
    assert "MPI4PY_RC_THREAD_LEVEL" in found.remedy
    assert "MPICH_MAX_THREAD_SAFETY=multiple" in found.remedy


def test_launcher_and_mpi_that_do_not_know_each_other() -> None:
    found = the("launcher", [replace(ON_CPU, launcher="SLURM_STEP_NUM_TASKS", launcher_ranks=4)])
    assert found.mark == WRONG
    assert found.text.startswith("SLURM_STEP_NUM_TASKS=4, MPI sees 1")
    assert "srun --mpi=pmi2" in found.remedy


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ([ON_CPU], "none: this process alone"),
        ([replace(ON_CPU, mpi_ranks=2)] * 2, "unknown; MPI sees 2 ranks"),
        (ranks(ON_CPU), "SLURM_STEP_NUM_TASKS=4, MPI sees 4"),
    ],
)
def test_launchers_that_are_fine(facts: list[Facts], text: str) -> None:
    assert the("launcher", facts) == Finding("launcher", OK, text)


def test_ranks_per_node() -> None:
    assert the("ranks", ranks(ON_CPU, 6)).text == "nid1: ranks 0-3\nnid2: ranks 4-5"
    many = the("ranks", ranks(ON_CPU, 4 * MANY + 8)).text.splitlines()
    assert (len(many), many[-1]) == (MANY + 1, "and 2 more such lines")


def test_two_ranks_on_one_gpu() -> None:
    """Told apart by UUID: on another host the same place in the list is another GPU."""
    crowd = ranks(ON_GPU, gpu=[GPUS[0], GPUS[1], GPUS[0], GPUS[0]], per_host=3)
    (wrong,) = [finding for finding in about("GPUs", crowd) if finding.mark == WRONG]
    assert wrong.text == "nid1: ranks 0, 2 share A100 GPU-a"
    for remedy in ("--gpus-per-task=1", "fewer ranks per node", "CUDA_VISIBLE_DEVICES"):
        assert remedy in wrong.remedy


def test_a_gpu_for_some_ranks_only() -> None:
    some = ranks(ON_GPU, gpu=[*GPUS[:3], ""], gpus=[GPUS[:3]] * 3 + [[]])
    (wrong,) = [finding for finding in about("GPUs", some) if finding.mark == WRONG]
    assert wrong.text == "rank 3 without one, the others with"
    assert "--gpus-per-task=1" in wrong.remedy


def test_gpus_that_nobody_uses() -> None:
    used, idle = about("GPUs", ranks(ON_GPU, 2, gpu=GPUS[:2]))
    assert (used.mark, idle.mark) == (OK, NOTE)
    assert idle.text == "nid1: no rank uses A100 GPU-c\nnid1: no rank uses A100 GPU-d"
    assert "one rank per GPU" in idle.remedy


@pytest.mark.parametrize(
    ("change", "mark", "text", "remedy"),
    [
        ({}, NOTE, "none: okrt computes on the CPU", "--gpus-per-task=1"),
        ({"gpu_nodes": 4, "gpus_hidden": True}, NOTE, "hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"),
        ({"gpu_nodes": 4}, WRONG, "nid1 has 4, but torch sees none of them", "--gpus-per-task=1"),
        ({"gpu_nodes": 4, "torch_cuda": ""}, WRONG, "torch 2.13.0 is for CPUs", "install a torch that has CUDA"),
    ],
)
def test_no_gpu(change: dict, mark: str, text: str, remedy: str) -> None:
    found = the("GPUs", [replace(ON_CPU, **change)])
    assert found.mark == mark
    assert text in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("facts", "change", "mark", "text", "remedy"),
    [
        (ON_GPU, {}, OK, "cupy-cuda12x 13.6.0, numba-cuda 0.20.0, driver 535.1", ""),
        (ON_GPU, {"cupy": ""}, WRONG, "CuPy not installed", "pip install 'okrt[cuda12]'"),
        (ON_GPU, {"numba_cuda": ""}, WRONG, "numba-cuda not installed", "pip install 'okrt[cuda12]'"),
        (ON_GPU, {"cupy": "", "torch_cuda": "13.0"}, WRONG, "driver 535.1", "pip install 'okrt[cuda13]'"),
        (ON_CPU, {}, NOTE, "CuPy and numba-cuda not installed", "for GPUs: pip install 'okrt[cuda12]'"),
    ],
)
def test_gpu_packages(facts: Facts, change: dict, mark: str, text: str, remedy: str) -> None:
    found = the("GPU packages", [replace(facts, **change)])
    assert (found.mark, found.remedy) == (mark, remedy)
    assert text in found.text


@pytest.mark.parametrize(("aware", "said"), [(False, "no"), (None, "cannot tell")])
def test_mpi_that_is_not_cuda_aware(aware: bool | None, said: str) -> None:
    why = {"cuda_aware_reason": ["fine", "broken"], "cuda_aware_remedy": ["", "mend it"]}
    found = the("CUDA-aware", ranks(ON_GPU, 2, cuda_aware=[True, aware], **why))
    assert found == Finding("CUDA-aware", NOTE, f"{said}: broken; messages are staged through host memory", "mend it")


def test_cuda_awareness_without_a_gpu() -> None:
    assert the("CUDA-aware", [ON_CPU]).remedy == "nothing on CPUs; for GPUs: use another"
    aware = replace(ON_CPU, cuda_aware=True, cuda_aware_remedy="")
    assert the("CUDA-aware", [aware]).remedy == "nothing on CPUs"


@pytest.mark.parametrize(
    ("cores", "mark", "text"),
    [
        ([[0]] * 4, WRONG, "ranks are bound to the same cores\nnid1: ranks 0-3 on cores 0"),
        ([[0, 1]] * 4, WRONG, "ranks are bound to the same cores\nnid1: ranks 0-3 on cores 0-1"),
        (
            [[0, 1], [1, 2], [3], [4]],
            WRONG,
            "ranks are bound to the same cores\nnid1: rank 0 on cores 0-1 and rank 1 on cores 1-2",
        ),
        ([[0], [1], [2], [3]], OK, "nid1: rank 0 on cores 0\nnid1: rank 1 on cores 1"),
        ([[0, 1]] * 2 + [[2, 3]] * 2, OK, "nid1: ranks 0-1 on cores 0-1\nnid1: ranks 2-3 on cores 2-3"),
        ([list(range(64))] * 4, OK, "nid1: ranks 0-3 on all cores 0-63"),
    ],
)
def test_binding(cores: list[list[int]], mark: str, text: str) -> None:
    found = the("CPU binding", ranks(ON_CPU, cores=cores))
    assert found.mark == mark
    assert found.text.startswith(text)
    if mark == WRONG:
        assert "--cpu-bind=cores" in found.remedy
        assert "mpiexec -bind-to core" in found.remedy


def test_the_same_core_of_two_hosts_is_two_cores() -> None:
    assert the("CPU binding", ranks(ON_CPU, per_host=1, cores=[[0]] * 4)).mark == OK


def test_more_ranks_than_the_host_has_cores() -> None:
    found = the("CPU binding", ranks(replace(ON_CPU, host_cores=2, cores=[0, 1])))
    assert found == Finding(
        "CPU binding", NOTE, "more ranks than cores\nnid1: ranks 0-3 on all cores 0-1", "start fewer ranks per node"
    )


def test_kernel_threads() -> None:
    assert the("kernel threads", ranks(ON_CPU, threads=[16, 16, 16, 8])).text == "16 on ranks 0-2, 8 on rank 3"
    found = the("kernel threads", ranks(ON_CPU, threads=[64] * 4))
    assert found.mark == NOTE
    assert found.text == "nid1: 256 threads of ranks 0-3 on 64 cores"
    assert "OKRT_THREADS" in found.remedy


def test_kernels_that_do_not_run() -> None:
    found = the("kernels", ranks(ON_CPU, kernels=["", "RuntimeError: no locator available", "", ""]))
    assert found.mark == WRONG
    assert found.text == "do not run on rank 1: RuntimeError: no locator available"
    assert "NUMBA_CACHE_DIR" in found.remedy


@pytest.mark.parametrize(
    ("change", "mark", "text", "remedy"),
    [
        ({}, OK, "not here", ""),
        ({"slurm_commands": ["srun", "sbatch"]}, NOTE, "srun and sbatch on PATH, but this is not a job", "srun"),
        (
            {"slurm_job": "77", "slurm_nodes": 1, "slurm_left_s": 3725.4, "slurm_commands": ["srun"]},
            OK,
            "job 77 of 1 nodes, 1:02:05 h left, srun on PATH; sbatch --signal=USR2@120",
            "",
        ),
        ({"slurm_job": "77", "slurm_nodes": 2}, NOTE, "no sbatch on PATH; ranks on 1 of the nodes only", "srun -N"),
    ],
)
def test_slurm(change: dict, mark: str, text: str, remedy: str) -> None:
    found = the("Slurm", ranks(replace(ON_CPU, **change)))
    assert found.mark == mark
    assert text in found.text
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)


@pytest.mark.parametrize("width", [60, 132])
def test_the_page_loses_no_word(width: int) -> None:
    found = findings([replace(ON_GPU, cupy="", mpi_threads="MPI_THREAD_SINGLE", cores=[0], kernels="[red]x[/red]")])
    out = io.StringIO()
    show(found, Console(file=out, width=width))
    shown = out.getvalue().split()
    for finding in found:
        assert [word for word in f"{finding.text} {finding.remedy}".split() if word not in shown] == []
    assert max(map(len, out.getvalue().splitlines())) <= width
    assert out.getvalue().splitlines()[-1].startswith("wrong: MPI threads, GPU packages, kernels")


def test_facts_of_a_rank_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is made to see them; all else is of this machine."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name="P100", uuid=f"uuid{i}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    (facts,) = gather(replace(join(), local_rank=1))
    assert (facts.gpus, facts.gpu) == (["P100 GPU-uuid0", "P100 GPU-uuid1"], "P100 GPU-uuid1")
    assert (facts.gpus_hidden, facts.slurm_job, facts.slurm_nodes) == (True, "77", 2)
    assert facts.slurm_left_s == pytest.approx(100, abs=20)
    assert (facts.cores, facts.kernels) == (sorted(os.sched_getaffinity(0)), "")


def test_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    for line in (
        "NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19",
        "NVIDIA UNIX Open Kernel Module 535.129.03",
    ):
        file.write_text(f"NVRM version: {line}\nGCC version:  gcc version 12.2.0 (GCC)\n")
        assert driver_version(file) == "535.129.03"


def test_installed() -> None:
    assert installed(["no-such-package", "mpi4py"]).startswith("mpi4py ")
    assert installed(["no-such-package"]) == ""


def test_one_process(command: Callable) -> None:
    code, out, err = command("doctor")
    assert err == ""
    for told in (
        *(f"okrt {okrt.__version__}, Python {platform.python_version()}", "none: this process alone"),
        *(f"{platform.node()}: rank 0", "MPI_THREAD_MULTIPLE", "compiled and loaded by numba", "rank 0 writes"),
        f"cores {min(os.sched_getaffinity(0))}",
    ):
        assert told in out
    assert code == ("wrong:" in out)


def test_two_ranks_on_one_core_and_without_threads(start: Callable) -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}}); from okrt.cli.main import main; main()"
    done = start("python", "-c", pinned, "doctor", "--ranks", 2, MPI4PY_RC_THREAD_LEVEL="serialized")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("MPI sees 2") == 1, "one page for all ranks"
    assert f"{platform.node()}: ranks 0-1" in done.stdout
    assert "MPI_THREAD_SERIALIZED on ranks 0-1" in done.stdout
    if os.cpu_count() != 1:
        assert f"ranks 0-1 on cores {core}" in done.stdout
        assert "wrong: MPI threads, CPU binding" in done.stdout


def test_launcher_of_another_mpi(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four processes that it starts, each of which is alone to MPI, the first tells."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    code, out, _ = command("doctor")
    assert code == 1
    assert "SLURM_STEP_NUM_TASKS=4, MPI sees 1" in out
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert command("doctor")[:2] == (1, "")


def test_no_mpi_library(start: Callable, tmp_path: Path) -> None:
    done = start("okrt", "doctor", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)
    assert done.stderr.startswith("okrt: MPI cannot be loaded: ")
    assert "pip install 'okrt[mpich]'" in done.stderr


def test_too_few_ranks(command: Callable) -> None:
    code, out, err = command("doctor", "--ranks", 0)
    assert (code, out) == (64, "")
    assert err.startswith("okrt: --ranks is 0")
