"""Plans that all ranks compute alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from okrt.reducers.partition import Partition, Quota, apportion, even_cuts, fitting_blocks, moves, needs_balance
from tests.ranks import run_ranks

counts_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=9)


def array(values) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("counts", "target", "shares"),
    [
        ([3, 3, 3], 9, [3, 3, 3]),
        ([3, 3, 3], 100, [3, 3, 3]),
        ([10, 20, 30], 6, [1, 2, 3]),
        ([1, 1, 1], 2, [1, 1, 0]),  # equal remainders: lowest rank first
        ([5, 1], 3, [3, 0]),  # remainders 15 % 6 = 3 and 3 % 6 = 3
        ([7, 0, 0], 0, [0, 0, 0]),
        ([0, 0], 5, [0, 0]),
        ([2**31 - 1] * 4, 2**31 - 1, [2**29, 2**29, 2**29, 2**29 - 1]),
    ],
)
def test_apportion(counts, target, shares):
    assert apportion(array(counts), target).tolist() == shares


@given(counts_lists, st.integers(0, 50_000))
def test_apportion_is_fair(counts, target):
    shares = apportion(array(counts), target)
    total = sum(counts)
    assert shares.sum() == min(total, target)
    assert (shares <= counts).all() and (shares >= 0).all()
    if total > target:
        assert (np.abs(shares - array(counts) * target / total) < 1).all()


@given(counts_lists, st.integers(0, 50_000), st.data(), st.sampled_from([1, 2, 4]))
def test_blocks_fit(counts, target, data, balance_above):
    counts = array(counts)
    room = array(data.draw(st.lists(st.integers(-5, 40_000), min_size=counts.size, max_size=counts.size)))
    blocks = fitting_blocks(counts, target, room, balance_above)
    assert blocks.sum() <= target and (blocks <= counts).all() and (blocks >= 0).all()
    assert (gathered(blocks, balance_above) <= np.maximum(room, 0)).all()
    # Nothing is cut where all of it fits.
    uncut = apportion(counts, target)
    if (gathered(uncut, balance_above) <= room).all():
        assert (blocks == uncut).all()


def gathered(blocks: np.ndarray, balance_above: int) -> np.ndarray:
    """Entries each rank receives, counted move by move."""
    if not needs_balance(blocks, balance_above):
        return blocks.sum() - blocks
    received = []
    for rank in range(blocks.size):
        _, come, even = moves(blocks, rank)
        received.append(sum(entries for peer, entries in come.items() if peer != rank) + blocks.sum() - even[rank])
    return array(received)


def test_blocks_without_room():
    assert fitting_blocks(array([5, 5]), 10, array([0, 0]), 4).tolist() == [0, 0]
    assert fitting_blocks(array([0, 5]), 5, array([5, 0]), 4).tolist() == [0, 5]
    assert fitting_blocks(array([6, 2]), 8, array([8, 3]), 4).tolist() == [3, 1]


def test_needs_balance():
    assert not needs_balance(array([4, 1, 1, 1, 1]), 4)
    assert needs_balance(array([9, 0, 0, 0, 0]), 4)
    assert not needs_balance(array([0, 0, 0, 0, 0]), 4)
    assert needs_balance(array([2**31, 0, 0, 0, 0]), 4)


@given(counts_lists)
def test_moves_keep_all_entries_and_their_order(counts):
    blocks = array(counts)
    plans = [moves(blocks, rank) for rank in range(blocks.size)]
    entries = np.split(np.arange(blocks.sum()), np.cumsum(blocks)[:-1])
    spread = []
    for rank, (_, come, even) in enumerate(plans):
        parts = [entries[peer][plans[peer][0][rank]] for peer in sorted(come)]
        assert [part.size for part in parts] == [come[peer] for peer in sorted(come)]
        spread.append(np.concatenate([*parts, np.empty(0, np.int64)]))
        assert spread[-1].size == even[rank]
        assert abs(even[rank] - blocks.mean()) < 1
    assert (np.concatenate(spread) == np.arange(blocks.sum())).all()


def test_moves_past_two_to_the_31():
    to, come, even = moves(array([3 * 2**31, 0, 0]), 0)
    assert even.tolist() == [2**31] * 3
    assert to == {rank: slice(rank * 2**31, (rank + 1) * 2**31) for rank in range(3)}
    assert come == {0: 2**31}


def partition(*make_arguments) -> Partition:
    made = Partition()
    made.make(*make_arguments)
    return made


def counter(index: np.ndarray):
    return lambda edges: np.diff(np.searchsorted(index, edges))


@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 9),
    st.sampled_from([(0, 0), (8, 1), (16, 2), (64, 2)]),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=60),
)
def test_bounds_go_up_from_0_to_n(n, parts, search, places):
    index = np.sort(array([int(place * n) for place in places]))
    made = partition(n, parts, *search, counter(index))
    for _ in range(3):
        bounds = made.bounds()
        assert bounds.size == parts + 1 and bounds[0] == 0 and bounds[-1] == n
        assert (np.diff(bounds) >= 0).all()
        made.shift(np.diff(np.searchsorted(index, bounds)))


def test_bounds_of_no_entries_are_even():
    assert partition(100, 4, 0, 0, counter(array([]))).bounds().tolist() == [0, 25, 50, 75, 100]
    assert partition(100, 4, 8, 2, counter(array([]))).bounds().tolist() == [0, 25, 50, 75, 100]


@pytest.mark.parametrize("place", [0.0, 0.37, 0.998])
def test_two_rounds_find_a_narrow_cluster(place):
    """All entries in a thousandth of the range: every part gets nearly its share."""
    n = 2**30
    index = np.sort(int(place * n) + np.random.default_rng(0).integers(0, n // 1000, 8000))
    bounds = partition(n, 4, 256, 2, counter(index)).bounds()
    assert np.abs(np.diff(np.searchsorted(index, bounds)) - 2000).max() <= 60


def test_counts_past_two_to_the_31():
    """Eight ranks with 2**30 entries each, evenly spread."""
    n = 2**31 - 1
    made = partition(n, 8, 64, 2, lambda edges: np.diff(edges) * 4)
    assert np.abs(made.bounds() - np.arange(9) * (n / 8)).max() <= 64
    made.shift(np.diff(made.bounds()) * 4)
    assert np.abs(made.bounds() - np.arange(9) * (n / 8)).max() <= 512  # a place on the grid is n / (128 * 65536) wide


@pytest.mark.parametrize(
    ("edges", "counts", "parts", "cuts"),
    [
        ([0, 60, 120], [30, 10], 2, [0, 40, 120]),  # an even cut is at two thirds of the first half
        ([0, 60, 120], [7, 7], 2, [0, 60, 120]),
        ([0, 60, 120], [0, 8], 4, [0, 75, 90, 105, 120]),
        ([0, 60, 120], [8, 0], 2, [0, 30, 120]),
        ([0, 10], [10], 3, [0, 3, 6, 10]),
        ([5, 5, 9], [4, 4], 2, [5, 5, 9]),
    ],
)
def test_even_cuts(edges, counts, parts, cuts):
    assert even_cuts(array(edges), array(counts), parts).tolist() == cuts


def test_a_shift_evens_the_loads_out():
    index = np.sort(np.random.default_rng(0).integers(0, 1000, 5000) ** 2)  # ever thinner
    made = partition(10**6, 4, 64, 2, counter(index))
    made.shift(array([3, 1, 1, 1]))
    first = np.diff(np.searchsorted(index, made.bounds()))
    # Half of the load was in the first part: the first cut moves to half of its entries.
    assert abs(first[0] - 625) <= 25
    before = made.bounds()
    made.shift(array([0, 0, 0, 0]))
    assert (made.bounds() == before).all()


@given(counts_lists, st.integers(0, 20_000), st.integers(0, 1000))
def test_quota_fits_the_cap_and_is_the_same_for_sender_and_receiver(wanted, cap, step):
    wanted = array(wanted)
    size, received = wanted.size, int(wanted.sum())
    quota = Quota(cap, size, step)
    allowed = quota(np.arange(size), wanted, received)
    assert (allowed <= wanted).all() and (allowed >= 0).all()
    if received <= cap:
        assert (allowed == wanted).all()
    else:
        assert allowed.sum() <= cap
        assert (allowed > wanted * (cap / received) - 1 - (size + 1) / 2).all()
    for sender, one in enumerate(wanted):
        assert quota(sender, np.array([one, one]), np.array([received, 0])).tolist() == [allowed[sender], one]


@given(st.integers(2, 200), st.integers(1, 300), st.integers(0, 1000))
def test_no_sender_waits_for_ever(size, cap, first):
    """Of one entry each, over the cap, all have gone when each rank has had its turn."""
    wanted = np.ones(size, np.int32)
    steps = range(first, first + -(-2 * size // min(cap, size)))
    gone = sum(Quota(cap, size, step)(np.arange(size), wanted, size) for step in steps)
    assert (gone > 0).all()


def test_quota_of_large_counts():
    wanted = np.array([2**30, 2**30], np.int32)
    assert Quota(2**30 + 1, 2, 0)(np.arange(2), wanted, 2**31).tolist() == [2**29 + 1, 2**29]


def owners(table: np.ndarray, rounds: int) -> list[int]:
    """Who gets each region when rank i has table[i, j] entries in region j; all ranks must say the same."""

    def body(transport):
        made = Partition()
        made.assign(table[transport.rank], transport.rank, rounds, transport.allgather)
        return made.owners.tolist()

    said = run_ranks(len(table), body)
    assert all(row == said[0] for row in said)
    return said[0]


@given(st.integers(1, 6), st.integers(0, 3), st.data())
def test_every_region_has_one_owner(size, rounds, data):
    cells = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    table = array(data.draw(st.lists(cells, min_size=size, max_size=size)))
    assert sorted(owners(table, rounds)) == list(range(size))


@given(st.permutations(range(5)))
def test_a_region_goes_to_the_rank_that_has_it(order):
    assert owners(100 * np.eye(5, dtype=np.int64)[list(order)] + 1, 1) == np.argsort(order).tolist()


def test_the_larger_claim_wins_and_the_loser_claims_again():
    table = array([[90, 60, 0, 0], [95, 0, 0, 60], [9, 9, 9, 9], [0, 0, 70, 0]])
    assert owners(table, 1) == [1, 0, 3, 2]
    assert owners(table, 2) == [1, 0, 3, 2]
    table[0] = [90, 0, 0, 60]
    assert owners(table, 2) == [1, 2, 3, 0]


def test_regions_stay_where_no_rank_has_much_more_than_its_share():
    assert owners(array([[9, 12, 9], [10, 10, 10], [14, 10, 10]]), 3) == [0, 1, 2]
