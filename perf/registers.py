"""What the CUDA kernels take of a GPU: registers, shared and local memory, for each architecture. Needs no GPU.

python -m okrt.perf.registers [60 70 80 90]

Numba compiles each kernel to PTX, and the ptxas of the package nvidia-cuda-nvcc-cu12 to machine code.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

ARCHITECTURES = (60, 70, 80, 90)
FIGURES = {
    "registers": r"Used (\d+) registers",
    "shared_bytes": r"(\d+) bytes smem",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}
HERE = "--here"  # compiles for one architecture in this process, and writes JSON


def ptxas() -> Path:
    """That of the wheel that Numba compiles with."""
    folders = [Path(folder) for folder in getattr(find_spec("nvidia"), "submodule_search_locations", None) or []]
    found = [path for folder in folders for path in folder.glob("**/bin/ptxas")]
    if not found:
        raise FileNotFoundError("there is no ptxas: pip install 'okrt[cuda12]'")
    return found[0]


def compile_here(architecture: int) -> dict[str, dict[str, int]]:
    """The figures of every kernel; once in a process, since Numba keeps what it has compiled for one architecture."""
    from numba import cuda
    from numba.cuda import dispatcher

    from okrt.kernels import cuda_code, cuda_entries

    capability = divmod(architecture, 10)
    # Functions that kernels call are compiled for the GPU at hand; there need not be one.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    rows = {}
    for name, (kernel, signature) in (cuda_code.SIGNATURES | cuda_entries.SIGNATURES).items():
        text, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability)
        assert f".target sm_{architecture}" in text
        command = [str(ptxas()), "-v", f"-arch=sm_{architecture}", "-o", os.devnull, "/dev/stdin"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} for sm_{architecture}: {done.stderr}")
        rows[name] = {figure: int((re.findall(form, done.stderr) or [0])[0]) for figure, form in FIGURES.items()}
    return rows


def compiled(architecture: int) -> dict[str, dict[str, int]]:
    """As compile_here, in a process of its own and not in the simulator."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-m", "okrt.perf.registers", HERE, str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    rows: dict[str, dict[str, int]] = json.loads(done.stdout)
    return rows


def table(figures: dict[int, dict[str, dict[str, int]]]) -> Table:
    shown = Table(title="registers a thread / bytes of shared memory a block / bytes of local memory a thread")
    shown.add_column("kernel")
    for architecture in figures:
        shown.add_column(f"sm_{architecture}", justify="right")

    def cell(row: dict[str, int]) -> str:
        return f"{row['registers']} / {row['shared_bytes']} / {row['stack_bytes']}"

    for name in next(iter(figures.values())):
        shown.add_row(name, *(cell(rows[name]) for rows in figures.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", type=int, nargs="*", default=ARCHITECTURES)
    parser.add_argument(HERE, action="store_true", help=argparse.SUPPRESS)
    given: Any = parser.parse_args()
    if given.here:
        print(json.dumps(compile_here(given.architectures[0])))
    else:
        Console(width=110).print(table({architecture: compiled(architecture) for architecture in given.architectures}))


if __name__ == "__main__":
    main()
