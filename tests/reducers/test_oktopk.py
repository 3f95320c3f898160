"""Ok-Topk: the bound on words holds at every step, on any gradients; counts and quality on steady ones."""

import tracemalloc

import numpy as np
import pytest

import okrt
from okrt.reducers.oktopk import REPARTITION_EVERY, OkTopk
from okrt.select import SELECTORS
from tests.laws import (
    DTYPES,
    LAWS,
    SPARSE,
    check_bound,
    check_conservation,
    check_identical,
    exact_energy,
    gradient,
    oktopk_limit,
    run,
)
from tests.ranks import run_ranks

# Below the first of these everything goes to all ranks; the second is the first k that is split into regions.
SWITCH = {3: (33, 34), 4: (16, 17), 5: (10, 11), 7: (7, 8), 8: (6, 7), 12: (4, 5)}


def check(ranks):
    check_bound(ranks)
    check_conservation(ranks)
    check_identical(ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k", [1, 100, 2000])
def test_bound_on_every_step(law, size, k):
    n = 20 * k + 3
    for ranks in run("oktopk", law, n=n, size=size, steps=7, density=k / n):
        assert ranks[0].stats.k == k
        check(ranks)


@pytest.mark.parametrize("law", ["normal", "moving", "ties", "disjoint_shifted", "equal", "jump"])
@pytest.mark.parametrize("size", SWITCH)
def test_bound_where_regions_begin(law, size):
    for k in SWITCH[size]:
        n = 20 * k + 3
        for ranks in run("oktopk", law, n=n, size=size, steps=5, density=k / n):
            check(ranks)
            assert ("split" in ranks[0].stats.seconds) == (k == SWITCH[size][1])


@pytest.mark.parametrize(
    ("size", "k", "options"),
    [
        *((32, k, {"complete": True, "values": values}) for k in (4, 16, 64) for values in ("fp32", "fp16")),
        *((64, k, {"complete": complete}) for k in (3, 8, 32) for complete in (False, True)),
        (128, 3, {"complete": True, "codec": "coo"}),
    ],
)
def test_many_ranks_and_small_k(size, k, options):
    """Where control and the headers of messages take much of the bound, there is still room for what was selected."""
    n = 20 * k + 3
    for law in ("ties", "normal"):
        done = run("oktopk", law, n=n, size=size, steps=4, density=k / n, **{"codec": "packed", **options})
        for ranks in done:
            check(ranks)
    assert np.mean([r.stats.selected_local for r in done[-1]]) >= 0.9 * k


@pytest.mark.parametrize("codec", ["coo", "packed"])
def test_what_does_not_fit_goes_in_turns(codec):
    """All ranks have but one entry, the same, and its owner may not receive so many: that of each rank goes in time."""
    size, k = 64, 3
    n = 20 * k
    done = run("oktopk", "single", n=n, size=size, steps=8, density=k / n, codec=codec)
    went = np.array([[r.stats.selected_local for r in ranks] for ranks in done[1:]])
    assert (went.sum(axis=1) < size).any(), "all of it fits"
    assert (went.sum(axis=0) > 0).all()
    for ranks in done:
        check(ranks)


@pytest.mark.parametrize(("law", "size"), [("laplace", 4), ("moving", 8)])
def test_bound_through_repartitions(law, size, monkeypatch):
    """More steps than a partition lasts; those that were made are counted."""
    made = []
    repartition = OkTopk._repartition
    monkeypatch.setattr(
        OkTopk, "_repartition", lambda self, *args: made.append(self._steps) or repartition(self, *args)
    )
    for ranks in run("oktopk", law, n=6000, size=size, steps=40 + REPARTITION_EVERY + 2, density=0.05):
        check(ranks)
    scheduled = {0, 1, 4, 13, 40, 40 + REPARTITION_EVERY}
    assert set(made) - scheduled if law == "moving" else set(made) == scheduled


@pytest.mark.parametrize(("law", "size"), [("one_winner", 5), ("one_winner", 8), ("single", 7)])
def test_results_on_one_rank_are_balanced(law, size, monkeypatch):
    balanced = []
    balance = OkTopk._balance
    monkeypatch.setattr(OkTopk, "_balance", lambda self, *args: balanced.append(1) or balance(self, *args))
    for ranks in run("oktopk", law, n=10_000, size=size, steps=4, density=0.05):
        check(ranks)
    assert balanced


CHANGING = {"moving", "jump", "drop", "ties"}  # the selection moves, or its size
FEW = {"cancelling", "zero", "single"}  # fewer than k sums are not zero


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("law", [law for law in LAWS if law not in CHANGING])
def test_words_and_counts_on_steady_gradients(law, size):
    k, steps = 1000, 12
    done = run("oktopk", law, n=100 * k, size=size, steps=steps, density=0.01)
    for ranks in done:
        check_bound(ranks)
    words = np.array([[r.stats.words_received for r in ranks] for ranks in done])
    assert (np.median(words, axis=0) <= 4.4 * k * (size - 1) / size).all()
    for ranks in done[3:] if law not in FEW else ():
        for r in ranks:
            assert 0.95 * k <= r.stats.selected_local <= 1.05 * k
            assert 0.95 * k <= r.stats.selected_global <= 1.05 * k


@pytest.mark.parametrize("law", ["disjoint", "disjoint_shifted"])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_entries_of_one_rank_alone_stay_where_they_are(law, size):
    """The rank that has them all owns the region: there is hardly more to receive than the result."""
    k = 1000
    done = run("oktopk", law, n=100 * k, size=size, steps=6, density=0.01)
    words = np.array([[r.stats.words_received for r in ranks] for ranks in done])
    assert (np.median(words, axis=0) <= 2.3 * k * (size - 1) / size).all()


@pytest.mark.parametrize("law", ["normal", "correlated"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_quality_against_exact_thresholds(law, size):
    for ranks in run("oktopk", law, n=20_000, size=size, steps=50, density=0.02):
        energy = float(((size * ranks[0].result.astype(np.float64)) ** 2).sum())
        assert energy >= 0.97 * exact_energy(ranks)


def test_two_ranks_are_exact():
    """Everything goes to both: the result is the exact top-k of the sum of exact top-k's."""
    for ranks in run("oktopk", "normal", n=5000, size=2, steps=4, density=0.02, selector="exact"):
        energy = float(((2 * ranks[0].result.astype(np.float64)) ** 2).sum())
        assert energy == pytest.approx(exact_energy(ranks), rel=1e-5)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("name", SPARSE)
def test_every_selector_with_every_reducer(name, selector):
    for size, law in ((2, "layers"), (3, "ties"), (5, "jump")):
        for ranks in run(name, law, n=2000, size=size, steps=6, density=0.03, selector=selector):
            check_conservation(ranks)
            check_identical(ranks)
            if name == "oktopk":
                check_bound(ranks)
            k = ranks[0].stats.k
            assert all(0.7 * k <= r.stats.selected_local <= 1.25 * k for r in ranks)


def test_a_bound_that_one_word_more_would_break():
    """The check is able to fail."""
    (ranks,) = run("oktopk", "normal", n=2000, size=4, steps=1, density=0.1)
    ranks[2].stats.words_received = int(oktopk_limit(200, 4)) + 1
    with pytest.raises(AssertionError):
        check_bound(ranks)


# Words a rank holds, or uses for a moment, for each entry of k: candidates, messages in and out, sums and the result.
HELD_WORDS, PEAK_WORDS = 40, 60


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_the_residual_and_o_of_k(size, dtype):
    n = 2**20
    residual_bytes = 4 * n

    def body(transport):
        gradients = [DTYPES[dtype](gradient("layers", n, transport.rank, size, step)) for step in range(2)]
        out = np.empty_like(gradients[0])
        transport.gather_texts("made")
        if transport.rank == 0:
            tracemalloc.start()
        transport.gather_texts("started")
        reducer = okrt.reducer("oktopk", density=0.01, transport=transport)
        held, peaks = [], []
        for step in range(4):
            given = {"out": out} if step % 2 else {}
            if transport.rank == 0:
                tracemalloc.reset_peak()
            transport.gather_texts("reset")
            result = reducer.allreduce(gradients[step % 2], **given)
            transport.gather_texts("done")
            extra = residual_bytes + (0 if given else result.nbytes)
            peaks.append(tracemalloc.get_traced_memory()[1] / size - extra)
            del result
            transport.gather_texts("dropped")
            held.append(tracemalloc.get_traced_memory()[0] / size - residual_bytes)
            transport.gather_texts("measured")
        return reducer.last.k, held, peaks

    try:
        k, held, peaks = run_ranks(size, body)[0]
    finally:
        tracemalloc.stop()
    assert max(held) <= HELD_WORDS * 4 * k
    assert max(peaks) <= PEAK_WORDS * 4 * k < residual_bytes
