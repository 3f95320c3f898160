"""One file per algorithm; each is registered here by its name."""

import inspect
import warnings
from typing import Any

from okrt.errors import UsageError
from okrt.reducers.base import Cost, Reducer, StepStats, check_choice
from okrt.reducers.dense import Dense
from okrt.reducers.gaussiank import GaussianK
from okrt.reducers.gtopk import GTopk
from okrt.reducers.oktopk import OkTopk
from okrt.reducers.sparse import SparseReducer
from okrt.reducers.topka import TopkA
from okrt.reducers.topkdsa import TopkDSA

REDUCERS: dict[str, type[Reducer]] = {kind.name: kind for kind in (Dense, TopkA, TopkDSA, GTopk, GaussianK, OkTopk)}


def reducer(name: str, **options: Any) -> Reducer:
    """The reducer of that name. All take nan, transport; sparse: density, selector, codec, values, dense_steps,
    complete."""
    kind = REDUCERS[check_choice("reducer", name, REDUCERS)]
    return kind(**checked_options(kind, options))


def checked_options(kind: type[Reducer], options: dict[str, Any]) -> dict[str, Any]:
    """The options of `kind`; one that no reducer has is an error, one that only sparse reducers have a warning."""
    known, sparse = (list(inspect.signature(init).parameters)[1:] for init in (kind.__init__, SparseReducer.__init__))
    taken = {}
    for name, value in options.items():
        if name in known:
            taken[name] = value
        elif name in sparse:
            warnings.warn(f"{name}={value!r} has no effect on {kind.name}, which sends every entry", stacklevel=3)
        else:
            raise UsageError(f"unknown option {name!r} of {kind.name}: it takes {', '.join(known)}")
    return taken


def reducers() -> list[str]:
    """The names that `reducer` takes."""
    return list(REDUCERS)


__all__ = ["REDUCERS", "Cost", "Reducer", "SparseReducer", "StepStats", "reducer", "reducers"]
