"""Plans that every rank computes alike: bounds of regions, shares, and moves between ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

CELLS_PER_PART = 16
PLACES_PER_CELL = 1 << 16
CLAIM_ABOVE = 1.5  # times an even share: what makes a region worth claiming


def even_cuts(edges: np.ndarray, counts: np.ndarray, parts: int) -> np.ndarray:
    """parts + 1 positions that cut the counts between neighbouring edges into even parts, spread evenly between edges.

    In whole numbers throughout: whatever the machine, all ranks get the same cuts.
    """
    total = sum(map(int, counts))
    cuts = [int(edges[0])]
    at, passed = 0, 0
    for part in range(1, parts):
        wanted = total * part  # in units of 1 / parts, as is all that is compared with it
        while parts * (passed + int(counts[at])) < wanted:
            passed += int(counts[at])
            at += 1
        low, high = int(edges[at]), int(edges[at + 1])
        cuts.append(low + (high - low) * (wanted - parts * passed) // max(1, parts * int(counts[at])))
    return np.array([*cuts, int(edges[-1])], np.int64)


class Partition:
    """Bounds of the ranks' regions, kept as places on a grid whose cells held equally many entries when it was made:
    there entries lie evenly, so that a small shift of a bound moves about as many of them as intended."""

    def __init__(self) -> None:
        self.grid = np.empty(0, np.int64)
        self.places = np.empty(0, np.int64)
        self.owners = np.empty(0, np.int64)
        """the rank of each region"""

    def make(
        self, n: int, parts: int, bins: int, rounds: int, total_counts: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Cuts range(n) into parts with equally many entries of all ranks.

        total_counts(edges) tells how many entries lie between neighbouring edges. Each round puts the edges where the
        last one saw the entries, so that two find a cluster as narrow as n / bins**2. No rounds: parts of even width.
        """
        edges, counts = np.array([0, n], np.int64), np.array([n], np.int64)
        for _ in range(rounds):
            finer = even_cuts(edges, counts, bins)
            found = total_counts(finer)
            if not found.any():
                break
            edges, counts = finer, found
        self.grid = even_cuts(edges, counts, CELLS_PER_PART * parts)
        self.places = CELLS_PER_PART * PLACES_PER_CELL * np.arange(parts + 1, dtype=np.int64)
        self.owners = np.arange(parts)

    def assign(self, counts: np.ndarray, rank: int, rounds: int, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        """Gives regions to ranks that have much more than an even share of their entries there: those need not travel.

        counts are this rank's entries in each region; gather(row) gets the rows of all ranks. In each round every rank
        that has no region yet claims the free one where it has most; the largest claims win.
        """
        parts = counts.size
        owners = np.full(parts, -1)
        for _ in range(rounds):
            free = np.flatnonzero(owners < 0)
            best = free[np.argmax(counts[free])] if free.size else 0
            worth = rank not in owners and counts[best] * parts > CLAIM_ABOVE * counts.sum()
            claims = gather(np.array([best, counts[best] if worth else 0], np.int32))
            for claimant in np.argsort(-claims[:, 1], kind="stable"):
                region, count = claims[claimant]
                if count and owners[region] < 0:
                    owners[region] = claimant
            if not claims[:, 1].any():
                break
        without = [rank for rank in range(parts) if rank not in owners]
        for region in np.flatnonzero(owners < 0):
            owners[region] = region if region in without else -1
        without = [rank for rank in without if rank not in owners]
        owners[owners < 0] = without
        self.owners = owners

    def bounds(self) -> np.ndarray:
        """parts + 1 indexes from 0 to n."""
        cell = np.minimum(self.places // PLACES_PER_CELL, self.grid.size - 2)
        low, high = self.grid[cell], self.grid[cell + 1]
        return low + (high - low) * (self.places - cell * PLACES_PER_CELL) // PLACES_PER_CELL

    def shift(self, loads: np.ndarray) -> None:
        """Moves the bounds to where the loads of the ranks would have been even."""
        if loads.any():
            self.places = even_cuts(self.places, loads[self.owners], loads.size)


class Quota:
    """What ranks may send to a region for which there is more than a cap: their share of it in proportion.

    A share of little can be nothing: so part of the cap goes to some ranks for one entry more each, to others in the
    next step. No rank's entries wait for ever.
    """

    def __init__(self, cap: int, size: int, step: int) -> None:
        in_turn = (min(cap, size) + 1) // 2
        self.cap, self._shared = cap, cap - in_turn
        self._extra = ((np.arange(size) + step * in_turn) % size < in_turn).astype(np.int64)

    def __call__(self, senders: Any, wanted: np.ndarray, received: Any) -> np.ndarray:
        """Of the entries that each sender has for a region whose owner would receive so many from all."""
        share = wanted.astype(np.int64) * self._shared // np.maximum(received, 1) + self._extra[senders]
        return np.where(received <= self.cap, wanted, np.minimum(wanted, share)).astype(wanted.dtype)


def apportion(counts: np.ndarray, target: int) -> np.ndarray:
    """Counts reduced in proportion to sum to at most the target; rounding favours the largest remainders."""
    total = int(counts.sum())
    if total <= target:
        return counts.copy()
    scaled = counts * target
    shares = scaled // total
    missing = target - int(shares.sum())
    by_remainder = np.argsort(-(scaled % total), kind="stable")
    shares[by_remainder[:missing]] += 1
    return shares


def needs_balance(blocks: np.ndarray, limit: int) -> bool:
    """Whether the largest block is more than `limit` times the mean."""
    return int(blocks.max()) * blocks.size > limit * int(blocks.sum())


def fitting_blocks(counts: np.ndarray, target: int, room: np.ndarray, balance_above: int) -> np.ndarray:
    """Counts reduced in proportion so that they sum to at most the target, and no rank gathers more than its room."""
    while True:
        blocks = apportion(counts, target)
        total = int(blocks.sum())
        # After a balance whoever had little has got its even share before, and whoever had much gets back what it gave.
        gathered = np.full_like(blocks, total) if total and needs_balance(blocks, balance_above) else total - blocks
        over = gathered > np.maximum(room, 0)
        if total == 0 or not over.any():
            return blocks
        target = min(total - 1, int((total * np.maximum(room, 0)[over] // gathered[over]).min()))


def moves(blocks: np.ndarray, rank: int) -> tuple[dict[int, slice], dict[int, int], np.ndarray]:
    """How to spread blocks evenly and keep their order: which of its entries this rank gives to whom (itself included),
    how many it gets from whom, and the even blocks."""
    size, total = blocks.size, int(blocks.sum())
    old = np.concatenate([[0], np.cumsum(blocks)])
    new = np.array([total * j // size for j in range(size + 1)])
    to, come = {}, {}
    for peer in range(size):
        low, high = max(old[rank], new[peer]), min(old[rank + 1], new[peer + 1])
        if low < high:
            to[peer] = slice(int(low - old[rank]), int(high - old[rank]))
        low, high = max(old[peer], new[rank]), min(old[peer + 1], new[rank + 1])
        if low < high:
            come[peer] = int(high - low)
    return to, come, np.diff(new)
