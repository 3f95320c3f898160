"""okrt selftest: all that a job stands on, tried on the very ranks, memory and MPI that it would use."""

import math
import sys
from contextlib import AbstractContextManager
from typing import Annotated, Any

import numpy as np
import typer

import okrt
from okrt.buffers import need_cupy
from okrt.cli.bench import progress_bar
from okrt.cli.launch import console, start_ranks, started_by_launcher
from okrt.cli.mistakes import checking, told_by
from okrt.cli.tally import Row, Tally
from okrt.errors import UsageError
from okrt.perf.kernel_checks import check_kernel, make_inputs, names
from okrt.perf.kernel_speed import COPY, TRAFFIC_WORDS, speeds
from okrt.perf.reducer_checks import check_reducer
from okrt.perf.ring import check_ring
from okrt.world import World, init

ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
REDUCED_MOST = 200_003  # elements that the reducers are tried with


def selftest(
    device: Annotated[str, typer.Option(help=f"memory to work in: {' or '.join(ELEMENTS)}")] = "cpu",
    elements: Annotated[
        int | None, typer.Option(help="length of the arrays that bandwidth is measured with, and of no longer ones")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="ranks to start, when no launcher did")] = None,
) -> int:
    """Checks kernels, messages and reducers on these ranks; the last line says passed, or what failed.

    Every kernel is compared with its oracle bit for bit, messages go around the ring of ranks, and every reducer is
    compared with dense, in the memory of the device. The bandwidth of each kernel stands beside that of a copy; with
    several ranks it is that of the slowest. Exit code 1 if anything failed.
    """
    if device not in ELEMENTS:
        raise UsageError(f"--device is {device}: choose {' or '.join(ELEMENTS)}")
    elements = ELEMENTS[device] if elements is None else elements
    if elements < 1:
        raise UsageError(f"--elements is {elements}: it must be at least 1")
    if not started_by_launcher(ranks) and ranks not in (None, 1):
        return start_ranks(ranks, None)
    world = init()
    with checking(world.transport):
        place = Cpu(world) if device == "cpu" else Gpu(world)
    with progress_bar(world) as progress, place.working():
        tally = Tally(world.transport, progress)
        untried = run_stages(world, place, tally, elements)
    if world.rank == 0:
        tally.show(console(world, sys.stdout), f"{counted(world.size, 'rank')}, {device}, {elements} elements")
        if untried:
            print(f"not tried, since what they need has failed: {', '.join(untried)}")
        on = f": {tally.checks} checks on {counted(world.size, 'rank')}, {device}"
        print(tally.verdict() + ("" if tally.failures else on))
    return int(bool(tally.failures))


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


class Cpu:
    """Host memory."""

    def __init__(self, world: World) -> None:
        from okrt.kernels.host import Host  # compiled code: only a rank is to load it

        self.kernels: Any = Host(world.threads)

    def working(self) -> AbstractContextManager[None]:
        return self.kernels.on(None)

    def rings(self, world: World, tally: Tally) -> None:
        tally.begin("ring", 1)
        tally.add("ring", check_ring(world.transport, self.kernels), is_collective=True)


class Gpu:
    """The memory of the GPU of this local rank, on a stream that waits for no other."""

    def __init__(self, world: World) -> None:
        try:
            cupy = need_cupy()
            count = cupy.cuda.runtime.getDeviceCount()
        except UsageError as error:
            raise UsageError(f"--device cuda: {error}") from None
        except RuntimeError as error:
            raise UsageError(
                f"--device cuda: no GPU can be used here ({error}): start it where there is one, as with "
                "srun --gpus-per-task=1 (okrt doctor tells more), or use --device cpu"
            ) from None
        from numba import cuda

        from okrt.kernels.cuda import Device
        from okrt.transport.cuda_aware import verdict

        number = world.local_rank % count
        cupy.cuda.Device(number).use()
        cuda.select_device(number)
        self.kernels: Any = Device(number)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._verdict = verdict()

    def working(self) -> AbstractContextManager[None]:
        return self.kernels.on(self._stream.ptr)

    def rings(self, world: World, tally: Tally) -> None:
        """Through pinned host memory, and from device memory as it is where MPI takes it on all ranks."""
        from okrt.transport.mpi import MpiTransport

        tally.begin("ring", 2)
        staged = MpiTransport(world.comm, world.timeout_s, lambda: False)
        tally.add("ring, staged", check_ring(staged, self.kernels), is_collective=True)
        complaints = world.transport.gather_texts("" if self._verdict.aware else self._verdict.reason)
        if any(complaints):
            tally.note("ring, direct", f"not tried, MPI is not known to be CUDA-aware: {told_by(complaints)}")
            return
        direct = MpiTransport(world.comm, world.timeout_s, lambda: True)
        tally.add("ring, direct", check_ring(direct, self.kernels), is_collective=True)


def run_stages(world: World, place: Cpu | Gpu, tally: Tally, elements: int) -> list[str]:
    """Each stands on those before it, so the first that fails is the last that is tried; returns those that are not."""
    stages = {"kernels": try_kernels, "ring": try_ring, "reducers": try_reducers, "bandwidth": measure}
    for number, stage in enumerate(stages.values()):
        stage(world, place, tally, elements)
        if tally.failures:
            return list(stages)[number + 1 :]
    return []


def try_kernels(world: World, place: Cpu | Gpu, tally: Tally, elements: int) -> None:
    inputs = make_inputs(elements)
    functions = names(place.kernels)
    tally.begin("kernels", len(functions))
    for name in functions:
        tally.add(name, check_kernel(place.kernels, name, inputs))


def try_ring(world: World, place: Cpu | Gpu, tally: Tally, elements: int) -> None:
    if world.size == 1:
        tally.note("ring", "not tried, it takes two ranks")
    else:
        place.rings(world, tally)


def try_reducers(world: World, place: Cpu | Gpu, tally: Tally, elements: int) -> None:
    tally.begin("reducers", len(okrt.reducers()))
    for name in okrt.reducers():
        checks = check_reducer(name, world.transport, place.kernels, min(elements, REDUCED_MOST))
        tally.add(name, checks, is_collective=True)


def measure(world: World, place: Cpu | Gpu, tally: Tally, elements: int) -> None:
    """Of the slowest rank; only told, whatever comes of it."""
    tally.begin("bandwidth", 1 + len(TRAFFIC_WORDS))
    measured = dict.fromkeys([COPY, *TRAFFIC_WORDS], math.nan)
    trouble = ""
    try:
        for name, gb_per_s in speeds(place.kernels, elements):
            measured[name] = gb_per_s
            tally.advance()
    except Exception as error:
        trouble = " ".join(f"{type(error).__name__}: {error}".split())
    mine = np.array(list(measured.values()))
    table = world.transport.allgather(np.concatenate([mine, mine / measured[COPY]])).min(axis=0)
    for place_in_table, name in enumerate(measured):
        row = tally.rows.setdefault(name, Row(name))
        row.gb_per_s, row.share = table[place_in_table], table[place_in_table + len(measured)]
    troubles = world.transport.gather_texts(trouble)
    if any(troubles):
        tally.note("bandwidth", f"not all measured: {told_by(troubles)}")
