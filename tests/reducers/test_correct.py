"""Every reducer on any number of ranks: the mean, conservation, identical bits on all ranks and in every run."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import okrt
from okrt.kernels.host import Host
from okrt.reducers import rank_sum
from okrt.select import SELECTORS
from tests.laws import (
    DTYPES,
    LAWS,
    SPARSE,
    bits,
    check_bound,
    check_conservation,
    check_identical,
    gradient,
    run,
    take_step,
    wide,
)
from tests.ranks import run_ranks

SIZES = [1, 2, 3, 4, 5, 7, 8]
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
TINY = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
each_size = pytest.mark.parametrize("size", SIZES)
each_reducer = pytest.mark.parametrize("name", okrt.reducers())
each_sparse = pytest.mark.parametrize("name", SPARSE)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def lengths(size: int) -> list[int]:
    return sorted({0, 1, 2, 7, size - 1, size, size + 1, 1000, 4097})


def options(name: str, density: float) -> dict:
    return {} if name == "dense" else {"density": density}


def integers(n: int, rank: int, step: int = 0, largest: int = 9) -> np.ndarray:
    """Sums of these are exact in any order."""
    return np.random.default_rng([5, rank, step]).integers(-largest, largest + 1, n).astype(np.float32)


@each_size
@each_dtype
def test_dense_is_the_mean(size, dtype):
    kind = dtype.removeprefix("torch.")
    for n in lengths(size):
        (ranks,) = run("dense", "laplace", n=n, size=size, steps=1, dtype=dtype)
        gradients = np.stack([wide(r.gradient) for r in ranks])
        allowed = EPS[kind] * np.abs(gradients.mean(axis=0)) / 2 + size * 2.0**-23 * np.abs(gradients).mean(axis=0)
        assert (np.abs(wide(ranks[0].result) - gradients.mean(axis=0)) <= allowed + TINY[kind]).all()
        check_identical(ranks)


@each_size
@each_reducer
def test_any_length_and_density(size, name):
    for n in lengths(size):
        for density in (1e-9, 0.01, 0.3, 1.0) if n >= 1000 and name != "dense" else (0.3,):
            for ranks in run(name, "laplace", n=n, size=size, steps=2, **options(name, density)):
                check_identical(ranks)
                assert len(ranks[0].result) == n
                if name == "dense":
                    continue
                check_conservation(ranks)
                assert ranks[0].stats.k == min(n, max(1, int(np.ceil(round(density * n, 6)))))
                # A step that delivers nothing would conserve, too.
                assert (n == 0) == (np.count_nonzero(ranks[0].result) == 0)


@each_sparse
@each_dtype
def test_any_type(name, dtype):
    for size, n, density in [(1, 97, 0.3), (2, 1, 1.0), (3, 1000, 0.02), (4, 97, 1.0), (5, 1000, 0.3), (8, 300, 0.1)]:
        for ranks in run(name, "layers", n=n, size=size, steps=3, dtype=dtype, density=density):
            check_conservation(ranks)
            check_identical(ranks)
            x, y = ranks[0].gradient, ranks[0].result
            assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, x.shape)


@each_size
@each_reducer
def test_density_one_is_dense(size, name):
    for n in (0, 1, size, 2 * size, 97, 1000):

        def body(transport, n=n):
            one = okrt.reducer(name, transport=transport, **options(name, 1.0))
            for step in range(4):
                x = integers(n, transport.rank, step)
                if step < 2:
                    x[n // 4 :] = 0  # all entries in one place, then everywhere
                total = sum(integers(n, rank, step) for rank in range(size))
                total[n // 4 if step < 2 else n :] = 0
                np.testing.assert_array_equal(one.allreduce(x), total / np.float32(size))

        run_ranks(size, body)


@each_reducer
@pytest.mark.parametrize("law", ["layers", "moving", "ties"])
def test_two_runs_have_the_same_bits(name, law):
    runs = [run(name, law, n=2000, size=4, steps=4, **options(name, 0.05)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        for a, b in zip(first, second, strict=True):
            assert bits(a.result) == bits(b.result)
            assert bits(a.after) == bits(b.after)
            assert a.stats.words_received == b.stats.words_received


@each_reducer
@each_dtype
def test_out_and_input(name, dtype):
    """x is left alone; an `out`, even x itself, gets the bits that a new array would."""

    def body(transport):
        plain, given_out, in_place = (okrt.reducer(name, transport=transport, **options(name, 0.1)) for _ in range(3))
        for step in range(3):
            x = DTYPES[dtype](gradient("layers", 500, transport.rank, 3, step))
            before = bits(x)
            expected = bits(plain.allreduce(x))
            assert bits(x) == before
            out = DTYPES[dtype](np.full(500, 7, np.float32))
            assert given_out.allreduce(x, out=out) is out
            assert bits(out) == expected
            assert bits(x) == before
            assert in_place.allreduce(x, out=x) is x
            assert bits(x) == expected

    run_ranks(3, body)


@pytest.mark.parametrize(("size", "dense_steps"), [(1, 0), (3, 0), (3, 2)])
@each_sparse
@each_dtype
def test_sparse_form(size, dense_steps, name, dtype):
    def body(transport):
        full, sparse = (
            okrt.reducer(name, density=0.05, dense_steps=dense_steps, transport=transport) for _ in range(2)
        )
        for step in range(3):
            x = DTYPES[dtype](gradient("layers", 700, transport.rank, size, step))
            result = full.allreduce(x)
            index, value = sparse.allreduce_sparse(x)
            assert type(index) is type(value) is type(x)
            assert str(index.dtype).endswith("int64") and value.dtype == x.dtype
            assert (np.diff(np.asarray(index)) > 0).all()
            scattered = np.zeros(700)
            scattered[np.asarray(index)] = wide(value)
            np.testing.assert_array_equal(scattered, wide(result))
            assert bits(full.residual) == bits(sparse.residual)

    run_ranks(size, body)


@each_sparse
def test_sparse_form_of_nothing(name):
    def body(transport):
        index, value = okrt.reducer(name, transport=transport).allreduce_sparse(np.zeros(0, np.float32))
        assert (index.dtype, index.size, value.dtype, value.size) == (np.int64, 0, np.float32, 0)

    run_ranks(3, body)


@each_sparse
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("size", [1, 2])
def test_number_of_threads_changes_nothing(name, selector, size):
    n = 2**18 + 4099

    def body(transport):
        results = []
        for threads in (1, 2):
            reducer = okrt.reducer(name, density=0.003, selector=selector, transport=transport)
            reducer._kernels = Host(threads)
            reducer._selector = SELECTORS[selector](reducer._kernels)
            gradients = [gradient("layers", n, transport.rank, size, step) for step in range(2)]
            results += [bits(reducer.allreduce(x)) for x in gradients] + [bits(reducer.residual)]
        assert results[:3] == results[3:]

    run_ranks(size, body)


@each_sparse
@pytest.mark.parametrize("dtype", ["float32", "torch.bfloat16"])
def test_dense_steps_come_first(name, dtype):
    n, size = 800, 3

    def body(transport):
        reducer = okrt.reducer(name, density=0.05, dense_steps=2, transport=transport)
        dense = okrt.reducer("dense", transport=transport)
        done_steps = []
        for step in range(4):
            x = DTYPES[dtype](integers(n, transport.rank, step))
            done = take_step(reducer, x)
            if step == 0 or (step == 1 and dtype == "float32"):
                assert bits(done.result) == bits(dense.allreduce(x))
            assert (np.count_nonzero(wide(done.result)) > n / 2) == (step < 2)
            done_steps.append(done)
        return done_steps

    for ranks in zip(*run_ranks(size, body), strict=True):
        check_conservation(ranks)
        check_identical(ranks)


@each_reducer
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_restart_continues_with_the_same_bits(name, size):
    n, plain = 3000, (str, int, float, bool)

    def body(transport):
        def make():
            return okrt.reducer(name, transport=transport, **options(name, 0.05))

        whole = make()
        for step in range(8):
            if step in (0, 3):
                state = whole.state_dict()
                assert all(type(value) in plain or type(value) is np.ndarray for value in state.values())
                kept = {key: np.copy(value) if isinstance(value, np.ndarray) else value for key, value in state.items()}
            if step == 3:
                resumed = make()
                resumed.load_state_dict(state)
            x = gradient("moving", n, transport.rank, size, step)
            expected = bits(whole.allreduce(x))
            if step >= 3:
                assert bits(resumed.allreduce(x)) == expected
                assert resumed.last.words_received == whole.last.words_received
        # What was saved is not changed by the steps after it.
        assert all(np.array_equal(state[key], kept[key]) for key in kept)

    run_ranks(size, body)


@pytest.mark.parametrize("second", SELECTORS)
@pytest.mark.parametrize("first", SELECTORS)
def test_another_selector_goes_on_with_the_residual(first, second):
    n, size = 2000, 3

    def body(transport):
        steps, state = [], None
        for selector in (first, second):
            reducer = okrt.reducer("oktopk", density=0.05, selector=selector, transport=transport)
            if state:
                reducer.load_state_dict(state)
            for _ in range(3):
                steps.append(take_step(reducer, gradient("layers", n, transport.rank, size, len(steps))))
            state = reducer.state_dict()
        return steps

    steps = list(zip(*run_ranks(size, body), strict=True))
    for ranks in steps:
        check_conservation(ranks)
    for before, after in zip(steps[2], steps[3], strict=True):
        assert before.after.any() and (before.after == after.before).all()


@each_reducer
def test_a_reducer_goes_back_to_an_earlier_state(name):
    """Also to that of one that has not been used."""
    size, n = 4, 4000

    def body(transport):
        reducer = okrt.reducer(name, transport=transport, **options(name, 0.05))
        states, results = [], []
        for step in range(5):
            states.append(reducer.state_dict())
            results.append(bits(reducer.allreduce(gradient("moving", n, transport.rank, size, step))))
        for back in (0, 3):
            reducer.load_state_dict(states[back])
            for step in range(back, 5):
                assert bits(reducer.allreduce(gradient("moving", n, transport.rank, size, step))) == results[step]

    run_ranks(size, body)


@each_sparse
def test_what_was_delivered_is_told_after_every_kind_of_call(name):
    size, n = 2, 1000

    def body(transport):
        reducer = okrt.reducer(name, density=0.05, dense_steps=1, nan="skip", transport=transport)
        for step, sparse in enumerate((False, True, False, True)):
            x = gradient("layers", n, transport.rank, size, step)
            if step == 2:
                x[0] = np.nan
            index = reducer.allreduce_sparse(x)[0] if sparse else np.flatnonzero(reducer.allreduce(x))
            if step == 0:
                assert reducer.delivered is None and reducer.sent is None
            else:
                np.testing.assert_array_equal(reducer.delivered, index)
            assert reducer.last.skipped == (step == 2)
            assert (reducer.sent is not None) == bool(step % 2)

    run_ranks(size, body)


@settings(max_examples=60)
@given(
    name=st.sampled_from(SPARSE),
    law=st.sampled_from(sorted(LAWS)),
    dtype=st.sampled_from(sorted(DTYPES)),
    size=st.sampled_from(SIZES),
    n=st.integers(0, 400),
    density=st.floats(0.001, 1.0),
    selector=st.sampled_from(sorted(SELECTORS)),
    steps=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_anything(name, law, dtype, size, n, density, selector, steps, seed):
    run_options = {"density": density, "selector": selector, "seed": seed}
    for ranks in run(name, law, n=n, size=size, steps=steps, dtype=dtype, **run_options):
        check_conservation(ranks)
        check_identical(ranks)
        if name == "oktopk":
            check_bound(ranks)


def whole_mean(size, n, dtype):
    """The dense mean of small whole numbers, checked on every rank; their sums are exact in any order."""

    def repeated(numbers):
        return np.resize(numbers.astype(dtype), n)

    def body(transport):
        numbers = np.arange(13)
        result = okrt.reducer("dense", transport=transport).allreduce(repeated(size * (numbers + transport.rank)))
        assert (result.dtype, result.shape) == (dtype, (n,))
        assert (result == repeated(size * numbers + sum(range(size)))).all()

    run_ranks(size, body)


@pytest.mark.parametrize(("size", "dtype"), [(2, "float16"), (3, "float32")])
def test_dense_past_the_integers_of_float32(size, dtype):
    whole_mean(size, 2**24 + 3, dtype)


@each_size
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_in_pieces(size, dtype, monkeypatch):
    monkeypatch.setattr(rank_sum, "PIECE", 20)
    for n in (0, 1, 19, 20, 21, 39, 1000):
        whole_mean(size, n, dtype)


@pytest.mark.parametrize(
    # Of two ranks oktopk sends everything to both, of three it splits it into regions.
    ("size", "name"),
    [(2, "topka"), (2, "topkdsa"), (2, "gtopk"), (2, "gaussiank"), (3, "oktopk")],
)
def test_past_the_integers_of_float32(name, size):
    """Neighbouring indexes past 2**24, which float32 cannot tell apart."""
    n = 2**24 + 3
    far = np.arange(2**24 - 2, n)

    def body(transport):
        reducer = okrt.reducer(name, density=1e-5, transport=transport)
        for step in range(2):
            x = np.zeros(n, np.float32)
            x[np.random.default_rng([step, transport.rank]).integers(0, n, 60)] = size
            x[far] = size * (far - far[0] + 5 + transport.rank)
            result = reducer.allreduce(x)
            np.testing.assert_array_equal(result[far], size * (far - far[0] + 5) + sum(range(size)))
            assert np.count_nonzero(result) <= size * reducer.last.k
        assert not reducer.residual[far].any()

    run_ranks(size, body)


def test_torch_tensors_that_carry_gradients():
    def body(transport):
        x = torch.ones(10, requires_grad=True)
        result = okrt.reducer("oktopk", density=0.5, transport=transport).allreduce(x)
        assert not result.requires_grad
        assert result.tolist() == [1.0] * 5 + [0.0] * 5

    run_ranks(2, body)
