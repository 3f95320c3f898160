"""Every reducer over real MPI, at the number of ranks the run has."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import okrt
from okrt.errors import NonFiniteGradient, PeerError, PlanMismatch, UsageError

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
SPARSE = [name for name in okrt.reducers() if name != "dense"]
SHAPES = [(0, 0.01), (1, 0.01), (7, 0.5), (1000, 0.001), (999, 0.1), (12_001, 0.01), (3000, 1.0)]
IN_16_BITS = [(7, 0.5), (999, 0.1), (12_001, 0.01)]  # others are tried so with ranks in one process
KINDS = ["float32", "float16", "torch bfloat16"]
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "torch bfloat16": 2.0**-8}
HALF_SUBNORMAL = {"float32": 0, "float16": 2.0**-25, "torch bfloat16": 0}


def as_kind(x: np.ndarray, kind: str) -> Any:
    if kind != "torch bfloat16":
        return x.astype(kind)
    import torch  # takes a second: not where eight ranks on two cores do without it

    return torch.from_numpy(x.copy()).bfloat16()


def wide(x: Any) -> np.ndarray:
    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double().numpy()


@functools.cache
def drawn(step: int, n: int) -> np.ndarray:
    shared, own = (np.random.default_rng(key).standard_normal(n) for key in ([5, step], [5, step, 1 + RANK]))
    return ((shared + own) * np.geomspace(1, 0.01, n)).astype(np.float32)


def gradient(step: int, n: int) -> np.ndarray:
    """A part that all ranks share, one of this rank's own, in layers of different scale."""
    return drawn(step, n).copy()


def make(name: str, density: float = 0.01, **options: Any) -> Any:
    return okrt.reducer(name, **options, **({} if name == "dense" else {"density": density}))


def rounding(kind: str, exact: np.ndarray) -> np.ndarray:
    """The most that rounding to this type changes."""
    return np.maximum(1.01 * HALF_ULP[kind] * np.abs(exact), HALF_SUBNORMAL[kind])


def excess(difference: np.ndarray, allowed: np.ndarray) -> float:
    return float(np.max(np.abs(difference) - allowed, initial=0))


@dataclass
class Step:
    x: np.ndarray
    y: np.ndarray
    before: np.ndarray
    after: np.ndarray
    last: Any


def steps(reducer: Any, n: int, kind: str, count: int = 4, source: Callable = gradient) -> Iterator[Step]:
    for step in range(count):
        before = np.zeros(n) if reducer.residual is None else wide(reducer.residual)
        x = as_kind(source(step, n), kind)
        y = reducer.allreduce(x)
        np.testing.assert_array_equal(wide(x), wide(as_kind(source(step, n), kind)), err_msg="x was changed")
        assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape
        after = np.zeros(n) if reducer.residual is None else wide(reducer.residual)
        yield Step(wide(x), wide(y), before, after, reducer.last)


def over_ranks(*arrays: np.ndarray | list[int]) -> list[np.ndarray]:
    """Each array with one row for each rank. Waits without spinning: the ranks may be more than the cores."""
    mine = np.concatenate([np.asarray(array, np.float64) for array in arrays])
    rows = np.empty((SIZE, mine.size))
    request = COMM.Iallgather(mine, rows)
    while not request.Test():
        time.sleep(2e-5)
    ends = np.cumsum([len(array) for array in arrays])
    return np.split(rows, ends[:-1], axis=1)


def same(rows: np.ndarray) -> bool:
    """To the bit: zeros of either sign differ."""
    return len({row.tobytes() for row in rows}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 5, 1000, 70_001])
def test_dense_is_the_mean(n: int, kind: str) -> None:
    for step in steps(make("dense"), n, kind, 2):
        rows, results = over_ranks(step.x, step.y)
        mean, fp32 = rows.mean(axis=0), SIZE * 2.0**-24 * np.abs(rows).sum(axis=0)
        assert excess(step.y - mean, rounding(kind, mean) + fp32) == 0
        assert same(results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPARSE)
def test_density_1_is_the_mean(name: str, kind: str) -> None:
    """16-bit types keep what rounding takes away, so it comes with a later step."""
    for step in steps(make(name, 1.0), 2000, kind, 3):
        given, kept = over_ranks(step.x + step.before, step.after)
        total, fp32 = given.sum(axis=0), SIZE * 2.0**-23 * np.abs(given).sum(axis=0)
        assert excess(step.y - total / SIZE, rounding(kind, total / SIZE) + fp32) == 0
        # Opposite entries that cancel to the bit may stay where they were: their sum is nothing.
        assert excess(kept.sum(axis=0), SIZE * (rounding(kind, total / SIZE) + fp32)) == 0
        assert excess(np.where(total, kept, 0), SIZE * (rounding(kind, total / SIZE) + fp32)) == 0
        assert step.last.selected_local == step.last.k == 2000
        assert np.count_nonzero(total) <= step.last.selected_global <= 2000


@pytest.mark.parametrize(
    ("n", "density", "kind"),
    [(*shape, kind) for shape in SHAPES for kind in (KINDS if shape in IN_16_BITS else KINDS[:1])],
)
@pytest.mark.parametrize("name", SPARSE)
def test_nothing_is_lost_and_all_ranks_agree(name: str, n: int, density: float, kind: str) -> None:
    for step in steps(make(name, density), n, kind):
        moved = [step.last.bytes_sent, step.last.bytes_received]
        given, kept, results, moved = over_ranks(step.x + step.before, step.after, step.y, moved)
        fp32 = 8 * SIZE**2 * 2.0**-24 * np.abs(given).max(axis=0, initial=0)
        assert excess(given.sum(axis=0) - SIZE * step.y - kept.sum(axis=0), fp32) == 0
        assert same(results)
        assert step.last.k == min(n, max(1, math.ceil(round(density * n, 6))))
        assert np.count_nonzero(step.y) <= step.last.selected_global
        assert moved[:, 0].sum() == moved[:, 1].sum()
        if n:
            assert np.count_nonzero(step.y) >= 1


@pytest.mark.parametrize("name", ["topka", "topkdsa"])
def test_sum_of_the_largest_of_each_rank(name: str) -> None:
    for step in steps(make(name, 0.02), 5000, "float32"):
        (rows,) = over_ranks((step.x + step.before).astype(np.float32))
        for row in rows:
            row[np.argsort(-np.abs(row))[100:]] = 0
        np.testing.assert_array_equal(step.y != 0, rows.any(axis=0))
        np.testing.assert_allclose(step.y, rows.mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", okrt.reducers())
def test_two_runs_are_bit_identical(name: str, kind: str) -> None:
    first, second = (
        [(step.y.tobytes(), step.after.tobytes(), step.last.words_received) for step in steps(make(name), 9000, kind)]
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_and_in_place_forms_give_the_same(name: str, kind: str) -> None:
    plain, sparse, in_place = (make(name, 0.02) for _ in range(3))
    for step in range(3):
        x = as_kind(gradient(step, 4000), kind)
        expected = wide(plain.allreduce(x))
        index, value = sparse.allreduce_sparse(x)
        assert type(index) is type(value) is type(x)
        index = np.asarray(index)
        assert index.dtype == np.int64
        assert (np.diff(index) > 0).all()
        scattered = np.zeros(4000)
        scattered[index] = wide(value)
        np.testing.assert_array_equal(scattered, expected)
        assert in_place.allreduce(x, out=x) is x
        np.testing.assert_array_equal(wide(x), expected)


def one_region(step: int, n: int) -> np.ndarray:
    x = gradient(step, n)
    x[n // 50 :] *= 1e-6
    return x


def disjoint(step: int, n: int) -> np.ndarray:
    return np.where(np.arange(n) * SIZE // n == RANK, gradient(step, n), 0).astype(np.float32)


def jump(step: int, n: int) -> np.ndarray:
    return gradient(step, n) * np.float32(100 if step >= 4 else 1)


def single(step: int, n: int) -> np.ndarray:
    return np.where(np.arange(n) == (37 * step) % n, 3, 0).astype(np.float32)


def heavy(step: int, n: int) -> np.ndarray:
    return np.random.default_rng([step, RANK]).standard_t(1.5, n).astype(np.float32)


def constant(value: float) -> Callable:
    return lambda step, n: np.full(n, value, np.float32)


SOURCES = [gradient, one_region, disjoint, jump, single, heavy, constant(0), constant(1)]


@pytest.mark.parametrize("density", [0.001, 0.02])
@pytest.mark.parametrize("source", SOURCES)
def test_words_of_oktopk_are_within_the_bound(source: Callable, density: float) -> None:
    n = 20_000
    k = round(density * n)
    for step in steps(make("oktopk", density), n, "float32", 8, source):
        assert step.last.words_received <= 6 * k * (SIZE - 1) / SIZE + 8 * SIZE + 64
        assert step.last.words_received == math.ceil(step.last.bytes_received / 4)
        assert step.last.selected_global <= k
        assert same(*over_ranks(step.y))


BAD = {
    "int64": np.arange(50),
    "float64": np.ones(50),
    "shape": np.ones((5, 10), np.float32),
    "contiguous": np.ones(100, np.float32)[::2],
    "list": [1.0] * 50,
    "float16": np.ones(50, np.float16),
    "51": np.ones(51, np.float32),
}


@pytest.mark.parametrize("complaint", BAD)
@pytest.mark.parametrize("name", ["dense", "gtopk", "oktopk"])
def test_bad_input_on_one_rank_is_an_error_on_all(name: str, complaint: str) -> None:
    reducer, undisturbed = make(name, 0.1), make(name, 0.1)
    x = gradient(0, 50)
    np.testing.assert_array_equal(reducer.allreduce(x), undisturbed.allreduce(x))
    if RANK == LAST:
        with pytest.raises(UsageError, match=complaint):
            reducer.allreduce(BAD[complaint])
    else:
        with pytest.raises(PeerError, match=f"rank {LAST} refused .*{complaint}"):
            reducer.allreduce(x)
    for step in (1, 2):
        x = gradient(step, 50)
        np.testing.assert_array_equal(reducer.allreduce(x), undisturbed.allreduce(x))


@pytest.mark.mpi(min_size=2)
def test_bad_input_of_two_kinds_at_once() -> None:
    reducer = make("oktopk")
    x = np.full(50, np.nan if RANK == 0 else 1, np.float32) if RANK != LAST else np.ones(50)
    with pytest.raises(UsageError if RANK == LAST else PeerError, match="float64"):
        reducer.allreduce(x)


def test_bad_out_on_one_rank_is_an_error_on_all() -> None:
    x = gradient(0, 50)
    out = np.empty(49 if RANK == LAST else 50, np.float32)
    with pytest.raises(UsageError if RANK == LAST else PeerError, match="49"):
        make("oktopk").allreduce(x, out=out)


PLANS = {
    "length": ("100", "101", {}, {}, np.ones(101, np.float32)),
    "dtype": ("float32", "float16", {}, {}, np.ones(100, np.float16)),
    "density": ("0.01", "0.02", {"density": 0.01}, {"density": 0.02}, None),
    "reducer": ("oktopk", "topka", {}, {"name": "topka"}, None),
    "selector": ("reuse", "exact", {}, {"selector": "exact"}, None),
    "nan": ("raise", "skip", {}, {"nan": "skip"}, None),
    "dense_steps": ("0", "3", {}, {"dense_steps": 3}, None),
    "complete": ("False", "True", {}, {"complete": True}, None),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("key", PLANS)
def test_different_plans_are_named(key: str) -> None:
    usual, other, options, other_options, other_x = PLANS[key]
    x = np.ones(100, np.float32)
    if RANK == LAST:
        options, x = other_options, x if other_x is None else other_x
    reducer = okrt.reducer(**({"name": "oktopk"} | options))
    with pytest.raises(PlanMismatch) as caught:
        reducer.allreduce(x)
    ranks = ", ".join(map(str, range(LAST)))
    assert f"{key} is {usual} on rank {ranks}" in str(caught.value)
    assert f"{other} on rank {LAST}" in str(caught.value)
    # The next call of ranks that agree works.
    if key in ("length", "dtype"):
        y = reducer.allreduce(np.ones(100, np.float32))
        np.testing.assert_array_equal(y[y != 0], 1)
        assert np.count_nonzero(y) == 1


@pytest.mark.mpi(min_size=2)
def test_dense_against_sparse_is_named() -> None:
    with pytest.raises(PlanMismatch, match=r"reducer is oktopk on rank 0.*dense on rank"):
        make("dense" if RANK == LAST else "oktopk").allreduce(np.ones(10, np.float32))


# That a kernel finds each of them in each type is seen in tests/kernels.
@pytest.mark.parametrize(
    ("kind", "value"), [("float32", np.nan), ("float32", -np.inf), ("float16", np.inf), ("torch bfloat16", np.nan)]
)
@pytest.mark.parametrize("name", okrt.reducers())
def test_not_finite_raises_on_all_ranks(name: str, kind: str, value: float) -> None:
    reducer, undisturbed = make(name), make(name)
    for step in range(3):
        x = as_kind(gradient(step, 300), kind)
        if step == 1:
            bad = as_kind(gradient(step, 300), kind)
            bad[299] = value
            with pytest.raises(NonFiniteGradient, match=f"gradient of rank {LAST};"):
                reducer.allreduce(bad if RANK == LAST else x)
            assert reducer.skipped_steps == 0
        np.testing.assert_array_equal(wide(reducer.allreduce(x)), wide(undisturbed.allreduce(x)))


@pytest.mark.parametrize("name", okrt.reducers())
def test_not_finite_is_skipped_on_all_ranks(name: str) -> None:
    reducer = make(name, nan="skip")
    x = gradient(0, 300)
    reducer.allreduce(x)
    assert not reducer.last.skipped
    before = None if reducer.residual is None else reducer.residual.copy()
    bad = x.copy()
    bad[0] = np.nan
    given = bad if RANK == LAST else x
    np.testing.assert_array_equal(reducer.allreduce(given), np.zeros(300))
    assert reducer.last.skipped
    assert reducer.skipped_steps == 1
    if before is not None:
        np.testing.assert_array_equal(reducer.residual, before)
        assert [array.size for array in reducer.allreduce_sparse(given)] == [0, 0]
    (step,) = steps(reducer, 300, "float32", 1)
    assert not step.last.skipped
    assert (step.y != 0).any()
    assert same(*over_ranks(step.y))


@pytest.mark.parametrize("name", okrt.reducers())
def test_two_reducers_take_turns(name: str) -> None:
    """Each keeps its own state, as one for each tensor of a model."""
    pair, alone = (make(name), make(name)), (make(name), make(name))
    lengths = (500, 3000)
    turns = [[pair[i].allreduce(gradient(step, lengths[i])) for i in (0, 1)] for step in range(3)]
    for i in (0, 1):
        for step in range(3):
            np.testing.assert_array_equal(turns[step][i], alone[i].allreduce(gradient(step, lengths[i])))
