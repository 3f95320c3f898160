"""One file per algorithm; each is registered here by its name."""

from typing import Any

from okrt.reducers.base import Cost, Reducer, SparseReducer, StepStats, check_choice, checked_options
from okrt.reducers.dense import Dense
from okrt.reducers.gaussiank import GaussianK
from okrt.reducers.gtopk import GTopk
from okrt.reducers.oktopk import OkTopk
from okrt.reducers.topka import TopkA
from okrt.reducers.topkdsa import TopkDSA

REDUCERS: dict[str, type[Reducer]] = {kind.name: kind for kind in (Dense, TopkA, TopkDSA, GTopk, GaussianK, OkTopk)}


def reducer(name: str, **options: Any) -> Reducer:
    """The reducer of that name. Sparse ones take density, selector, codec, dense_steps; all take nan, transport."""
    kind = REDUCERS[check_choice("reducer", name, REDUCERS)]
    return kind(**checked_options(kind, options))


def reducers() -> list[str]:
    """The names that `reducer` takes."""
    return list(REDUCERS)


__all__ = ["REDUCERS", "Cost", "Reducer", "SparseReducer", "StepStats", "reducer", "reducers"]
