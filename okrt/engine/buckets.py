"""Parameters side by side in flat memory, each bucket with a reducer of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from okrt.errors import UsageError
from okrt.reducers import Reducer, StepStats

SLOT_ATTRIBUTE = "okrt_slot"  # of a parameter
MakeReducer = Callable[[], Reducer]


@dataclass
class ReductionStats:
    """The last reduction of all buckets, on this rank."""

    comm_s: float = 0.0
    """the reductions took this long"""
    wait_s: float = 0.0
    """of which backward had ended and had to wait: the rest was hidden behind it"""
    bytes_received: int = 0
    words_received: int = 0
    k: int = 0
    """entries the density stands for"""
    selected: int = 0
    """entries this rank took part with"""
    skipped: bool = False
    """a rank had NaN or Inf, and the policy is "skip" """


def as_tensor(array: Any) -> torch.Tensor:
    """The memory of a NumPy or CuPy array."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


class Slot:
    """The place of one parameter in a bucket."""

    def __init__(self, parameter: torch.nn.Parameter, bucket: "Bucket", start: int) -> None:
        self.parameter, self.bucket = parameter, bucket
        self.start, self.stop = start, start + parameter.numel()
        self.view = bucket.flat[self.start : self.stop].view(parameter.shape)
        self.is_sum = False
        """whether the gradient holds more than what the last reduction delivered"""

    def delivered(self) -> torch.Tensor | None:
        """Which elements of the gradient were delivered, sorted (int32), where it is; None if it was all of them."""
        if self.is_sum:
            return torch.nonzero(self.view.reshape(-1)).reshape(-1).int()
        index = self.bucket.delivered
        if index is None:
            return None
        low, high = self.bucket.cuts[self]
        return index[low:high] - self.start


class Bucket:
    """Parameters of one type, one after the other in `flat`."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], make_reducer: MakeReducer) -> None:
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.reducer = make_reducer()
        self.weights: torch.Tensor | None = None
        """what elements are multiplied by before the reducer, and divided by after it; residuals hold the products"""
        self.delivered: torch.Tensor | None = None
        """sorted indexes (int32) of what the last reduction delivered; None if all was"""
        self.cuts: dict[Slot, tuple[int, int]] = {}
        """where those of each slot are"""
        self.slots: list[Slot] = []
        start = 0
        for p in parameters:
            self.slots.append(Slot(p, self, start))
            start = self.slots[-1].stop

    def reduce(self) -> None:
        if self.weights is not None:
            self.flat.mul_(self.weights)
        self.reducer.allreduce(self.flat, out=self.flat)
        index = self.reducer.delivered
        self.delivered = None if index is None else as_tensor(index)
        self.cuts = {} if index is None else self._cut(index)
        if self.weights is not None:
            if self.delivered is None:
                self.flat.div_(self.weights)
            else:
                self.flat[self.delivered] /= self.weights[self.delivered]

    def _cut(self, index: Any) -> dict[Slot, tuple[int, int]]:
        """Where the indexes of each slot begin and end."""
        ends = self.reducer.cuts(index, np.array([*(slot.start for slot in self.slots), self.flat.numel()], np.int64))
        return {slot: (int(ends[i]), int(ends[i + 1])) for i, slot in enumerate(self.slots)}

    @property
    def keeps_back(self) -> bool:
        """Whether there is a residual, so that elements compete."""
        return self.reducer.residual is not None

    def fill_weights(self, part: slice, weight: float) -> None:
        """One weight for a part; what is kept back of it stays the same gradient."""
        residual = as_tensor(self.reducer.residual)
        if self.weights is None:
            # Until others get weights of their own they compete with this one.
            self.weights = torch.empty_like(residual).fill_(weight)
            residual *= weight
        residual[part] *= weight / self.weights[part]
        self.weights[part] = weight

    @property
    def stats(self) -> StepStats:
        assert self.reducer.last is not None
        return self.reducer.last


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], make_reducer: MakeReducer, bucket_mb: float | None
) -> list[Bucket]:
    """Buckets in the order of the parameters, each of one type and, if bucket_mb is given, of about that size."""
    limit_bytes = float("inf") if bucket_mb is None else bucket_mb * 2**20
    groups: list[list[torch.nn.Parameter]] = []
    open_group: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for p in parameters:
        group = open_group.get(p.dtype)
        if group is None or sum(q.numel() for q in group) * p.element_size() >= limit_bytes:
            group = open_group[p.dtype] = []
            groups.append(group)
        group.append(p)
    return [Bucket(group, make_reducer) for group in groups]


def reduction_stats(buckets: Sequence[Bucket], comm_s: float, wait_s: float, control_bytes: int) -> ReductionStats:
    stats = [bucket.stats for bucket in buckets]
    return ReductionStats(
        comm_s=comm_s,
        wait_s=wait_s,
        bytes_received=sum(s.bytes_received for s in stats) + control_bytes,
        words_received=sum(s.words_received for s in stats),
        k=sum(s.k for s in stats),
        selected=sum(s.selected_local for s in stats),
        skipped=any(s.skipped for s in stats),
    )


def bucket_states(buckets: Sequence[Bucket], names: dict[torch.nn.Parameter, str]) -> list[dict[str, Any]]:
    """For each bucket the names of its parameters, their weights, and the state of its reducer."""
    return [
        {
            "parameters": [names[slot.parameter] for slot in bucket.slots],
            "weights": None if bucket.weights is None else bucket.weights.cpu().numpy(),
            "reducer": bucket.reducer.state_dict(),
        }
        for bucket in buckets
    ]


def restored_buckets(
    states: Sequence[dict[str, Any]], names: dict[torch.nn.Parameter, str], make_reducer: MakeReducer
) -> list[Bucket]:
    """The buckets whose states these are."""
    parameters = {name: p for p, name in names.items()}
    saved = [name for state in states for name in state["parameters"]]
    if states and sorted(saved) != sorted(parameters):
        differing = sorted(set(saved) ^ set(parameters))
        raise UsageError(f"this is the state of another model: {', '.join(differing[:5])} is not in both")
    buckets = [Bucket([parameters[name] for name in state["parameters"]], make_reducer) for state in states]
    for bucket, state in zip(buckets, states, strict=True):
        if state["weights"] is not None:
            bucket.weights = torch.from_numpy(state["weights"].astype(np.float32)).to(bucket.flat.device)
        bucket.reducer.load_state_dict(state["reducer"])
    return buckets
