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


class Slot:
    """The place of one parameter in a bucket."""

    def __init__(self, parameter: torch.nn.Parameter, bucket: "Bucket", start: int) -> None:
        self.parameter, self.bucket = parameter, bucket
        self.start, self.stop = start, start + parameter.numel()
        self.view = bucket.flat[self.start : self.stop].view(parameter.shape)
        self.is_sum = False
        """whether the gradient holds more than what the last reduction delivered"""

    def delivered(self) -> np.ndarray | None:
        """Which elements of the gradient were delivered, sorted; None if it was all of them."""
        if self.is_sum:
            return np.flatnonzero(self.view.float().numpy()).astype(np.int32)
        index = self.bucket.reducer.delivered
        if index is None:
            return None
        low, high = np.searchsorted(index, (self.start, self.stop))
        return index[low:high] - np.int32(self.start)


class Bucket:
    """Parameters of one type, one after the other in `flat`."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], make_reducer: MakeReducer) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        self.reducer = make_reducer()
        self.weights: np.ndarray | None = None
        """what elements are multiplied by before the reducer, and divided by after it; residuals hold the products"""
        self.slots: list[Slot] = []
        start = 0
        for p in parameters:
            self.slots.append(Slot(p, self, start))
            start = self.slots[-1].stop

    def reduce(self) -> None:
        if self.weights is None:
            self.reducer.allreduce(self.flat, out=self.flat)
            return
        flat = self.flat.numpy()
        flat *= self.weights
        self.reducer.allreduce(flat, out=flat)
        index = self.reducer.delivered
        if index is None:
            flat /= self.weights
        else:
            flat[index] /= self.weights[index]

    @property
    def keeps_back(self) -> bool:
        """Whether there is a residual, so that elements compete."""
        return self.reducer.residual is not None

    def fill_weights(self, part: slice, weight: float) -> None:
        """One weight for a part; what is kept back of it stays the same gradient."""
        residual = self.reducer.residual
        assert residual is not None
        if self.weights is None:
            # Until others get weights of their own they compete with this one.
            self.weights = np.full(self.flat.numel(), weight, np.float32)
            residual *= np.float32(weight)
        residual[part] *= np.float32(weight) / self.weights[part]
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
            "weights": bucket.weights,
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
        bucket.weights = None if state["weights"] is None else state["weights"].astype(np.float32)
        bucket.reducer.load_state_dict(state["reducer"])
    return buckets
