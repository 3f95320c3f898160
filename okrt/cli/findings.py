"""What `okrt doctor` makes of the facts: each finding with a mark and, where not all is well, what to do."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

from okrt.cli.facts import Facts

OK, NOTE, WRONG = "ok", "note", "wrong"
MANY = 8  # lines of one finding, past which the rest is only counted
ONE_GPU_EACH = "srun --gpus-per-task=1, fewer ranks per node, or a CUDA_VISIBLE_DEVICES of its own for each rank"
OWN_CORES = "srun --cpus-per-task=N --cpu-bind=cores, or mpiexec -bind-to core (MPICH), --bind-to core (Open MPI)"


@dataclass(frozen=True)
class Finding:
    topic: str
    mark: str
    text: str
    remedy: str = ""


def findings(ranks: list[Facts]) -> list[Finding]:
    """All that there is to say of a job, from the facts of its ranks in their order."""
    looks = (versions, mpi, threads_of_mpi, launcher, nodes, gpus, gpu_packages, cuda_aware, binding, threads)
    return [finding for look in (*looks, kernels, hdf5, slurm) for finding in look(ranks)]


def spans(numbers: Iterable[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named(ranks: list[Facts]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(facts.rank for facts in ranks)}"


def grouped(ranks: list[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    groups: dict[Any, list[Facts]] = {}
    for facts in ranks:
        groups.setdefault(key(facts), []).append(facts)
    return groups


def by_host(ranks: list[Facts]) -> dict[str, list[Facts]]:
    return grouped(ranks, lambda facts: facts.host)


def lines(texts: list[str]) -> str:
    rest = [f"and {len(texts) - MANY} more such lines"] if len(texts) > MANY else []
    return "\n".join([*texts[:MANY], *rest])


def alike(topic: str, ranks: list[Facts], describe: Callable[[Facts], str]) -> Finding:
    """What should be the same on all ranks."""
    groups = grouped(ranks, describe)
    if len(groups) == 1:
        return Finding(topic, OK, *groups)
    text = lines([f"{said} on {named(who)}" for said, who in groups.items()])
    return Finding(topic, WRONG, text, "start all ranks from one and the same environment")


def versions(ranks: list[Facts]) -> Iterator[Finding]:
    yield alike("okrt", ranks, lambda facts: f"okrt {facts.okrt}, Python {facts.python}, torch {facts.torch}")


def mpi(ranks: list[Facts]) -> Iterator[Finding]:
    yield alike("MPI", ranks, lambda facts: facts.mpi_library)


def threads_of_mpi(ranks: list[Facts]) -> Iterator[Finding]:
    poor = [facts for facts in ranks if facts.mpi_threads != "MPI_THREAD_MULTIPLE"]
    if not poor:
        yield Finding("MPI threads", OK, "MPI_THREAD_MULTIPLE: reductions overlap with backward")
        return
    yield Finding(
        "MPI threads",
        WRONG,
        f"{poor[0].mpi_threads} on {named(poor)}: reductions will not overlap with backward, for want of "
        "MPI_THREAD_MULTIPLE",
        "unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL; on Cray export MPICH_MAX_THREAD_SAFETY=multiple; "
        "else use an MPI that was built with --enable-threads=multiple",
    )


def launcher(ranks: list[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    if not first.launcher:
        said = "none: this process alone" if first.mpi_ranks == 1 else f"unknown; MPI sees {first.mpi_ranks} ranks"
        yield Finding("launcher", OK, said)
        return
    told = f"{first.launcher}={first.launcher_ranks}, MPI sees {first.mpi_ranks}"
    if first.launcher_ranks == first.mpi_ranks:
        yield Finding("launcher", OK, told)
    else:
        yield Finding(
            "launcher",
            WRONG,
            f"{told}: the launcher and the MPI library do not know each other",
            "use the mpiexec of this MPI library, or srun --mpi=pmi2 (MPICH), --mpi=pmix (Open MPI), "
            "--mpi=cray_shasta (Cray)",
        )


def nodes(ranks: list[Facts]) -> Iterator[Finding]:
    yield Finding("ranks", OK, lines([f"{host}: {named(here)}" for host, here in by_host(ranks).items()]))


def gpus(ranks: list[Facts]) -> Iterator[Finding]:
    if not any(facts.gpu for facts in ranks):
        yield no_gpu(ranks)
        return
    used = [f"{facts.host}: rank {facts.rank} uses {facts.gpu}" for facts in ranks if facts.gpu]
    yield Finding("GPUs", OK, lines(used))
    shared = grouped([facts for facts in ranks if facts.gpu], lambda facts: (facts.host, facts.gpu))
    crowds = [f"{host}: {named(who)} share {gpu}" for (host, gpu), who in shared.items() if len(who) > 1]
    if crowds:
        yield Finding("GPUs", WRONG, lines(crowds), ONE_GPU_EACH)
    if without := [facts for facts in ranks if not facts.gpu]:
        yield Finding("GPUs", WRONG, f"{named(without)} without one, the others with", ONE_GPU_EACH)
    idle = []
    for host, here in by_host(ranks).items():
        unused = {gpu for facts in here for gpu in facts.gpus} - {facts.gpu for facts in here}
        idle += [f"{host}: no rank uses {gpu}" for gpu in sorted(unused)]
    if idle:
        yield Finding("GPUs", NOTE, lines(idle), "start one rank per GPU: srun --ntasks-per-node, or mpiexec -n")


def no_gpu(ranks: list[Facts]) -> Finding:
    blind = [facts for facts in ranks if facts.gpu_nodes and not facts.gpus_hidden]
    if not blind:
        hidden = any(facts.gpu_nodes for facts in ranks)
        text = "hidden by CUDA_VISIBLE_DEVICES" if hidden else "none"
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "start it on a GPU node: srun --gpus-per-task=1"
        return Finding("GPUs", NOTE, f"{text}: okrt computes on the CPU", f"to use a GPU: {remedy}")
    first = blind[0]
    text = f"{first.host} has {first.gpu_nodes}, but torch sees none of them"
    if not first.torch_cuda:
        return Finding("GPUs", WRONG, f"{text}: torch {first.torch} is for CPUs", "install a torch that has CUDA")
    remedy = f"ask for them: srun --gpus-per-task=1; see that nvidia-smi works and suits CUDA {first.torch_cuda}"
    return Finding("GPUs", WRONG, text, remedy)


def gpu_packages(ranks: list[Facts]) -> Iterator[Finding]:
    at_work = [facts for facts in ranks if facts.gpu]
    for facts in at_work or ranks:
        missing = [name for name, found in (("CuPy", facts.cupy), ("numba-cuda", facts.numba_cuda)) if not found]
        if missing:
            extra = "cuda13" if facts.torch_cuda.startswith("13") else "cuda12"
            text = f"{' and '.join(missing)} not installed, which GPUs need; driver {facts.driver or 'none'}"
            remedy = f"{'' if at_work else 'for GPUs: '}pip install 'okrt[{extra}]'"
            yield Finding("GPU packages", WRONG if at_work else NOTE, text, remedy)
            return
    first = (at_work or ranks)[0]
    text = f"{first.cupy}, {first.numba_cuda}, driver {first.driver or 'none'}"
    yield Finding("GPU packages", OK, text)


def cuda_aware(ranks: list[Facts]) -> Iterator[Finding]:
    said = {True: "yes", False: "no", None: "cannot tell"}
    at_work = [facts for facts in ranks if facts.gpu]
    first = next((facts for facts in at_work if not facts.cuda_aware), (at_work or ranks)[0])
    text = f"{said[first.cuda_aware]}: {first.cuda_aware_reason}"
    if not at_work:
        remedy = f"; for GPUs: {first.cuda_aware_remedy}" if first.cuda_aware_remedy else ""
        yield Finding("CUDA-aware", NOTE, text, f"nothing on CPUs{remedy}")
    elif first.cuda_aware:
        yield Finding("CUDA-aware", OK, text)
    else:
        text = f"{text}; messages are staged through host memory"
        yield Finding("CUDA-aware", NOTE, text, first.cuda_aware_remedy)


def binding(ranks: list[Facts]) -> Iterator[Finding]:
    texts: list[str] = []
    crowded: list[str] = []
    tight: list[str] = []
    for host, here in by_host(ranks).items():
        groups = grouped(here, lambda facts: tuple(facts.cores))
        for cores, who in groups.items():
            free = len(cores) == who[0].host_cores
            text = f"{host}: {named(who)} on {'all ' if free else ''}cores {spans(cores)}"
            if len(who) <= len(cores):
                texts.append(text)
            else:
                (tight if free else crowded).append(text)
        crowded += [
            f"{host}: {named(groups[one])} on cores {spans(one)} and {named(groups[other])} on cores {spans(other)}"
            for one, other in combinations(groups, 2)
            if set(one) & set(other)
        ]
    if crowded:
        yield Finding("CPU binding", WRONG, f"ranks are bound to the same cores\n{lines(crowded)}", OWN_CORES)
    if tight:
        yield Finding("CPU binding", NOTE, f"more ranks than cores\n{lines(tight)}", "start fewer ranks per node")
    if not crowded and texts:
        yield Finding("CPU binding", OK, lines(texts))


def threads(ranks: list[Facts]) -> Iterator[Finding]:
    crowded = []
    for host, here in by_host(ranks).items():
        cores = len({core for facts in here for core in facts.cores})
        total = sum(facts.threads for facts in here)
        if total > max(cores, len(here)):
            crowded.append(f"{host}: {total} threads of {named(here)} on {cores} cores")
    counts = grouped(ranks, lambda facts: facts.threads)
    told = ", ".join(f"{count} on {named(who)}" for count, who in counts.items())
    if crowded:
        yield Finding("kernel threads", NOTE, lines(crowded), "unset OKRT_THREADS, or export a smaller number")
    else:
        yield Finding("kernel threads", OK, told)


def kernels(ranks: list[Facts]) -> Iterator[Finding]:
    broken = [facts for facts in ranks if facts.kernels]
    if not broken:
        yield Finding("kernels", OK, f"compiled and loaded by {ranks[0].numba}")
        return
    remedy = "export NUMBA_CACHE_DIR=a folder of yours that can be written; if that is not it, reinstall numba"
    yield Finding("kernels", WRONG, f"do not run on {named(broken)}: {broken[0].kernels}", remedy)


def hdf5(ranks: list[Facts]) -> Iterator[Finding]:
    kind = "parallel" if ranks[0].h5py_parallel else "serial"
    yield alike("HDF5", ranks, lambda facts: f"h5py {facts.h5py} with HDF5 {facts.hdf5}, {kind}: rank 0 writes")


def slurm(ranks: list[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    commands = " and ".join(first.slurm_commands)
    if not first.slurm_job:
        if commands:
            text = f"{commands} on PATH, but this is not a job: what is said here is not of the compute nodes"
            yield Finding("Slurm", NOTE, text, "srun -N 2 -n 2 okrt doctor, with the options of the job")
        else:
            yield Finding("Slurm", OK, "not here")
        return
    used = len(by_host(ranks))
    left = "" if first.slurm_left_s is None else f", {timedelta(seconds=int(first.slurm_left_s))} h left"
    text = f"job {first.slurm_job} of {first.slurm_nodes} nodes{left}, {commands or 'no srun, no sbatch'} on PATH"
    if used < first.slurm_nodes:
        yield Finding("Slurm", NOTE, f"{text}; ranks on {used} of the nodes only", "srun -N, or srun okrt doctor")
    else:
        hint = "sbatch --signal=USR2@120 has okrt train write a checkpoint before the time limit"
        yield Finding("Slurm", OK, f"{text}; {hint}")
