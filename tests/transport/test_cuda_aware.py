"""The verdict on CUDA-awareness, each way of coming to it; nothing here needs a GPU."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from okrt.errors import UsageError
from okrt.transport import cuda_aware
from okrt.transport.cuda_aware import Verdict, by_probe, by_query, by_switch, verdict
from okrt.transport.mpi import library_name

CRAY_8 = "MPI VERSION : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
CRAY_7 = "MPI VERSION : CRAY MPICH version 7.7.18 (ANL base 3.2)"
MVAPICH2 = "MVAPICH2 Version : 2.3.7"
OPEN_MPI = "Open MPI v4.1.6"
# Arrays into which nothing seems to arrive.
DEAF = """
from numpy import ndarray
class Deaf(ndarray):
    def __eq__(self, other):
        return arange(self.size) < 0
zeros = lambda size, dtype: Deaf(size, dtype)
"""
SWITCHES = [
    *("OKRT_CUDA_AWARE", "MPICH_GPU_SUPPORT_ENABLED", "MPICH_RDMA_ENABLED_CUDA"),
    *("MV2_USE_CUDA", "OMPI_MCA_opal_cuda_support"),
]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    verdict.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_aware, "has_gpu", lambda: True)


@pytest.fixture
def fake_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> Path:
    """A module for the probe to import in the place of CuPy, with arrays of NumPy."""
    file = tmp_path / "cupy.py"
    file.write_text(
        "from types import SimpleNamespace as S\nfrom numpy import arange, zeros\n"
        "cuda = S(get_current_stream=lambda: S(synchronize=lambda: None))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def built(tmp_path: Path, source: str) -> str:
    """A shared library of that C source, in the place of MPI."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build a library")
    library = tmp_path / "libmpi.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    return str(library)


def probe_by(code: str, limit_s: float = 20) -> Verdict:
    return by_probe("Some MPI", (sys.executable, "-S", "-c", code), limit_s)


@pytest.mark.parametrize(("text", "aware"), [("1", True), ("0", False)])
def test_the_user_has_the_first_word(monkeypatch: pytest.MonkeyPatch, text: str, aware: bool) -> None:
    monkeypatch.setattr(cuda_aware, "library_name", lambda: CRAY_8)
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "0")
    monkeypatch.setenv("OKRT_CUDA_AWARE", text)
    assert (verdict().aware, verdict().reason) == (aware, f"OKRT_CUDA_AWARE={text}")


@pytest.mark.parametrize("text", ["yes", "", "2"])
def test_the_user_is_told_what_words_there_are(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OKRT_CUDA_AWARE", text)
    with pytest.raises(UsageError, match=f"OKRT_CUDA_AWARE={text}: 1 says"):
        verdict()


@pytest.mark.parametrize(
    ("library", "switch", "mapped", "aware", "reason", "remedy"),
    [
        (CRAY_8, "MPICH_GPU_SUPPORT_ENABLED=1", "/x/libmpi_gtl_cuda.so.0", True, "libmpi_gtl_cuda loaded", ""),
        (CRAY_8, "MPICH_GPU_SUPPORT_ENABLED=1", "/x/libmpi.so", False, "is not loaded", "LD_PRELOAD=libmpi_gtl_cuda"),
        (CRAY_8, "MPICH_GPU_SUPPORT_ENABLED=1", "/x/libmpi.so", False, "is not loaded", "craype-accel"),
        (CRAY_8, "MPICH_GPU_SUPPORT_ENABLED=0", "/x/libmpi_gtl_cuda.so", False, "ENABLED=0", "ENABLED=1 and load"),
        (CRAY_8, "", "/x/libmpi_gtl_cuda.so", False, "ENABLED not set", "export MPICH_GPU_SUPPORT_ENABLED=1"),
        (CRAY_8, "MPICH_RDMA_ENABLED_CUDA=1", "/x/libmpi_gtl_cuda.so", False, "GPU_SUPPORT_ENABLED not set", "export"),
        (CRAY_7, "MPICH_RDMA_ENABLED_CUDA=1", "", True, "MPICH_RDMA_ENABLED_CUDA=1", ""),
        (CRAY_7, "MPICH_GPU_SUPPORT_ENABLED=1", "", False, "not set", "export MPICH_RDMA_ENABLED_CUDA=1"),
        (MVAPICH2, "MV2_USE_CUDA=0", "", False, "MV2_USE_CUDA=0", "export MV2_USE_CUDA=1"),
        (MVAPICH2, "", "", False, "MV2_USE_CUDA not set", "export MV2_USE_CUDA=1"),
        (OPEN_MPI, "OMPI_MCA_opal_cuda_support=false", "", False, "support=false", "unset OMPI_MCA_opal_cuda_support"),
    ],
)
def test_switches(
    monkeypatch: pytest.MonkeyPatch, library: str, switch: str, mapped: str, aware: bool, reason: str, remedy: str
) -> None:
    """They count more than what the library says of itself, which is yes here."""
    if switch:
        monkeypatch.setenv(*switch.split("="))
    monkeypatch.setattr(cuda_aware, "library_name", lambda: library)
    monkeypatch.setattr(cuda_aware, "mapped_files", lambda: {mapped})
    monkeypatch.setattr(cuda_aware, "by_query", lambda *_: Verdict(True, "asked", ""))
    found = verdict()
    assert found.aware is aware
    assert reason in found.reason
    assert remedy in found.remedy
    assert bool(found.remedy) == (not aware)


@pytest.mark.parametrize(
    ("library", "switch"),
    [(MVAPICH2, "MV2_USE_CUDA=1"), (OPEN_MPI, "OMPI_MCA_opal_cuda_support=true"), (OPEN_MPI, ""), ("MPICH", "")],
)
def test_without_a_switch_that_decides_the_library_is_asked(
    monkeypatch: pytest.MonkeyPatch, library: str, switch: str
) -> None:
    if switch:
        monkeypatch.setenv(*switch.split("="))
    assert by_switch(library) is None


def test_mapped_files_are_those_of_this_process() -> None:
    assert MPI.__file__ in cuda_aware.mapped_files()


@pytest.mark.parametrize("answer", [1, 0])
@pytest.mark.parametrize(
    "function",
    [
        "int MPIX_Query_cuda_support(void) {{ return {answer}; }}",
        "int MPIX_GPU_query_support(int kind, int *said) {{ *said = kind == 0 ? {answer} : !{answer}; return 0; }}",
        # As in MPICH 3.4: only one of the two can be called and lived through.
        "int MPIX_GPU_query_support(int kind, int *said) {{ *said = {answer}; return 0; }}\n"
        "int MPIX_Query_cuda_support(void) {{ __builtin_trap(); }}",
    ],
    ids=["query_cuda", "gpu_query", "both"],
)
def test_what_the_library_says(tmp_path: Path, function: str, answer: int) -> None:
    found = by_query("Some MPI 1.0", built(tmp_path, function.format(answer=answer)))
    assert found is not None
    assert found.aware is bool(answer)
    assert "Some MPI 1.0 says" in found.reason
    assert bool(found.remedy) == (not answer)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [(OPEN_MPI, "--with-ucx"), (MVAPICH2, "MVAPICH2-GDR"), ("MPICH Version: 4.2", "an MPICH that was built with")],
)
def test_how_to_get_a_library_that_says_yes(tmp_path: Path, library: str, remedy: str) -> None:
    found = by_query(library, built(tmp_path, "int MPIX_Query_cuda_support(void) { return 0; }"))
    assert found is not None
    assert remedy in found.remedy


def test_a_library_that_cannot_be_asked(tmp_path: Path) -> None:
    assert by_query("Some MPI", built(tmp_path, "int MPI_Init(void) { return 0; }")) is None


def test_the_library_here_is_asked_through_mpi4py() -> None:
    """The oracle: the first of its mapped files that has the function, and what that returns."""
    if by_switch(library_name()) is not None:
        pytest.skip("this library goes by its switches")
    answers = []
    for path in cuda_aware.mapped_files():
        if ".so" in path and "mpi" in Path(path).name.lower():
            library = ctypes.CDLL(path)
            if hasattr(library, "MPI_Init") and hasattr(library, "MPIX_Query_cuda_support"):
                answers.append(bool(library.MPIX_Query_cuda_support()))
    found = by_query(library_name(), MPI.__file__)
    assert (found and found.aware) == (answers[0] if answers else None)


def test_the_verdict_on_the_library_here() -> None:
    """The wheel of MPICH has no CUDA; of any other library only the form of the verdict is known."""
    found = verdict()
    assert verdict() is found
    assert found.reason and "\n" not in found.reason + found.remedy
    assert bool(found.remedy) == (found.aware is not True)
    version = MPI.Get_library_version()
    if version.startswith("MPICH Version") and "--with-cuda" not in version:
        assert found.aware is False
        assert found.reason == f"{library_name()} says that it is not (MPIX_GPU_query_support)"


def test_nothing_is_tried_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_aware, "has_gpu", lambda: False)
    found = probe_by("raise SystemExit(0)")
    assert found.aware is None
    assert found.reason == "Some MPI does not say, and there is no GPU to try it with"
    assert found.remedy == "export OKRT_CUDA_AWARE=1 if you know that it is"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("code", "aware", "reason"),
    [
        ("", True, "Some MPI moved device memory when tried"),
        ("import os; os.kill(os.getpid(), 11)", False, "when tried: killed by SIGSEGV"),
        ("raise SystemExit('what arrived was wrong')", False, "when tried: what arrived was wrong"),
        ("raise RuntimeError('no such buffer')", False, "when tried: RuntimeError: no such buffer"),
        ("raise SystemExit(7)", False, "when tried: no word of why"),
        ("import sys; sys.stderr.write('no CuPy\\n'); sys.exit(3)", None, "could not be tried: no CuPy"),
    ],
)
def test_probe(code: str, aware: bool | None, reason: str) -> None:
    found = probe_by(code)
    assert found.aware is aware
    assert found.reason.endswith(reason)
    assert bool(found.remedy) == (aware is not True)


@pytest.mark.usefixtures("gpu")
def test_probe_that_hangs() -> None:
    found = probe_by("import time; time.sleep(60)", limit_s=0.2)
    assert found.aware is None
    assert found.reason == "a message of device memory did not arrive within 0.2 s"


@pytest.mark.usefixtures("gpu")
def test_the_probe_is_no_rank_of_this_job(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{prefix}X" for prefix in ("PMI_", "PMIX_", "OMPI_", "SLURM_", "HYDRA_", "MPIR_", "PALS_")]
    for name in [*names, "MY_OWN"]:
        monkeypatch.setenv(name, "1")
    found = probe_by(f"import os, sys; sys.exit(repr([n for n in {[*names, 'MY_OWN']} if n in os.environ]))")
    assert found.reason.endswith("['MY_OWN']")


@pytest.mark.usefixtures("fake_cupy")
def test_the_probe_itself_arrives() -> None:
    assert by_probe("Some MPI") == Verdict(True, "Some MPI moved device memory when tried", "")


@pytest.mark.parametrize(
    ("change", "aware", "reason"),
    [
        ("zeros = lambda size, dtype: 'no buffer'", False, "when tried: "),
        (DEAF, False, "what arrived was not what was sent"),
        ("raise ImportError('no driver')", None, "CuPy: no driver"),
        ("def zeros(size, dtype): raise RuntimeError('no device')", None, "CuPy: no device"),
    ],
)
def test_the_probe_itself_fails(fake_cupy: Path, change: str, aware: bool | None, reason: str) -> None:
    with fake_cupy.open("a") as more:
        more.write(change)
    found = by_probe("Some MPI")
    assert found.aware is aware
    assert reason in found.reason


@pytest.mark.usefixtures("gpu")
def test_a_library_that_says_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_aware, "by_switch", lambda *_: None)
    monkeypatch.setattr(cuda_aware, "by_query", lambda *_: None)
    monkeypatch.setattr(cuda_aware, "by_probe", lambda library: Verdict(None, f"tried {library}", "x"))
    assert verdict().reason == f"tried {library_name()}"


def test_what_counts_as_a_gpu() -> None:
    assert cuda_aware.has_gpu() == any(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia"))
