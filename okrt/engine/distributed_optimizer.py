"""The decentralized SGD of the Ok-Topk paper, for any optimizer: updates are averaged instead of gradients.

Every rank lets its optimizer step on its own gradient; the changes go through error feedback and the reducer, and
every replica applies their mean. With plain SGD that is the paper's Algorithm 2, the learning rate inside the
accumulator; with momentum it is the momentum correction of DGC.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from okrt.engine.buckets import (
    Bucket,
    ReductionStats,
    as_tensor,
    bucket_states,
    make_buckets,
    reduction_stats,
    restored_buckets,
)
from okrt.engine.data_parallel import DataParallel
from okrt.engine.replicas import BufferMean, agree_on_model, broadcast, trained
from okrt.errors import NonFiniteGradient, UsageError
from okrt.reducers import Reducer
from okrt.reducers import reducer as make_reducer
from okrt.transport import Transport
from okrt.world import agree, own_transport


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps the optimizer of a model whose backward is local; replicas stay bit-identical.

    Decoupled weight decay (AdamW) is applied to the weights of all replicas alike and does not travel.
    momentum_masking: SGD's momentum starts anew where this rank's update was delivered (DGC).
    clip_norm: each rank's gradient is scaled down to at most this norm. nan: as of the reducer, for gradients.
    Further options are those of the reducer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        reducer: str = "oktopk",
        *,
        momentum_masking: bool = False,
        clip_norm: float | None = None,
        nan: str = "raise",
        transport: Transport | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, DataParallel):
            raise UsageError("the model is a DataParallel, which reduces its gradients already: pass the plain model")
        self._names = trained(model)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if held != set(self._names):
            raise UsageError(
                "the optimizer must hold the parameters of the model that require a gradient, no more or less"
            )
        if momentum_masking and not any("momentum" in group for group in optimizer.param_groups):
            raise UsageError(f"momentum_masking is for SGD with momentum: {type(optimizer).__name__} has none")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}: it must be above 0, or None")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._optimizer, self._momentum_masking, self._clip_norm = optimizer, momentum_masking, clip_norm
        self._transport = own_transport() if transport is None else transport
        self._make_reducer = lambda: make_reducer(reducer, nan=nan, transport=self._transport, **options)
        settings = {"reducer": reducer, "momentum_masking": momentum_masking, "clip_norm": clip_norm} | options
        agree_on_model(model, settings, self._make_reducer, self._transport)
        broadcast([*model.parameters(), *model.buffers()], self._transport)
        self._buffer_mean = BufferMean(model, self._transport)
        self._nan = nan
        self.last = ReductionStats()
        self.skipped_steps = 0
        self._place(make_buckets(list(self._names), self._make_reducer, None))

    def _place(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._starts = [torch.empty_like(bucket.flat) for bucket in buckets]

    @property
    def reducers(self) -> list[Reducer]:
        return [bucket.reducer for bucket in self._buckets]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._any_not_finite():
            self.last = ReductionStats(skipped=True)
            self.skipped_steps += 1
            return loss
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._names), self._clip_norm)
        for bucket, start in zip(self._buckets, self._starts, strict=True):
            for slot in bucket.slots:
                start[slot.start : slot.stop] = slot.parameter.detach().reshape(-1)
        kept = self._local_step()
        comm_s = 0.0
        for bucket, start in zip(self._buckets, self._starts, strict=True):
            for slot in bucket.slots:
                before = start[slot.start : slot.stop].view(slot.view.shape)
                torch.sub(before, slot.parameter, out=slot.view)
            begun = time.perf_counter()
            bucket.reduce()
            comm_s += time.perf_counter() - begun
            for slot in bucket.slots:
                before = start[slot.start : slot.stop].view(slot.view.shape)
                slot.parameter.copy_(before.mul_(kept[slot.parameter]).sub_(slot.view))
            if self._momentum_masking:
                self._mask(bucket)
        flags = self._buffer_mean.changed()
        if self._transport.size > 1 and flags.size:
            self._transport.allreduce(flags, "max")
        self.last = reduction_stats(self._buckets, comm_s, comm_s, self._buffer_mean.average(flags))
        return loss

    def _any_not_finite(self) -> bool:
        """Asked before the optimizer steps, so that NaN or Inf of any rank does not get into its moments."""
        finite = all(bool(torch.isfinite(p.grad).all()) for p in self._names if p.grad is not None)
        self._transport.ledger.begin()
        if not agree(self._transport, {}, None, flag=not finite):
            return False
        if self._nan == "raise":
            ranks = np.flatnonzero(self._transport.allgather(np.array([not finite])))
            raise NonFiniteGradient(
                f"NaN or Inf in the gradient of rank {', '.join(map(str, ranks))}; weights, moments and residuals are "
                'untouched (nan="skip" passes over such steps)'
            )
        return True

    def _local_step(self) -> dict[torch.nn.Parameter, float]:
        """Lets the optimizer step without its decoupled weight decay; what that leaves of each parameter."""
        kept = dict.fromkeys(self._names, 1.0)
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        decoupled = isinstance(self._optimizer, torch.optim.AdamW)
        for group, decay in zip(self.param_groups, decays, strict=True):
            if decoupled:
                kept |= dict.fromkeys(group["params"], 1 - float(group["lr"]) * decay)
                group["weight_decay"] = 0
        try:
            self._optimizer.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decoupled:
                    group["weight_decay"] = decay
        return kept

    def _mask(self, bucket: Bucket) -> None:
        """Momentum zero where this rank's own update was delivered."""
        if bucket.delivered is None or bucket.reducer.sent is None:
            return
        sent = as_tensor(bucket.reducer.sent)
        both = bucket.delivered[torch.isin(bucket.delivered, sent, assume_unique=True)]
        starts = torch.tensor([slot.start for slot in bucket.slots], dtype=both.dtype, device=both.device)
        ends = [*torch.searchsorted(both, starts).tolist(), both.numel()]
        for slot, (low, high) in zip(bucket.slots, pairwise(ends), strict=True):
            momentum = self.state[slot.parameter].get("momentum_buffer")
            if momentum is not None:
                flat = momentum.reshape(-1)
                flat[both[low:high] - slot.start] = 0
                if flat.data_ptr() != momentum.data_ptr():
                    momentum.copy_(flat.view(momentum.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, which holds this rank's own moments."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state

    def reducer_state_dict(self) -> dict[str, Any]:
        """Residuals and thresholds of this rank."""
        return {"buckets": bucket_states(self._buckets, self._names)}

    def load_reducer_state_dict(self, state: dict[str, Any]) -> None:
        self._place(restored_buckets(state["buckets"], self._names, self._make_reducer))
