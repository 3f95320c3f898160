"""Start-up and end: MPI, rank and local rank, device, abort on error."""

import functools
import os
import socket
import sys
import threading
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from okrt.errors import PeerError, PlanMismatch, UsageError, exit_code
from okrt.transport import Transport

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from okrt.transport.mpi import MpiTransport

# How launchers tell a process the size of its job: Open MPI, MPICH and Slurm's pmi2, Slurm with srun.
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
DEFAULT_TIMEOUT_S = 300.0
WORDS_TRAVEL_S = 0.5


@dataclass(frozen=True)
class World:
    """The job as this process sees it."""

    comm: "MPI.Intracomm"
    rank: int
    size: int
    local_rank: int
    local_size: int
    timeout_s: float
    transport: "MpiTransport"
    """the way to the other ranks"""
    sharers: int | None = None
    """ranks that may use cores that this one may use, itself included; not known: all of this node"""

    @functools.cached_property
    def device(self) -> "torch.device":
        """The GPU of this local rank, or the CPU where there is none."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @functools.cached_property
    def threads(self) -> int:
        """Threads for the kernels of this rank: OKRT_THREADS, or this rank's share of the cores it may use."""
        sharers = self.local_size if self.sharers is None else self.sharers
        return positive_setting("OKRT_THREADS", int) or max(1, len(os.sched_getaffinity(0)) // sharers)


def positive_setting(name: str, kind: type) -> Any:
    """The environment variable as a positive number; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise UsageError(f"{name}={text}: a positive number is needed")
    return value


def launcher_size() -> tuple[str, int] | None:
    """What the launcher says about the number of ranks, and the variable that says so."""
    for name in LAUNCHER_SIZES:
        if os.environ.get(name, "").isdigit():
            return name, int(os.environ[name])
    return None


@functools.cache
def init() -> World:
    """Starts MPI if need be and returns the world; any further call returns the same one."""
    world = join()
    told = launcher_size()
    if told and told[1] > 1 and world.size == 1:
        from okrt.transport.mpi import library_name

        raise UsageError(
            f"the launcher started {told[1]} ranks ({told[0]}), but MPI ({library_name()}) sees only one: each process "
            "would work alone. Use the mpiexec of this MPI library, or srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)"
        )
    return world


@functools.cache
def join() -> World:
    """The world as MPI sees it, whatever the launcher says."""
    install_abort_hook()
    # MPI first: from then on a mistake of one rank ends the others too.
    from mpi4py import MPI

    from okrt.transport.mpi import MpiTransport

    comm = MPI.COMM_WORLD
    timeout_s = positive_setting("OKRT_TIMEOUT_S", float) or DEFAULT_TIMEOUT_S
    transport = MpiTransport(comm, timeout_s)
    mine = os.sched_getaffinity(0)
    texts = transport.gather_texts(f"{socket.gethostname()} {' '.join(map(str, mine))}")
    hosts, cores = [text.split()[0] for text in texts], [set(map(int, text.split()[1:])) for text in texts]
    here = hosts[comm.rank]
    return World(
        comm=comm,
        rank=comm.rank,
        size=comm.size,
        local_rank=hosts[: comm.rank].count(here),
        local_size=hosts.count(here),
        timeout_s=timeout_s,
        transport=transport,
        sharers=sum(host == here and not mine.isdisjoint(other) for host, other in zip(hosts, cores, strict=True)),
    )


def own_transport() -> "MpiTransport":
    """A way to the other ranks that nobody else uses, for a thread of one's own; all ranks must ask for it."""
    from okrt.transport.mpi import MpiTransport

    world = init()
    return MpiTransport(world.comm, world.timeout_s)


@functools.cache
def note_gpu(name: str) -> None:
    """A warning if another rank of this node works on the same GPU; all ranks must call it with theirs, once."""
    host = socket.gethostname()
    names = own_transport().gather_texts(f"{host} {name}")
    sharers = [rank for rank, other in enumerate(names) if other == f"{host} {name}"]
    if len(sharers) > 1:
        warnings.warn(
            f"ranks {', '.join(map(str, sharers))} share the GPU {name} of {host}, and its speed and memory: give each "
            "rank its own (srun --gpus-per-task=1, or no more ranks on a node than it has GPUs)",
            stacklevel=2,
        )


def threads_may_call_mpi() -> bool:
    """Whether several threads may; a warning names what is lost if not."""
    init()
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        return True
    warnings.warn("this MPI has no MPI_THREAD_MULTIPLE: reductions will not overlap with backward", stacklevel=2)
    return False


def agree(transport: Transport, plan: dict[str, Any], refusal: UsageError | None, flag: bool) -> bool:
    """Whether any rank raised the flag, once it is sure that all are about to do the same.

    An error on every rank if one comes with a refusal, or if the plans differ: it names the ranks and what they said.
    """
    if transport.size > 1:
        signature = zlib.crc32(repr(sorted(plan.items())).encode()) >> 1
        # The largest of a number and of its negative are opposite only if all ranks gave the same.
        words = np.array([signature, -signature, flag, refusal is not None], np.int32)
        transport.allreduce(words, "max")
        flag = bool(words[2])
        if words[3]:
            complaints = transport.gather_texts(str(refusal or ""))
            refusal = refusal or PeerError(
                "; ".join(f"rank {rank} refused its input: {text}" for rank, text in enumerate(complaints) if text)
            )
        elif words[0] != -words[1]:
            refusal = PlanMismatch(differences(transport, plan))
    if refusal:
        raise refusal
    return flag


def differences(transport: Transport, plan: dict[str, Any]) -> str:
    """What the plans of the ranks differ in, and who says what."""
    texts = transport.gather_texts("\n".join(f"{key}={value}" for key, value in plan.items()))
    plans = [dict(line.split("=", 1) for line in text.split("\n")) for text in texts]
    differing = []
    for key in dict.fromkeys(key for other in plans for key in other):
        ranks: dict[str, list[int]] = {}
        for rank, other in enumerate(plans):
            ranks.setdefault(other.get(key, "(not set)"), []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items())
            differing.append(f"{key} is {said}")
    return f"the ranks disagree: {'; '.join(differing)}"


def job_rank() -> int | None:
    """This process's rank if it is one of several; does not start MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return None
    return mpi.COMM_WORLD.rank


def abort(error: BaseException, trace: TracebackType | None) -> None:
    """Prints the error with the rank, a user's mistake in one line, and ends the job on all ranks."""
    rank = job_rank()
    if rank is None:
        sys.__excepthook__(type(error), error, trace)
        return
    if isinstance(error, UsageError):
        text = f"okrt: rank {rank}: {error}\n"
    else:
        text = f"rank {rank}: " + "".join(traceback.format_exception(type(error), error, trace))
    sys.stdout.flush()
    # Not sys.stderr: torch.distributed captures that while the hook runs.
    out = sys.__stderr__ or sys.stderr
    out.write(text)
    out.flush()
    # Launchers pass on what a rank wrote, but not what still lies in its pipe when they end the job.
    time.sleep(WORDS_TRAVEL_S)
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(exit_code(error))
    os._exit(exit_code(error))  # an Abort may return


def install_abort_hook() -> None:
    """From here on an exception that nobody catches, in any thread, ends the whole job instead of hanging it."""

    def main_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        abort(error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            abort(args.exc_value, args.exc_traceback)

    sys.excepthook = main_hook
    threading.excepthook = thread_hook
