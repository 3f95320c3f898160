"""One line in a torch script: gradients are averaged over the ranks while backward goes on."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from okrt.engine.buckets import (
    SLOT_ATTRIBUTE,
    Bucket,
    ReductionStats,
    Slot,
    bucket_states,
    make_buckets,
    reduction_stats,
    restored_buckets,
)
from okrt.engine.courier import Courier
from okrt.engine.replicas import BufferMean, agree_on_model, broadcast, trained
from okrt.engine.side_stream import SideStream
from okrt.errors import UsageError
from okrt.reducers import Reducer
from okrt.reducers import reducer as make_reducer
from okrt.transport import Transport
from okrt.world import own_transport, threads_may_call_mpi

DENSE_BUCKET_MB = 25.0


class DataParallel(torch.nn.Module):
    """The module on every rank, with the same parameters; `p.grad` holds the mean over ranks when backward returns.

    bucket_mb: gradients travel in buckets of this size, each as soon as it is complete. By default one bucket for
    sparse reducers (the top-k of the whole gradient), 25 MB for dense. clip_norm: each rank's gradient is scaled down
    to at most this norm before error feedback; then nothing can be sent before backward has ended.
    Further options are those of the reducer.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        reducer: str = "oktopk",
        *,
        bucket_mb: float | None = None,
        clip_norm: float | None = None,
        transport: Transport | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in (("bucket_mb", bucket_mb), ("clip_norm", clip_norm)):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise UsageError(f"{name} is {value}: it must be above 0, or None")
        self.module = module
        self.last = ReductionStats()
        transport = self._transport = own_transport() if transport is None else transport
        self._make_reducer = lambda: make_reducer(reducer, transport=transport, **options)
        self._bucket_mb = DENSE_BUCKET_MB if bucket_mb is None and reducer == "dense" else bucket_mb
        self._clip_norm = clip_norm
        self._names = trained(module)
        settings = {"reducer": reducer, "bucket_mb": bucket_mb, "clip_norm": clip_norm} | options
        agree_on_model(module, settings, self._make_reducer, transport)
        broadcast([*module.parameters(), *module.buffers()], transport)
        self._buffer_mean = BufferMean(module, transport)
        self._buckets: list[Bucket] = []
        self._slots: dict[torch.nn.Parameter, Slot] = {}
        self._order: list[torch.nn.Parameter] = []  # as backward produced the gradients, until there are buckets
        self._sync = True
        self._unsynced: set[torch.nn.Parameter] = set()
        self._courier = Courier(threads_may_call_mpi())
        self._side = SideStream(next(iter(self._names)))
        weakref.finalize(self, self._courier.close)
        self._begin_round()
        # Autograd drops these nodes, and their hooks, unless somebody holds them.
        self._nodes = [self._hook(p) for p in self._names]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ready:
            raise RuntimeError("the last backward did not end: the ranks' gradients are no longer known to match")
        if torch.is_grad_enabled():
            for name, p in self.module.named_parameters():
                if p.requires_grad and p not in self._names:
                    raise UsageError(
                        f"parameter {name} was frozen when the model was wrapped: wrap it after unfreezing"
                    )
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward calls inside stay on this rank and are reduced with those of the next one outside."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module itself: it also loads into the plain model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def reducer_state_dict(self) -> dict[str, Any]:
        """This rank's residuals, thresholds and layout of buckets: what a restart needs beside the module's state."""
        return {"buckets": bucket_states(self._buckets, self._names)}

    def load_reducer_state_dict(self, state: dict[str, Any]) -> None:
        self._place(restored_buckets(state["buckets"], self._names, self._make_reducer))

    @property
    def reducers(self) -> list[Reducer]:
        """One for each bucket; none before the first backward."""
        return [bucket.reducer for bucket in self._buckets]

    def _hook(self, p: torch.nn.Parameter) -> Any:
        with torch.enable_grad():
            view: Any = p.view_as(p)
        node = view.grad_fn.next_functions[0][0]
        owner = weakref.ref(self)

        def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
            model = owner()
            if model is not None and gradients[0] is not None:
                model._take(p, gradients[0])

        def after(*_: Any) -> None:
            model = owner()
            if model is not None:
                model._taken(p)

        node.register_prehook(before)
        node.register_hook(after)
        return node

    def _take(self, p: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A new gradient is about to be added to p.grad: puts it, and what p.grad holds unreduced, into its slot."""
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._names[p]} is {gradient.layout}: make the embedding with sparse=False"
            )
        if not self._sync:
            self._unsynced.add(p)
            return
        slot = self._slots.get(p)
        if slot is None:
            return
        if p.grad is None:
            slot.view.copy_(gradient)
        elif p.grad is slot.view and p not in self._unsynced:
            self._settled[p] = p.grad.clone()
            slot.view.copy_(gradient)
        else:
            torch.add(p.grad, gradient, out=slot.view)
        p.grad = None

    def _taken(self, p: torch.nn.Parameter) -> None:
        if not self._sync:
            return
        if not self._ready:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        self._ready.add(p)
        if not self._slots:
            self._order.append(p)
            return
        p.grad = None
        if self._clip_norm is None:
            self._send_complete_buckets()

    def _begin_round(self) -> None:
        self._ready: set[torch.nn.Parameter] = set()
        self._settled: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._sent = 0
        self._control_bytes = 0
        self._courier.busy_s = 0.0

    def _send_complete_buckets(self) -> None:
        """In the order of buckets, whatever the order of gradients: all ranks must do the same."""
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            # The last one first: it is the one that is usually missing, and this is asked for every gradient.
            if not all(slot.parameter in self._ready for slot in reversed(bucket.slots)):
                return
            self._courier.give(self._side.after_this(bucket.reduce))
            self._sent += 1

    def _finish_backward(self) -> None:
        try:
            if not self._buckets:
                self._learn_order()
            used = self._fill_unused()
            if self._clip_norm is not None:
                self._clip()
            for bucket in self._buckets[self._sent :]:
                self._courier.give(self._side.after_this(bucket.reduce))
            self._sent = len(self._buckets)
            self._courier.give(self._side.after_this(lambda: self._settle_the_rest(used)))
            wait_s = self._courier.settle()
            self._side.join()
            self._hand_out(used)
            self.last = reduction_stats(self._buckets, self._courier.busy_s, wait_s, self._control_bytes)
        finally:
            self._unsynced.clear()
            self._begin_round()

    def _learn_order(self) -> None:
        """Buckets in the order in which rank 0 got its gradients; what got none comes last."""
        number = {p: i for i, p in enumerate(self._names)}
        mine = [number[p] for p in dict.fromkeys([*self._order, *reversed(self._names)])]
        order = self._transport.allgather(np.array(mine, np.int32))[0]
        parameters = list(self._names)
        self._place(make_buckets([parameters[i] for i in order], self._make_reducer, self._bucket_mb))
        for p in self._ready:
            assert p.grad is not None
            self._slots[p].view.copy_(p.grad)
            p.grad = None

    def _place(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._slots = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        for slot in self._slots.values():
            # Where LagAdamW finds what was delivered.
            setattr(slot.parameter, SLOT_ATTRIBUTE, slot)

    def _fill_unused(self) -> np.ndarray:
        """Zeros, or what no_sync left, for parameters without a new gradient; which of them have something to give."""
        used = np.zeros(len(self._names), np.int32)
        for i, p in enumerate(self._names):
            slot = self._slots[p]
            if p not in self._ready:
                if p.grad is slot.view and p not in self._unsynced:
                    self._settled[p] = p.grad.clone()
                elif p in self._unsynced and p.grad is not None:
                    slot.view.copy_(p.grad)
                    used[i] = 1
                    continue
                slot.view.zero_()
            else:
                used[i] = 1
        return used

    def _clip(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(b.flat.float()) for b in self._buckets]))
        if norm > self._clip_norm:
            for bucket in self._buckets:
                bucket.flat.mul_(self._clip_norm / norm)

    def _settle_the_rest(self, used: np.ndarray) -> None:
        """Sets the flags of parameters that any rank used, and averages buffers that have changed."""
        ledger = self._transport.ledger
        ledger.begin()
        flags = np.concatenate([used, self._buffer_mean.changed()])
        if self._transport.size > 1:
            self._transport.allreduce(flags, "max")
        used[:] = flags[: used.size]
        self._control_bytes = ledger.bytes_received
        self._control_bytes += self._buffer_mean.average(flags[used.size :])

    def _hand_out(self, used: np.ndarray) -> None:
        """p.grad of every parameter that any rank used, or that gets something that was kept back."""
        for flag, p in zip(used, self._names, strict=True):
            slot, settled = self._slots[p], self._settled.get(p)
            if settled is not None:
                slot.view.add_(settled)
            slot.is_sum = settled is not None
            if flag or settled is not None or slot.view.any():
                p.grad = slot.view
            elif p.grad is slot.view:
                p.grad = None
