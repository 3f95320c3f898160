"""Whether MPI may be handed device memory: a wrong yes is a segfault, a wrong no two copies through the host."""

import ctypes
import functools
import glob
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from okrt.errors import UsageError
from okrt.transport.mpi import library_name

OVERRIDE = "OKRT_CUDA_AWARE"
PROBE = (sys.executable, str(Path(__file__).with_name("cuda_probe.py")))
PROBE_LIMIT_S = 20.0
CANNOT_TELL = 3  # exit code of the probe
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "HYDRA_", "MPIR_", "PALS_")
_MPIX_GPU_SUPPORT_CUDA = 0
_FORCE = f"export {OVERRIDE}=1 if you know that it is"


@dataclass(frozen=True)
class Verdict:
    aware: bool | None
    """None: cannot tell"""
    reason: str
    """one line: what the verdict rests on"""
    remedy: str
    """one line: what to do about a verdict that is not True; empty if it is"""


@functools.cache
def verdict() -> Verdict:
    """Settled once for the process: the user's word, the switches of the library, its own answer, or a probe."""
    library = library_name()
    return by_user() or by_switch(library) or by_query(library, MPI.__file__) or by_probe(library)


def by_user() -> Verdict | None:
    text = os.environ.get(OVERRIDE)
    if text is None:
        return None
    if text not in ("0", "1"):
        raise UsageError(f"{OVERRIDE}={text}: 1 says that MPI is CUDA-aware, 0 that it is not")
    return Verdict(text == "1", f"{OVERRIDE}={text}", "" if text == "1" else f"unset {OVERRIDE} to have it found out")


def by_switch(library: str) -> Verdict | None:
    """For libraries with a switch in the environment, whatever they answer when asked.

    That of MVAPICH2 says what was compiled, not what is switched on; that of Cray does not know the GTL.
    """
    if cray := re.search(r"CRAY MPICH version (\d+)", library, re.IGNORECASE):
        return by_cray_switch(int(cray[1]))
    if "MVAPICH2" in library and os.environ.get("MV2_USE_CUDA") != "1":
        return Verdict(False, f"MVAPICH2 with {setting('MV2_USE_CUDA')}", "export MV2_USE_CUDA=1")
    name = "OMPI_MCA_opal_cuda_support"
    if "Open MPI" in library and os.environ.get(name, "").lower() in ("0", "false"):
        return Verdict(False, f"Open MPI with {setting(name)}", f"unset {name}")
    return None


def by_cray_switch(version: int) -> Verdict:
    name = "MPICH_RDMA_ENABLED_CUDA" if version < 8 else "MPICH_GPU_SUPPORT_ENABLED"
    if os.environ.get(name) != "1":
        also = "" if version < 8 else " and load the GTL (module load craype-accel-nvidia80 or that of your GPU)"
        return Verdict(False, f"Cray MPICH with {setting(name)}", f"export {name}=1{also}")
    if version >= 8 and not any("libmpi_gtl_cuda" in path for path in mapped_files()):
        remedy = (
            "load the craype-accel module of your GPU and build mpi4py with it (-lmpi_gtl_cuda), or "
            "LD_PRELOAD=libmpi_gtl_cuda.so from the gtl/lib folder of Cray MPICH"
        )
        return Verdict(False, f"Cray MPICH with {name}=1, but its GPU library libmpi_gtl_cuda is not loaded", remedy)
    return Verdict(True, f"Cray MPICH with {name}=1{'' if version < 8 else ' and libmpi_gtl_cuda loaded'}", "")


def setting(name: str) -> str:
    return f"{name}={os.environ[name]}" if name in os.environ else f"{name} not set"


def mapped_files() -> set[str]:
    """The files that this process has mapped, its shared libraries among them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}


def by_query(library: str, path: str) -> Verdict | None:
    """What the library says when asked, if it can be; `path` is a shared object that is linked with it."""
    functions = ctypes.CDLL(path)
    said = ctypes.c_int(0)
    # This one first: in MPICH before 4 the other one ends the process by an assertion.
    if hasattr(functions, "MPIX_GPU_query_support"):
        asked = "MPIX_GPU_query_support"
        functions.MPIX_GPU_query_support(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(said))
    elif hasattr(functions, "MPIX_Query_cuda_support"):
        asked = "MPIX_Query_cuda_support"
        said.value = functions.MPIX_Query_cuda_support()
    else:
        return None
    if said.value:
        return Verdict(True, f"{library} says so ({asked})", "")
    if "Open MPI" in library:
        remedy = "build Open MPI with --with-cuda and --with-ucx (a UCX with CUDA), or load such a module"
    elif "MVAPICH" in library:
        remedy = "use MVAPICH2-GDR, or build MVAPICH2 with --enable-cuda"
    else:
        remedy = "use the MPI of the machine, or an MPICH that was built with --with-cuda"
    return Verdict(False, f"{library} says that it is not ({asked})", remedy)


def by_probe(library: str, command: tuple[str, ...] = PROBE, limit_s: float = PROBE_LIMIT_S) -> Verdict:
    """What comes of sending device memory, in a process of its own that may die of it."""
    if not has_gpu():
        return Verdict(None, f"{library} does not say, and there is no GPU to try it with", _FORCE)
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    try:
        done = subprocess.run(
            command, env=alone, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return Verdict(None, f"a message of device memory did not arrive within {limit_s:g} s", _FORCE)
    last_words = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
    if done.returncode == CANNOT_TELL:
        return Verdict(None, f"{library} does not say, and it could not be tried: {last_words}", _FORCE)
    if done.returncode == 0:
        return Verdict(True, f"{library} moved device memory when tried", "")
    if done.returncode < 0:
        last_words = f"killed by {signal.Signals(-done.returncode).name}"
    return Verdict(
        False, f"{library} failed to move device memory when tried: {last_words}", "use a CUDA-aware build of it"
    )


def has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*"))
