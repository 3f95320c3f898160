"""okrt: an MPI-native runtime that trains with as few bytes on the wire as theory allows."""

from okrt.reducers import reducer, reducers
from okrt.world import init

__version__ = "0.1.0"
__all__ = ["init", "reducer", "reducers"]
