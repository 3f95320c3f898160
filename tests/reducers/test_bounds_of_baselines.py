"""What the baselines cost, and the corners of their algorithms."""

import numpy as np
import pytest

import okrt
from okrt.feedback import Residual
from okrt.reducers import REDUCERS
from tests.laws import BASELINES, check_conservation, check_identical, gradient, run, take_step
from tests.ranks import run_ranks


def control_words(size: int) -> int:
    """The agreement (four words, recursive doubling), and counts from and to every rank."""
    return 4 * (size - 1).bit_length() + 2 * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["dense", *BASELINES])
@pytest.mark.parametrize("law", ["normal", "layers", "correlated", "interleaved", "ties", "zero"])
def test_words_are_within_the_cost(name, size, law):
    options = {} if name == "dense" else {"density": 0.05}
    n = 4000
    for ranks in run(name, law, n=n, size=size, steps=4, **options):
        for r in ranks:
            cost = REDUCERS[name].cost(n, r.stats.k, size)
            assert r.stats.words_received <= cost.words + control_words(size)


@pytest.mark.parametrize(
    ("name", "words"),
    [("dense", 2 * 600 * 3 / 4), ("topka", 2 * 60 * 3), ("topkdsa", (120 + 600) * 3 / 4), ("gtopk", 4 * 60 * 2)],
)
def test_costs_are_those_of_the_paper(name, words):
    assert REDUCERS[name].cost(600, 60, 4).words == words


def test_exact_words_of_topka_and_dense():
    size, n = 4, 1000
    coo = {"density": 0.1, "codec": "coo"}
    for name, options, words in (("topka", coo, 2 * 100 * 3), ("dense", {}, 2 * n * 3 // 4)):
        (ranks,) = run(name, "normal", n=n, size=size, steps=1, **options)
        for r in ranks:
            assert words <= r.stats.words_received <= words + control_words(size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_topka_is_the_sum_of_exact_top_k(size):
    for ranks in run("topka", "laplace", n=1500, size=size, steps=3, density=0.04):
        k, total = ranks[0].stats.k, np.zeros(1500)
        for r in ranks:
            accumulated = r.gradient + r.before
            chosen = np.argsort(-np.abs(accumulated), kind="stable")[:k]
            total[chosen] += accumulated[chosen]
        np.testing.assert_allclose(ranks[0].result, total / size, rtol=1e-5, atol=1e-7)


def test_topkdsa_sends_full_regions_dense():
    """Ranks select different entries of region 0, which fills up; the other regions stay sparse."""
    size, n, width = 4, 4000, 1000

    def body(transport):
        x = np.zeros(n, np.float32)
        x[transport.rank : width : size] = 1 + transport.rank
        x[width + 1 + transport.rank] = 9
        reducer = okrt.reducer("topkdsa", density=0.1, codec="coo", transport=transport)
        step = take_step(reducer, x)
        gathered = transport.ledger.phases["gather"].bytes_received // 4
        return step, gathered

    done = run_ranks(size, body)
    ranks = [step for step, _ in done]
    check_conservation(ranks)
    check_identical(ranks)
    counts = size - 1
    assert np.count_nonzero(ranks[0].result[:width]) == width
    # Region 0 as 1000 values, not as 1000 pairs; region 1 has four pairs.
    assert [words - counts for _, words in done] == [8, 1000, 1008, 1008]


def test_topkdsa_of_sums_that_cancel_in_a_dense_region():
    size, n = 2, 64

    def body(transport):
        reducer = okrt.reducer("topkdsa", density=0.5, transport=transport)
        x = np.ones(n, np.float32)
        x[::3] = 1 - 2 * transport.rank
        return [take_step(reducer, x) for _ in range(3)]

    for ranks in zip(*run_ranks(size, body), strict=True):
        check_conservation(ranks)
        check_identical(ranks)


def own_part_dropped(transport):
    """k = 1. Index 0 of rank 0 is dropped where ranks 0 and 1 meet, and wins through ranks 2 and 3."""
    gradients = np.zeros((4, 8), np.float32)
    gradients[0, 0], gradients[1, 1] = 3, 5
    gradients[2:, 0] = 20
    reducer = okrt.reducer("gtopk", density=1 / 8, transport=transport)
    return take_step(reducer, gradients[transport.rank])


def part_of_another_dropped(transport):
    """As above, but what rank 0 drops came from rank 1."""
    gradients = np.zeros((8, 16), np.float32)
    gradients[0, 1], gradients[1, 0] = 30, 3
    gradients[2:, 0] = 20
    reducer = okrt.reducer("gtopk", density=1 / 16, transport=transport)
    return take_step(reducer, gradients[transport.rank])


@pytest.mark.parametrize(("case", "size"), [(own_part_dropped, 4), (part_of_another_dropped, 8)])
def test_gtopk_keeps_what_another_branch_delivers(case, size):
    ranks = run_ranks(size, case)
    assert np.count_nonzero(ranks[0].result) == 1
    assert ranks[0].result[0] == sum(r.gradient[0] for r in ranks[2:]) / size
    check_identical(ranks)
    check_conservation(ranks)


def test_gtopk_would_lose_it_otherwise(monkeypatch):
    """The conservation test sees a missing put-back."""
    monkeypatch.setattr(Residual, "keep_lost", lambda *_: None)
    ranks = run_ranks(8, part_of_another_dropped)
    with pytest.raises(AssertionError, match="element 0 is off by 3"):
        check_conservation(ranks)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("law", ["laplace", "correlated", "ties", "interleaved"])
def test_gtopk_conserves_on_any_tree(size, law):
    for ranks in run("gtopk", law, n=300, size=size, steps=6, density=0.05):
        check_conservation(ranks)
        check_identical(ranks)
        assert ranks[0].stats.selected_global <= ranks[0].stats.k


def test_gaussiank_selects_about_k():
    for ranks in run("gaussiank", "normal", n=20_000, size=3, steps=5, density=0.02):
        for r in ranks:
            assert 300 <= r.stats.selected_local <= 500
            chosen = np.abs(r.gradient + r.before) >= r.stats.threshold
            assert np.count_nonzero(chosen) == r.stats.selected_local


def test_gradients_differ_between_ranks_and_steps():
    """The laws are what the tests take them for."""
    a, b, c = (gradient("normal", 100, rank, 2, step) for rank, step in ((0, 0), (1, 0), (0, 1)))
    assert not np.array_equal(a, b) and not np.array_equal(a, c)
