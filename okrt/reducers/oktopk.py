"""Ok-Topk (PPoPP'22): the top-k of the sum of local top-k's, in at most 6k(P-1)/P words received, at every step.

Entries go to the owner of their region, which sums them (split and reduce); the sums above a global threshold go to
every rank (balance and allgatherv). Both thresholds are steered to find a little more than k, and what is above k is
cut; both phases have a budget, and what a cut leaves out stays in the residual.

With `complete` only the indexes of those sums are gathered; then each rank adds what it holds of them, and what the
values come to is summed and spread as a dense array: 5k(P-1)/P words when all is even, within the same bound.
"""

from typing import Any

import numpy as np

from okrt.reducers.base import Cost
from okrt.reducers.global_threshold import GlobalThreshold
from okrt.reducers.merging import Gather, GatheredSum, Lost, Words
from okrt.reducers.partition import Partition, Quota, fitting_blocks, moves, needs_balance
from okrt.reducers.regions import RegionSum
from okrt.reducers.sparse import Delivered, SparseReducer
from okrt.select import Selection
from okrt.transport.ledger import log2_ceil

REPARTITION_EVERY = 64  # steps; sooner at first, when error feedback still moves the selection
REPARTITION_IMBALANCE = 1.5  # earlier, when a region has grown this much above what the last one achieved
SEARCH_SHARE = 0.125  # of k: the words that finding a partition, or a threshold, may cost
BALANCE_ABOVE = 4  # times the mean: then entries are moved before they are gathered
# Bins and rounds to find a partition; the first that can be afforded is used.
CLAIM_ROUNDS = 3
PARTITION_SEARCHES = ((256, 2), (64, 2), (16, 3), (16, 2), (16, 1), (8, 1))


class OkTopk(SparseReducer):
    name = "oktopk"
    default_selector = "reuse"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(2 * size + 2 * log2_ceil(size), 6 * k * (size - 1) / size)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        kernels = self._kernels
        self._gathered_sum = GatheredSum(self.transport, self._codec, kernels)
        self._region_sum = RegionSum(self.transport, self._codec, kernels)
        self._gather = Gather(self.transport, self._codec, kernels)
        self._moved = RegionSum(self.transport, self._codec, kernels)
        self._result = Words(kernels), Words(kernels)

    def _make_state(self) -> None:
        self._partition = Partition()
        self._partition_step = 0
        self._partition_imbalance = 1.0
        self._threshold = GlobalThreshold(self.transport)

    def _exchange(self, selection: Selection, n: int) -> Delivered:
        size, k = self.transport.size, self._stats.k
        self._limit_words = 6 * k * (size - 1) // size + 8 * size + 64
        self._limit_words -= self._overhead_words(k)  # of what is gathered
        if self.complete:
            self._limit_words -= -(-k // size) * (size - 1) + k - k // size  # for the values
        else:
            self._limit_words -= self._overhead_words(k // size + 1)  # of what is balanced
        if 2 * k * (size - 1) <= 4 * k * (size - 1) // size + 4 * size + 32:
            # Two ranks, or a tiny k: sending everything to all is as cheap, takes one round, and is exact.
            index, total, lost = self._gathered_sum(selection)
            kept = self._kernels.keep_top(index, total, k)
            return Delivered(index[:kept], total[:kept], selection.index, lost)
        selection, index, total, lost = self._split_and_reduce(selection, n)
        with self.transport.ledger.phase("threshold"):
            blocks = self._cut_to_global_top(index, total)
        with self.transport.ledger.phase("gather"):
            own = slice(int(blocks[self.transport.rank]))
            index, total, rounded = self._balance_and_allgatherv(index[own], total[own], blocks)
        return Delivered(index, total, selection.index, (*lost, *rounded), is_share=self.complete)

    def _split_and_reduce(self, selection: Selection, n: int) -> tuple[Selection, Any, Any, tuple[Lost, ...]]:
        """What was sent of the selection, the sums of this rank's region, and what rounding took from what was sent."""
        transport = self.transport
        with transport.ledger.phase("partition"):
            cuts, coming, received = self._agree_on_regions(selection.index, n)
            quota = Quota(self._split_cap(), transport.size, self._steps)
            selection, cuts = self._cut_to_quota(selection, cuts, received, quota)
            ranks = np.arange(transport.size)
            coming = np.where(ranks == transport.rank, coming, quota(ranks, coming, received[transport.rank]))
        # Each rank receives its own amount here; the traffic of all else is the same on all ranks.
        self._received = np.minimum(received, quota.cap)
        control_words = transport.ledger.words_received
        with transport.ledger.phase("split"):
            parts = [slice(cuts[region], cuts[region + 1]) for region in np.argsort(self._partition.owners)]
            index, total, lost = self._region_sum(selection.index, selection.value, parts, coming)
        self._split_words = transport.ledger.words_received - control_words
        return selection, index, total, lost

    def _agree_on_regions(self, index: Any, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where this rank's entries are cut, how many come from each rank, and how many each rank will receive."""
        if self._stats.k == n:
            # All entries may go: regions of even width are the only ones that are sure to hold them.
            self._partition.make(n, self.transport.size, 0, 0, np.diff)
            return self._count_regions(index)[:3]
        wait = min(REPARTITION_EVERY, 1 + 2 * self._partition_step)
        due = self._partition.grid.size == 0 or self._steps - self._partition_step >= wait
        if due:
            self._repartition(index, n)
        cuts, coming, received, imbalance = self._count_regions(index)
        if not due and imbalance > REPARTITION_IMBALANCE * self._partition_imbalance:
            due = self._repartition(index, n)
            if due:
                cuts, coming, received, imbalance = self._count_regions(index)
        if due:
            self._partition_imbalance = max(1.0, imbalance)
        return cuts, coming, received

    def _count_regions(self, index: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """As above, and how much the fullest region is above the mean."""
        cuts = self._kernels.cuts(index, self._partition.bounds())
        to_ranks = np.empty(self.transport.size, np.int32)
        to_ranks[self._partition.owners] = np.diff(cuts)
        coming = self.transport.alltoall(to_ranks)
        total = int(coming.sum(dtype=np.int64))
        from_others = total - int(coming[self.transport.rank])
        table = self.transport.allgather(np.array([from_others, total], self._count_type()))
        self._region_counts = table[:, 1].astype(np.int64)
        imbalance = float(self._region_counts.max() / max(1.0, self._region_counts.mean()))
        return cuts, coming, table[:, 0], imbalance

    def _repartition(self, index: Any, n: int) -> bool:
        """New bounds, so that every region gets about the same number of entries, if there is budget for it."""
        size, k = self.transport.size, self._stats.k
        count_type = self._count_type()
        word = np.dtype(count_type).itemsize // 4
        sparing = (2 + self._gather_words) * k * (size - 1) // size + self._overhead_words(k) + 16 * size
        spare = (self._spare_words() - sparing) // 2
        for bins, rounds in PARTITION_SEARCHES:
            if bins * rounds * log2_ceil(size) * word <= min(spare, SEARCH_SHARE * k + 4 * size + 32):
                break
        else:
            if self._partition.grid.size:
                return False
            bins, rounds = 0, 0

        def total_counts(edges: np.ndarray) -> np.ndarray:
            counts: np.ndarray = np.diff(self._kernels.cuts(index, edges)).astype(count_type)
            self.transport.allreduce(counts, "sum")
            return counts

        self._partition.make(n, size, bins, rounds, total_counts)
        if rounds:
            counts = np.diff(self._kernels.cuts(index, self._partition.bounds()))
            self._partition.assign(counts, self.transport.rank, CLAIM_ROUNDS, self.transport.allgather)
        self._partition_step = self._steps
        return True

    def _count_type(self) -> type:
        """For numbers of entries of all ranks together."""
        return np.int32 if self._stats.k * self.transport.size < 2**31 else np.int64

    @property
    def _gather_words(self) -> int:
        """Of an entry, when the sums are gathered."""
        return 1 if self.complete else 2

    @property
    def _balance_above(self) -> int:
        """Times the mean; never with `complete`: moving an entry would cost more than evenness brings."""
        return self.transport.size if self.complete else BALANCE_ABOVE

    def _spare_words(self) -> int:
        return self._limit_words - self.transport.ledger.words_received

    def _overhead_words(self, entries: Any) -> Any:
        """What the messages that bring a rank so many entries take beyond coordinates, at most."""
        return self._codec.overhead_words * np.minimum(self.transport.size - 1, entries)

    def _split_cap(self) -> int:
        """Entries a rank may receive in the split: twice what it does when all is even, and what control leaves."""
        peers, k = self.transport.size - 1, self._stats.k
        gathering = self._gather_words * k * peers // (peers + 1)
        spare = self._spare_words() - gathering - 4 * peers
        with_messages_of_one = spare // (2 + self._codec.overhead_words)
        return max(0, min(with_messages_of_one, peers), (spare - self._overhead_words(peers)) // 2)

    def _cut_to_quota(
        self, selection: Selection, cuts: np.ndarray, received: np.ndarray, quota: Quota
    ) -> tuple[Selection, np.ndarray]:
        """Drops this rank's smallest entries of each region whose owner would receive more than the cap."""
        if received.max() <= quota.cap:
            return selection, cuts
        index, value, rank, owners = selection.index, selection.value, self.transport.rank, self._partition.owners
        entries, new_cuts = np.diff(cuts), np.zeros_like(cuts)
        allowed = np.where(owners == rank, entries, quota(rank, entries, received[owners]))
        for region, first in enumerate(cuts[:-1]):
            part = slice(first, first + entries[region])
            kept = self._kernels.keep_top(index[part], value[part], int(allowed[region]))
            to = slice(new_cuts[region], new_cuts[region] + kept)
            index[to] = index[part][:kept]
            value[to] = value[part][:kept]
            new_cuts[region + 1] = to.stop
        return Selection(index[: new_cuts[-1]], value[: new_cuts[-1]], selection.threshold), new_cuts

    def _cut_to_global_top(self, index: Any, total: Any) -> np.ndarray:
        """Moves the sums to deliver to the front; returns how many each rank has."""
        size, k = self.transport.size, self._stats.k
        even = self._gather_words * k * (size - 1) // size

        def spare_words() -> int:
            return min(int(self._room_words().min()) - even - 8 * size, int(SEARCH_SHARE * k) + 4 * size + 32)

        candidates = self._threshold.candidates(self._kernels, total, k, spare_words)
        blocks = fitting_blocks(candidates, k, self._room_words() // self._gather_words, self._balance_above)
        self._kernels.keep_top(index, total, int(blocks[self.transport.rank]))
        # What a rank receives grows with the entries of its region and falls with the sums that are its own.
        received = (size - 1) * self._region_counts - size * blocks
        self._partition.shift(np.maximum(received, 0))
        return blocks

    def _room_words(self) -> np.ndarray:
        """What each rank may still receive, known alike on all ranks."""
        control = self.transport.ledger.words_received - self._split_words
        return self._limit_words - control - 2 * self._received - self._overhead_words(self._received)

    def _balance_and_allgatherv(self, index: Any, total: Any, blocks: np.ndarray) -> tuple[Any, Any, tuple[Lost, ...]]:
        """The entries of all ranks, in index order; with `complete` the totals are this rank's only."""
        moved: tuple[Lost, ...] = ()
        if needs_balance(blocks, self._balance_above):
            index, total, blocks, moved = self._balance(index, total, blocks)
        lists, rounded = self._gather(index, None if self.complete else total, blocks)
        count, at = int(blocks.sum()), 0
        all_index, all_total = self._result[0](count), self._result[1](count).view(np.float32)
        for owner in self._partition.owners:
            part = slice(at, at + int(blocks[owner]))
            all_index[part] = lists[owner][0]
            if self.complete:
                all_total[part] = total if owner == self.transport.rank else 0.0
            else:
                all_total[part] = lists[owner][1]
            at = part.stop
        return all_index, all_total, (*moved, *rounded)

    def _balance(self, index: Any, total: Any, blocks: np.ndarray) -> tuple[Any, Any, np.ndarray, tuple[Lost, ...]]:
        """The same entries in the same order over all ranks, evenly spread."""
        rank, owners = self.transport.rank, self._partition.owners
        own_region = int(np.flatnonzero(owners == rank)[0])
        to, come, even_regions = moves(blocks[owners], own_region)
        even, coming, parts = np.empty_like(blocks), np.zeros_like(blocks), [slice(0, 0)] * blocks.size
        even[owners] = even_regions
        for region, part in to.items():
            parts[owners[region]] = part
        for region, entries in come.items():
            coming[owners[region]] = entries
        # No index comes twice: the sum of what comes is what comes.
        index, total, lost = self._moved(index, total, parts, coming)
        return index, total, even, lost

    def state_dict(self) -> dict[str, Any]:
        return (
            super().state_dict()
            | {
                "partition_grid": self._partition.grid.copy(),
                "partition_places": self._partition.places.copy(),
                "partition_owners": self._partition.owners.copy(),
                "partition_step": self._partition_step,
                "partition_imbalance": self._partition_imbalance,
            }
            | {f"threshold.{key}": value for key, value in self._threshold.state_dict().items()}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._make_state()
        # Regions of another number of ranks are of no use: without any, the next step makes them.
        if state["partition_owners"].size == self.transport.size:
            self._partition.grid = state["partition_grid"].astype(np.int64)
            self._partition.places = state["partition_places"].astype(np.int64)
            self._partition.owners = state["partition_owners"].astype(np.int64)
        self._partition_step = int(state["partition_step"])
        self._partition_imbalance = float(state["partition_imbalance"])
        prefix = "threshold."
        self._threshold.load_state_dict(
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        )
