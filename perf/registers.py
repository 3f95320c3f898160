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
from collections.abc import Sequence
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
HERE = "--here"  # compiles in this process, and writes JSON


def ptxas() -> Path:
    """That of the wheel that Numba compiles with."""
    folders = [Path(folder) for folder in getattr(find_spec("nvidia"), "submodule_search_locations", None) or []]
    found = [path for folder in folders for path in folder.glob("**/bin/ptxas")]
    if not found:
        raise FileNotFoundError("there is no ptxas: pip install 'okrt[cuda12]'")
    return found[0]


def compile_here(architectures: Sequence[int]) -> dict[int, dict[str, dict[str, int]]]:
    """The figures of every kernel. Numba's own work, the longest part, is done once and is the same for all."""
    from numba.cuda import compiler, dispatcher

    from okrt.kernels import cuda_code, cuda_entries, cuda_exceedances, cuda_packed

    capabilities = {architecture: divmod(architecture, 10) for architecture in architectures}
    oldest = capabilities[min(architectures)]
    # Functions that kernels call are compiled for the GPU at hand; there need not be one.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=oldest)
    rows: dict[int, dict[str, dict[str, int]]] = {architecture: {} for architecture in architectures}
    modules = (cuda_code, cuda_entries, cuda_exceedances, cuda_packed)
    signatures = {name: of for module in modules for name, of in module.SIGNATURES.items()}
    for name, (kernel, signature) in signatures.items():
        library, _ = compiler._compile_pyfunc_with_fixup(  # type: ignore[attr-defined]
            kernel.py_func, signature, device=False, abi="numba", cc=oldest
        )
        for architecture, capability in capabilities.items():
            rows[architecture][name] = assemble(name, library.get_asm_str(cc=capability), architecture)
    return rows


def assemble(name: str, ptx: str, architecture: int) -> dict[str, int]:
    """What ptxas says of a kernel."""
    assert f".target sm_{architecture}" in ptx
    command = [str(ptxas()), "-v", f"-arch=sm_{architecture}", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} for sm_{architecture}: {done.stderr}")
    return {figure: int((re.findall(form, done.stderr) or [0])[0]) for figure, form in FIGURES.items()}


def compiled(architectures: Sequence[int]) -> dict[int, dict[str, dict[str, int]]]:
    """As compile_here, in a process of its own and not in the simulator."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-m", "okrt.perf.registers", HERE, *map(str, architectures)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {int(architecture): rows for architecture, rows in json.loads(done.stdout).items()}


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
        print(json.dumps(compile_here(given.architectures)))
    else:
        Console(width=110).print(table(compiled(given.architectures)))


if __name__ == "__main__":
    main()
