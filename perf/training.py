"""Training steps side by side, in one run: torch's DistributedDataParallel over gloo, its hooks, and okrt.

python -m okrt.perf.training --ranks 4 --lab 1gbit [--schemes ddp,oktopk] [--parameters 10] [--json FILE]

Every scheme trains the same byte-level GPT from the same start on the same batches, one scheme after the other on the
same processes. A step is zero_grad, forward, backward and SGD, and takes as long as its slowest rank.
"""

import argparse
import copy
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import okrt
from okrt.jobs.gpt_bytes import Gpt, Settings, build
from okrt.perf.gloo import join_gloo
from okrt.perf.lab import Lab, LabError
from okrt.train import Task

SCHEMES = ("ddp", "ddp-powersgd", "ddp-fp16", "dense", "oktopk")
OKRT_SCHEMES = ("dense", "oktopk")
LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
POWERSGD_RANK = 4
POWERSGD_START = 2  # the first step that DDP lets it compress
LEARNING_RATE = 0.01  # steady: a model that diverges makes rounding visible
SAME_LOSS = 1e-5  # relative: the sums of dense and of gloo differ in their order only


@dataclass
class Row:
    """One scheme; None where it could not run, or where there is nothing to tell."""

    scheme: str
    ranks: int
    parameters: int
    batch: int
    steps: int
    lab: str | None
    bucket_mb: float | None
    density: float | None
    unavailable: str | None = None
    median_ms: float | None = None
    samples_per_s: float | None = None
    times_ddp: float | None = None
    bytes_received: float | None = None
    """payload of a step: counted by okrt, for DDP what a ring takes"""
    wire_bytes: float | None = None
    """what the host's interface received in a step, headers included; in the lab only"""
    hidden: float | None = None
    """share of communication behind backward"""
    loss: float | None = None
    """of the held-out samples after the last step"""


def wide_enough(parameters: float, context: int) -> Settings:
    """The narrowest GPT of six layers with at least this many parameters."""
    settings = Settings(width=48, layers=6, heads=6, context=context, text_mb=1.0, eval_samples=64)
    while parameter_count(settings) < parameters:
        settings.width += 48
    return settings


def parameter_count(settings: Settings) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(settings).parameters())


def wrap(scheme: str, module: torch.nn.Module, row: Row) -> tuple[Any, Callable[[], float]]:
    """The module under this scheme, and a function that tells the bytes this rank received in the last step."""
    if scheme in OKRT_SCHEMES:
        options: dict[str, Any] = {} if row.density is None else {"density": row.density}
        model = okrt.DataParallel(module, scheme, bucket_mb=row.bucket_mb, **options)
        return model, lambda: model.last.bytes_received
    ring_bytes = 4 * row.parameters * 2 * (row.ranks - 1) / row.ranks
    if scheme == "ddp-fp16":
        dist.all_reduce(torch.ones(8, dtype=torch.float16))  # an error where gloo cannot
    # With several buckets PowerSGD's callbacks start collectives in an order that differs between ranks: gloo fails.
    one_bucket_mb = 1 + 4 * row.parameters // 2**20
    peer = DistributedDataParallel(module, bucket_cap_mb=one_bucket_mb if scheme == "ddp-powersgd" else None)
    if scheme == "ddp-fp16":
        peer.register_comm_hook(None, fp16_compress_hook)
        return peer, lambda: ring_bytes / 2
    if scheme == "ddp-powersgd":
        state = PowerSGDState(None, POWERSGD_RANK, POWERSGD_START, use_error_feedback=True)
        peer.register_comm_hook(state, powerSGD_hook)
        return peer, lambda: ring_bytes / (state.compression_stats()[0] or 1)
    return peer, lambda: ring_bytes


def measure(row: Row, world: Any, task: Task, warmup: int) -> None:
    """Trains under the row's scheme, and fills in what it took."""
    module = copy.deepcopy(task.model)
    try:
        model, bytes_received = wrap(row.scheme, module, row)
    except RuntimeError as error:
        if row.scheme != "ddp-fp16":
            raise
        row.unavailable = str(error).splitlines()[0]
        return
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    mine = []
    wire_start = 0
    for step in range(warmup + row.steps):
        numbers = np.random.default_rng([step, world.rank]).integers(task.train_samples, size=row.batch)
        world.transport.allreduce(np.zeros(1), "max")  # all start together
        if step == warmup:
            wire_start = interface_bytes()
        start = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model, numbers).backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        overlap = (model.last.comm_s, model.last.wait_s) if row.scheme in OKRT_SCHEMES else (0.0, 0.0)
        mine.append((seconds, bytes_received(), *overlap))
    wire_bytes = (interface_bytes() - wire_start) / row.steps
    samples = world.transport.allgather(np.array(mine[warmup:]).ravel()).reshape(world.size, row.steps, 4)
    median_s, row.bytes_received = map(float, np.median(samples[:, :, :2].max(axis=0), axis=0))
    row.median_ms = 1e3 * median_s
    row.samples_per_s = row.batch * row.ranks / median_s
    if row.lab:
        row.wire_bytes = float(world.transport.allgather(np.array([wire_bytes])).max())
    if row.scheme in OKRT_SCHEMES:
        comm_s, wait_s = samples[:, :, 2:].sum(axis=(0, 1))
        row.hidden = max(0.0, 1 - float(wait_s / comm_s))
    with torch.no_grad():
        row.loss = task.figures(module, np.arange(task.eval_samples))["loss"] / task.eval_samples


def interface_bytes() -> int:
    """Received so far by this host's eth0, the interface of a lab's host; 0 if there is none."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[0])
    return 0


def compare(world: Any, given: argparse.Namespace) -> list[Row]:
    """A row for each scheme, alike on all ranks."""
    torch.set_num_threads(1)
    task = build(wide_enough(1e6 * given.parameters, given.context), seed=0)
    parameters = sum(p.numel() for p in task.model.parameters())
    if any(scheme not in OKRT_SCHEMES for scheme in given.schemes):
        join_gloo(world)
    rows = []
    for scheme, bucket_mb in cases(given.schemes, given.bucket_mb):
        if world.rank == 0:
            print(f"{scheme}…", file=sys.stderr, flush=True)
        density = given.density if scheme == "oktopk" else None
        row = Row(scheme, world.size, parameters, given.batch, given.steps, given.lab, bucket_mb, density)
        measure(row, world, task, given.warmup)
        gc.collect()  # the threads of this scheme end with its model
        rows.append(row)
    if dist.is_initialized():
        dist.destroy_process_group()
    ddp_ms = next((row.median_ms for row in rows if row.scheme == "ddp"), None)
    for row in rows:
        if ddp_ms and row.median_ms:
            row.times_ddp = ddp_ms / row.median_ms
    return rows


def cases(schemes: Sequence[str], sizes: Sequence[float]) -> list[tuple[str, float | None]]:
    """Each scheme with its own choice of buckets, those of okrt then with each of these sizes."""
    return [
        (scheme, bucket_mb) for scheme in schemes for bucket_mb in (None, *(sizes if scheme in OKRT_SCHEMES else ()))
    ]


def check_dense(rows: list[Row]) -> None:
    """An error unless dense has trained as DDP did."""
    losses: dict[str, list[Any]] = {
        scheme: [row.loss for row in rows if row.scheme == scheme] for scheme in ("ddp", "dense")
    }
    for ddp, dense in itertools.product(losses["ddp"], losses["dense"]):
        if not np.isclose(dense, ddp, rtol=SAME_LOSS, atol=0):
            raise RuntimeError(f"the loss of dense is {dense}, of ddp {ddp}: they do not train alike")


def print_table(rows: list[Row]) -> None:
    first = rows[0]
    where = f"lab {first.lab}" if first.lab else "no lab"
    title = f"{first.parameters / 1e6:.1f}M parameters, {first.ranks} ranks, batch {first.batch} each, {where}"
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("scheme", "bucket MB", "ms a step", "samples/s", "× ddp", "MB", "wire MB", "hidden", "loss"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right", no_wrap=True)

    def show(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    for row in rows:
        speed = (show(row.median_ms, ".1f"), show(row.samples_per_s, ".1f"), show(row.times_ddp, ".2f"))
        received = (show(row.bytes_received, ".2f", 1e6), show(row.wire_bytes, ".2f", 1e6))
        bucket, hidden, loss = show(row.bucket_mb, "g"), show(row.hidden, ".0%"), show(row.loss, ".6f")
        table.add_row(row.scheme, bucket, *speed, *received, hidden, loss)
    console = Console(width=100)
    console.print(table)
    for row in rows:
        if row.unavailable:
            console.print(f"{row.scheme}: not available: {row.unavailable}")
    console.print(
        f"Medians of {first.steps} steps of the slowest rank. × ddp: times as fast. MB: received in a step, counted by "
        "okrt, for DDP what a ring takes; wire MB: what eth0 received, headers included (lab only). "
        "hidden: share of communication behind backward. bucket MB: where it is not the scheme's own choice. "
        "ddp-powersgd has rank 4, error feedback, and one bucket."
    )


def start_ranks(ranks: int, lab: str | None) -> int:
    """Runs this very command on that many ranks, one to a host of the lab if there is one; its exit code."""
    command = [sys.executable, "-m", "okrt.perf.training", *sys.argv[1:]]
    # Hosts of a lab have no names, which torch would tell for every connection.
    single = {"OMP_NUM_THREADS": "1", "OKRT_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if lab is None:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        launcher = str(mpiexec) if mpiexec.exists() else "mpiexec"
        return subprocess.run([launcher, "-n", str(ranks), *command], env=os.environ | single).returncode
    with Lab(ranks, lab) as hosts:
        return hosts.run(command, single).returncode


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="to start, when no launcher did (4)")
    parser.add_argument("--lab", help="one host per rank at this rate, such as 1gbit; needs root")
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=list(SCHEMES), help=",".join(SCHEMES))
    parser.add_argument("--parameters", type=float, default=10.0, help="millions, at least (10)")
    parser.add_argument("--batch", type=int, default=1, help="samples of a rank and step (1)")
    parser.add_argument(
        "--context", type=int, default=16, help="bytes of a sample (16); few, so that a CPU computes as fast as it can"
    )
    parser.add_argument("--steps", type=int, default=15, help="that are measured (15)")
    parser.add_argument("--warmup", type=int, default=4, help=f"steps before them, more than {POWERSGD_START} (4)")
    parser.add_argument("--density", type=float, default=0.01, help="of oktopk (0.01)")
    parser.add_argument(
        "--bucket-mb",
        type=float,
        nargs="+",
        default=[],
        help="sizes to try for dense and oktopk beside their own choice",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def main() -> int:
    parser = options()
    given = parser.parse_args()
    if unknown := [scheme for scheme in given.schemes if scheme not in SCHEMES]:
        parser.error(f"--schemes: unknown {', '.join(unknown)}: choose from {', '.join(SCHEMES)}")
    ranks = 4 if given.ranks is None else given.ranks
    if given.warmup <= POWERSGD_START or min(ranks, given.steps, given.batch) < 1:
        parser.error(f"--warmup must be above {POWERSGD_START}; --ranks, --steps and --batch at least 1")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    launched = any(name in os.environ for name in LAUNCHER_SIZES)
    if launched and given.lab and "GLOO_SOCKET_IFNAME" not in os.environ:
        parser.error("--lab starts the ranks itself: leave the launcher out")
    if not launched and (ranks > 1 or given.lab):
        try:
            return start_ranks(ranks, given.lab)
        except LabError as error:
            parser.error(f"--lab {given.lab}: {error}")
    world = okrt.init()
    if given.ranks not in (None, world.size):
        parser.error(f"the launcher started {world.size} ranks, --ranks says {given.ranks}: leave --ranks out")
    rows = compare(world, given)
    if world.rank == 0:
        print_table(rows)
    check_dense(rows)
    if world.rank == 0 and given.json:
        part = given.json.with_name(given.json.name + ".part")
        part.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        part.replace(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
