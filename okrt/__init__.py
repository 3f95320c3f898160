"""okrt: an MPI-native runtime that trains with as few bytes on the wire as theory allows."""

from typing import TYPE_CHECKING, Any

from okrt.reducers import reducer, reducers
from okrt.world import init

if TYPE_CHECKING:
    from okrt.engine.data_parallel import DataParallel
    from okrt.engine.distributed_optimizer import DistributedOptimizer
    from okrt.engine.lag_adamw import LagAdamW

__version__ = "0.1.0"
__all__ = ["DataParallel", "DistributedOptimizer", "LagAdamW", "init", "reducer", "reducers"]

# Names that need torch, which takes seconds to load: not before somebody asks for them.
_NEED_TORCH = {
    "DataParallel": "okrt.engine.data_parallel",
    "DistributedOptimizer": "okrt.engine.distributed_optimizer",
    "LagAdamW": "okrt.engine.lag_adamw",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'okrt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_NEED_TORCH[name]), name)
