"""What `okrt doctor` goes by: the facts of one rank, and how all ranks come to know those of all."""

import glob
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import okrt
from okrt.world import World, launcher_size

CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")


@dataclass(frozen=True)
class Facts:
    """One rank: what it is, what it has and what it sees of its host."""

    rank: int
    host: str
    okrt: str
    python: str
    torch: str
    torch_cuda: str
    """version of CUDA that torch was built with; empty for a build for CPUs"""
    mpi_library: str
    mpi_threads: str
    """thread level of MPI, such as MPI_THREAD_MULTIPLE"""
    mpi_ranks: int
    launcher: str
    """the variable in which the launcher says how many ranks there are; empty if no launcher does"""
    launcher_ranks: int
    gpus: list[str]
    """name and UUID of those that this rank sees: places in CUDA_VISIBLE_DEVICES say nothing across ranks"""
    gpu: str
    """the one that it uses; empty on a CPU"""
    gpu_nodes: int
    """GPUs of the host by its device files, seen or not"""
    gpus_hidden: bool
    """by the user, with CUDA_VISIBLE_DEVICES"""
    driver: str
    cupy: str
    numba_cuda: str
    cuda_aware: bool | None
    cuda_aware_reason: str
    cuda_aware_remedy: str
    host_cores: int
    cores: list[int]
    """those that this rank may use"""
    threads: int
    kernels: str
    """why the kernels do not run; empty if they do"""
    numba: str
    h5py: str
    hdf5: str
    h5py_parallel: bool
    slurm_commands: list[str]
    slurm_job: str
    slurm_nodes: int
    slurm_left_s: float | None
    """until the time limit of the job"""


def gather(world: World) -> list[Facts]:
    """The facts of all ranks, on every rank."""
    return [Facts(**json.loads(text)) for text in world.transport.gather_texts(json.dumps(asdict(of_this_rank(world))))]


def of_this_rank(world: World) -> Facts:
    import h5py  # type: ignore[import-untyped]
    import torch

    from okrt.transport.cuda_aware import verdict
    from okrt.transport.mpi import library_name, thread_level

    launcher, launcher_ranks = launcher_size() or ("", 0)
    aware = verdict()
    seen = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    gpus = [f"{gpu.name} GPU-{gpu.uuid}" for gpu in seen]
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return Facts(
        rank=world.rank,
        host=socket.gethostname(),
        okrt=okrt.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        mpi_library=library_name(),
        mpi_threads=thread_level(),
        mpi_ranks=world.size,
        launcher=launcher,
        launcher_ranks=launcher_ranks,
        gpus=gpus,
        gpu=gpus[world.device.index] if world.device.type == "cuda" else "",
        gpu_nodes=len(glob.glob("/dev/nvidia[0-9]*")),
        gpus_hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        driver=driver_version(),
        cupy=installed(CUPY_PACKAGES),
        numba_cuda=installed(["numba-cuda"]),
        cuda_aware=aware.aware,
        cuda_aware_reason=aware.reason,
        cuda_aware_remedy=aware.remedy,
        host_cores=os.cpu_count() or 1,
        cores=sorted(os.sched_getaffinity(0)),
        threads=world.threads,
        kernels=complaint_of_kernels(),
        numba=installed(["numba"]),
        h5py=h5py.version.version,
        hdf5=h5py.version.hdf5_version,
        h5py_parallel=h5py.get_config().mpi,
        slurm_commands=[name for name in ("srun", "sbatch") if shutil.which(name)],
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        slurm_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", 0)),
        slurm_left_s=float(end) - time.time() if end else None,
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of the NVIDIA driver; empty if there is none."""
    if not file.exists():
        return ""
    words = file.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")


def installed(names: Iterable[str]) -> str:
    """The first of these packages that is here, with its version; empty if none is."""
    found = (package for name in names for package in importlib.metadata.distributions(name=name))
    return next((f"{package.name} {package.version}" for package in found), "")


def complaint_of_kernels() -> str:
    try:
        from okrt.kernels import cpu

        cpu.all_finite(np.zeros(1, np.float32))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
