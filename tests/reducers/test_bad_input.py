"""A user's mistake is a clear error on every rank at once, and the next good call works."""

import numpy as np
import pytest
import torch

import okrt
from okrt.errors import DtypeError, NonFiniteGradient, PeerError, PlanMismatch, UsageError
from tests.laws import SPARSE, bits
from tests.ranks import run_ranks

N = 12
GOOD = np.arange(1, N + 1, dtype=np.float32)
BAD = {
    "float64": (GOOD.astype(np.float64), DtypeError, "float64.*float32, float16"),
    "complex": (GOOD.astype(np.complex64), DtypeError, "complex64"),
    "integer": (GOOD.astype(np.int32), DtypeError, "int32"),
    "bool": (GOOD > 3, DtypeError, "bool"),
    "list": (GOOD.tolist(), DtypeError, "list"),
    "scalar": (np.float32(1), DtypeError, "float32"),
    "none": (None, DtypeError, "NoneType"),
    "0-D": (np.array(1, np.float32), UsageError, r"shape \(\)"),
    "2-D": (GOOD.reshape(3, 4), UsageError, r"shape \(3, 4\).*reshape"),
    "byte-swapped": (GOOD.astype(">f4"), DtypeError, ">f4"),
    "non-contiguous": (np.repeat(GOOD, 2)[::2], UsageError, "non-contiguous"),
    "reversed": (GOOD[::-1], UsageError, "non-contiguous"),
    "torch float64": (torch.ones(N, dtype=torch.float64), DtypeError, "float64"),
    "torch integer": (torch.ones(N, dtype=torch.int64), DtypeError, "int64"),
    "torch 2-D": (torch.ones(3, 4), UsageError, r"shape \(3, 4\)"),
    "torch non-contiguous": (torch.ones(2 * N)[::2], UsageError, "non-contiguous"),
    "torch sparse": (torch.ones(N).to_sparse(), UsageError, "layout.*to_dense"),
    "torch meta": (torch.ones(N, device="meta"), UsageError, "meta"),
}
each_reducer = pytest.mark.parametrize("name", okrt.reducers())
each_bad = pytest.mark.parametrize("kind", BAD)


def options(name: str) -> dict:
    return {} if name == "dense" else {"density": 0.5}


def outcomes(size, arrays, name="oktopk", first=False, **more):
    """What a call with each rank's array gives, error or result; a good call after it is as if it had not been."""

    def body(transport):
        reducer = okrt.reducer(name, transport=transport, **(options(name) | more))
        if first:
            reducer.allreduce(GOOD)
        before = None if reducer.residual is None else bits(reducer.residual)
        try:
            outcome = reducer.allreduce(arrays[transport.rank])
        except Exception as error:
            outcome = error
        if isinstance(outcome, Exception) or reducer.last.skipped:
            assert before == (None if reducer.residual is None else bits(reducer.residual))
        after = reducer.allreduce(GOOD)
        if not first:
            undisturbed = okrt.reducer(name, transport=transport, **(options(name) | more)).allreduce(GOOD)
            assert bits(after) == bits(undisturbed)
            assert after[-1] == GOOD[-1]
        return outcome

    return run_ranks(size, body)


@each_bad
@each_reducer
def test_bad_array_alone(kind, name):
    array, error, text = BAD[kind]
    (outcome,) = outcomes(1, [array], name)
    assert type(outcome) is error
    with pytest.raises(error, match=text):
        raise outcome


@each_bad
@pytest.mark.parametrize("name", ["dense", "oktopk"])
def test_bad_array_on_one_rank(kind, name):
    array, error, text = BAD[kind]
    done = outcomes(3, [GOOD, array, GOOD], name)
    assert [type(outcome) for outcome in done] == [PeerError, error, PeerError]
    for outcome in done[::2]:
        with pytest.raises(PeerError, match=f"rank 1.*{text}"):
            raise outcome


def test_bad_arrays_on_all_ranks():
    done = outcomes(2, [BAD["list"][0], BAD["2-D"][0]])
    assert [type(outcome) for outcome in done] == [DtypeError, UsageError]


@pytest.mark.parametrize("size", [1, 3])
@each_reducer
@pytest.mark.parametrize("changed", [GOOD[:-1], GOOD.astype(np.float16), np.zeros(0, np.float32)])
def test_length_and_type_stay(size, name, changed):
    for outcome in outcomes(size, [changed] * size, name, first=True):
        with pytest.raises(UsageError, match=r"serves a tensor of 12 float32.*one reducer for each"):
            raise outcome


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (np.ones(N + 1, np.float32), "length is 12 on rank 0, 2, 13 on rank 1"),
        (np.ones(0, np.float32), "length is 12 on rank 0, 2, 0 on rank 1"),
        (GOOD.astype(np.float16), "dtype is float32 on rank 0, 2, float16 on rank 1"),
    ],
)
@each_reducer
def test_ranks_with_different_arrays(name, other, text):
    for outcome in outcomes(3, [GOOD, other, GOOD], name):
        assert type(outcome) is PlanMismatch
        assert text in str(outcome)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"density": 0.1}, {"density": 0.2}, "density is 0.1 on rank 0, 0.2 on rank 1"),
        ({"selector": "exact"}, {"selector": "reuse"}, "selector is exact on rank 0, reuse on rank 1"),
        ({"nan": "skip"}, {"nan": "raise"}, "nan is skip on rank 0, raise on rank 1"),
        ({"dense_steps": 1}, {}, "dense_steps is 1 on rank 0, 0 on rank 1"),
    ],
)
def test_ranks_with_different_options(first, second, text):
    def body(transport):
        reducer = okrt.reducer("topka", transport=transport, **(first, second)[transport.rank])
        with pytest.raises(PlanMismatch) as caught:
            reducer.allreduce(GOOD)
        return str(caught.value)

    assert all(text in said for said in run_ranks(2, body))


def test_ranks_with_different_reducers():
    def body(transport):
        with pytest.raises(PlanMismatch, match="reducer is dense on rank 0, gtopk on rank 1"):
            okrt.reducer(["dense", "gtopk"][transport.rank], transport=transport).allreduce(GOOD)

    run_ranks(2, body)


def test_a_rank_a_step_ahead_is_noticed():
    def body(transport):
        reducer = okrt.reducer("topka", density=0.5, transport=transport)
        if transport.rank == 1:
            reducer._steps = 1
        with pytest.raises(PlanMismatch, match="step is 0 on rank 0, 1 on rank 1"):
            reducer.allreduce(GOOD)

    run_ranks(2, body)


@each_reducer
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, torch.bfloat16])
def test_not_finite_raises(name, size, value, kind):
    def make(rank):
        x = GOOD.copy()
        x[-1] = value if rank == size - 1 else 1
        return torch.from_numpy(x).to(kind) if kind is torch.bfloat16 else x.astype(kind)

    def body(transport):
        reducer = okrt.reducer(name, transport=transport, **options(name))
        with pytest.raises(NonFiniteGradient, match=f"rank {size - 1};"):
            reducer.allreduce(make(transport.rank))
        assert reducer.residual is None
        reducer.allreduce(make(-1))

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("name", "sparse_form"), [*((n, False) for n in okrt.reducers()), *((n, True) for n in SPARSE)]
)
@pytest.mark.parametrize("size", [1, 3])
def test_not_finite_is_skipped(name, size, sparse_form):
    def body(transport):
        reducer, undisturbed = (okrt.reducer(name, nan="skip", transport=transport, **options(name)) for _ in range(2))
        gradients = [np.random.default_rng([transport.rank, step]).standard_normal(N).astype("f") for step in range(3)]
        bad = gradients[0].copy()
        bad[3] = np.inf if transport.rank == 0 else 1
        for step, x in enumerate(gradients):
            before = None if reducer.residual is None else bits(reducer.residual)
            if sparse_form:
                index, value = reducer.allreduce_sparse(bad)
                assert index.size == value.size == 0
            else:
                skipped = reducer.allreduce(bad, out=np.full(N, 5, np.float32))
                assert bits(skipped) == bytes(4 * N)
            assert reducer.last.skipped and reducer.skipped_steps == step + 1
            assert before == (None if reducer.residual is None else bits(reducer.residual))
            assert bits(reducer.allreduce(x)) == bits(undisturbed.allreduce(x))
            assert not reducer.last.skipped and reducer.skipped_steps == step + 1
        assert undisturbed.skipped_steps == 0
        assert reducer.state_dict()["skipped_steps"] == 3

    run_ranks(size, body)


def refuse_out(out, text):
    def body(transport):
        reducer = okrt.reducer("oktopk", density=0.5, transport=transport)
        mine = out if transport.rank == 0 else np.empty_like(GOOD)
        with pytest.raises(UsageError if transport.rank == 0 else PeerError, match=text):
            reducer.allreduce(GOOD, out=mine)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (np.empty(N - 1, np.float32), "out holds 11 float32"),
        (np.empty(N, np.float16), "out holds 12 float16"),
        (torch.empty(N), "kind"),
        (np.empty((3, 4), np.float32), "shape"),
        ([0.0] * N, "list"),
    ],
)
def test_bad_out(out, text):
    refuse_out(out, text)


def test_out_that_cannot_be_written():
    out = np.empty(N, np.float32)
    out.flags.writeable = False
    refuse_out(out, "out cannot be written")


@pytest.mark.parametrize("density", [0, -0.1, 1.5, np.nan, np.inf, "0.1", None])
@pytest.mark.parametrize("name", SPARSE)
def test_bad_density(name, density):
    with pytest.raises(UsageError, match=f"density is {density}.*above 0 and at most 1"):
        okrt.reducer(name, density=density)


@pytest.mark.parametrize("dense_steps", [-1, 1.5, "2", None])
def test_bad_dense_steps(dense_steps):
    with pytest.raises(UsageError, match=f"dense_steps is {dense_steps}.*whole number"):
        okrt.reducer("oktopk", dense_steps=dense_steps)


def test_unknown_reducer():
    with pytest.raises(UsageError, match="unknown reducer 'topk'") as caught:
        okrt.reducer("topk")
    assert all(name in str(caught.value) for name in okrt.reducers())


@pytest.mark.parametrize(
    ("option", "choices"),
    [("selector", ["exact", "reuse", "gaussian"]), ("codec", ["coo", "packed"]), ("nan", ["raise", "skip"])],
)
@pytest.mark.parametrize("given", ["none", ["none"]])
def test_unknown_choice(option, choices, given):
    with pytest.raises(UsageError, match=r"unknown .*'none'") as caught:
        okrt.reducer("oktopk", **{option: given})
    assert all(choice in str(caught.value) for choice in choices)


@each_reducer
def test_unknown_option(name):
    with pytest.raises(UsageError, match=f"unknown option 'densty' of {name}") as caught:
        okrt.reducer(name, densty=0.1)
    assert "nan" in str(caught.value)
    assert ("density" in str(caught.value)) == (name != "dense")


@pytest.mark.parametrize(
    "option", [{"density": 0.1}, {"selector": "exact"}, {"codec": "coo"}, {"dense_steps": 3}, {"complete": True}]
)
def test_options_without_effect_on_dense(option):
    (name,) = option
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect on dense"):
        okrt.reducer("dense", **option)


def test_state_of_another_reducer():
    with pytest.raises(UsageError, match=r"topka.*oktopk"):
        okrt.reducer("oktopk").load_state_dict(okrt.reducer("topka").state_dict())
