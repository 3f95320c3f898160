"""python -m okrt.kernels: compiles the kernels for this processor, so that no job waits for it at its first start."""

import importlib

for name in ("cpu", "cpu_exceedances", "cpu_packed"):
    importlib.import_module(f"okrt.kernels.{name}")
