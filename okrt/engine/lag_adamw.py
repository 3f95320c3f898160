"""AdamW for sparse gradients: a delivery is the sum of the gradients since the last one, and is taken as that.

Error feedback delivers a coordinate rarely, and then all that has gathered. Plain Adam sees zeros in between and one
spike, whose size its normalization throws away. Here, for each delivered coordinate, tau steps after its last delivery:

    g = u / tau                                  the mean gradient of a step over the lag
    m = b1**tau * m + (1 - b1**tau) * g          as if g had come on each of the tau steps
    v = b2**tau * v + (1 - b2**tau) * g * g * tau**noise
    w = (1 - lr * weight_decay)**tau * w
    w -= min(lr * tau, base_lr * lag_cap) * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)

All other coordinates rest, moments included, so that a step costs O(k). What is limited is how far a weight leaps: to
lag_cap steps at base_lr, the learning rate that the optimizer was made with. As a schedule lowers lr, longer lags count
in full.

The gradients of a lag may be a steady signal or mostly noise, whose sum grows only as the root of the lag. With noise 0
they count as the former: v is that of their mean, and a weight leaps by about lr * tau whatever the sum. With noise 1 v
stays that of a single step, as in dense training, a weight leaps by about lr * sqrt(tau), and dense training's
learning rate is right here too; lag_cap is then best left out of play (1000).

Which coordinates a sparse reducer delivers is decided by magnitude; but what a delivery brings is measured by Adam in
units of sqrt(v). With `balance` q they compete by |accumulated gradient| / v**(q/2) instead: layers and coordinates of
small gradients are not left waiting behind those of large ones.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from okrt.buffers import is_on_gpu
from okrt.engine.buckets import SLOT_ATTRIBUTE, Slot, as_tensor
from okrt.errors import UsageError
from okrt.kernels import cpu
from okrt.kernels.host import Host
from okrt.world import init

NEEDED = "lr, eps, weight_decay >= 0, betas in [0, 1), lag_cap >= 1, balance and noise in [0, 1]"
FLOOR = 0.1  # of a tensor's root mean v: coordinates with less compete as if they had this
LONGEST_LAG = 4095  # steps; the decay of moments and weights over longer ones is that of this one


class LagAdamW(torch.optim.Optimizer):
    """Takes what was delivered from `okrt.DataParallel`; from other gradients all that is not zero.

    Equal to torch.optim.AdamW when every coordinate is delivered on every step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        lag_cap: float = 30,
        balance: float = 0.5,
        noise: float = 0.0,
    ) -> None:
        for name, value, right in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("lag_cap", lag_cap, lag_cap >= 1),
            ("balance", balance, 0 <= balance <= 1),
            ("noise", noise, 0 <= noise <= 1),
        ):
            if not right:
                raise UsageError(f"{name} is {value}: needed are {NEEDED}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "lag_cap": lag_cap}
        super().__init__(params, defaults | {"balance": balance, "noise": noise, "step": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _plain("add_param_group")(self, {"base_lr": param_group.get("lr", self.defaults["lr"])} | param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _plain("zero_grad")(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return _plain("state_dict")(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _plain("load_state_dict")(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            table = decay_table(group)
            changing = [p for p in group["params"] if p.grad is not None]
            for p in changing:
                if not self.state[p]:
                    # Side by side, so that a coordinate costs one cache miss: m, v, and the step of the last delivery.
                    self.state[p]["moments"] = torch.zeros(p.numel(), 3, device=p.device)
            host().each(functools.partial(self._step_parameter, group, table), changing)
        return loss

    @torch.no_grad()
    def _step_parameter(self, group: dict[str, Any], table: np.ndarray, p: torch.nn.Parameter) -> None:
        state, p_grad = self.state[p], p.grad
        assert p_grad is not None
        index = delivered(p, p_grad)
        weight, gradient, moments = flat(p), flat(p_grad), state["moments"]
        b1, b2 = group["betas"]
        step = group["step"]
        lr = group["lr"]
        most = group["base_lr"] * group["lag_cap"] / lr if lr else np.inf
        rest = (table, step, lr, 1 - b1**step, 1 - b2**step, group["eps"], max(1.0, most))
        is_whole = p.dtype == torch.float32 and weight.data_ptr() == p.data_ptr()
        if is_whole and not is_on_gpu(p):
            arrays = (weight.numpy(), gradient.numpy(), moments.numpy(), index.numpy())
            v_change: Any = cpu.lag_adamw(*arrays, *rest)
        else:
            # On a GPU, in 16 bits, or scattered in memory.
            v_change = step_entries(weight, gradient, moments, index, *rest)
            if not is_whole:
                p.copy_(weight.view(p.shape))
        slot = getattr(p, SLOT_ATTRIBUTE, None)
        if group["balance"] and index.numel() and p.dtype == torch.float32 and slot and slot.bucket.keeps_back:
            balance(slot, state, index, v_change, group["balance"])


def _plain(name: str) -> Callable[..., Any]:
    """torch's own method, but for what tells torch.compile to leave it alone: the first call of that takes two seconds,
    to load a compiler that nobody has asked for."""
    method = getattr(torch.optim.Optimizer, name)
    return getattr(method, "__wrapped__", method)


def step_entries(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: torch.Tensor,
    index: torch.Tensor,
    table: np.ndarray,
    step: int,
    lr: float,
    bias1: float,
    bias2: float,
    eps: float,
    cap: float,
) -> torch.Tensor:
    """As the kernel `lag_adamw`, by torch's own operations on the chosen entries, wherever they are."""
    m, old_v, last = moments[index].unbind(1)
    lag = step - last
    columns = lag.clamp(max=table.shape[1] - 1).long()
    keep1, new1, keep2, new2, decay = torch.from_numpy(table).to(moments.device)[:, columns]
    mean = gradient[index].float() / lag
    m = keep1 * m + new1 * mean
    v = keep2 * old_v + new2 * (mean * mean)
    stride = lr * lag.clamp(max=cap)
    change = stride * (m / bias1) / ((v / bias2).sqrt() + eps)
    weight[index] = (decay * weight[index].float() - change).to(weight.dtype)
    moments[index] = torch.stack([m, v, torch.full_like(m, step)], 1)
    return (v.double() - old_v.double()).sum()


@functools.cache
def host() -> Host:
    """The threads of this rank; a parameter is the work of one, so that sums do not depend on their number."""
    return Host(init().threads)


def balance(slot: Slot, state: dict[str, Any], index: torch.Tensor, v_change: Any, power: float) -> None:
    """Lets the delivered elements of a parameter compete by what their new v makes of them."""
    bucket, part, moments = slot.bucket, slice(slot.start, slot.stop), state["moments"]
    is_first = "v_sum" not in state
    state["v_sum"] = state.get("v_sum", 0.0) + v_change
    mean_v = state["v_sum"] / slot.parameter.numel()
    if is_on_gpu(moments):
        floor = FLOOR * mean_v.clamp(min=1e-30).sqrt()
        scale = (moments[index, 1].sqrt() + floor).double()
    else:
        floor = FLOOR * max(float(mean_v), 1e-30) ** 0.5
        scale = np.sqrt(moments.numpy()[index.numpy(), 1]) + floor
    if is_first:
        # Whatever has not been delivered yet competes as the mean of what has.
        bucket.fill_weights(part, float((scale**-power).mean()))
    assert bucket.weights is not None
    residual, weights = as_tensor(bucket.reducer.residual)[part], bucket.weights[part]
    if is_on_gpu(moments):
        new = (scale**-power).float()
        residual[index] *= new / weights[index]
        weights[index] = new
    else:
        cpu.balance(residual.numpy(), weights.numpy(), moments.numpy(), index.numpy(), floor, power)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def delivered(p: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Sorted int32 indexes of the elements of p's gradient that are news."""
    slot = getattr(p, SLOT_ATTRIBUTE, None)
    if slot is None or gradient is not slot.view:
        return torch.nonzero(flat(gradient)).reshape(-1).int()
    index = slot.delivered()
    return torch.arange(p.numel(), dtype=torch.int32, device=p.device) if index is None else index


def decay_table(group: dict[str, Any]) -> np.ndarray:
    """What each lag leaves of the two moments and the weights, and what a mean gradient adds to the moments."""
    lags = np.arange(1 + min(group["step"], LONGEST_LAG))
    (b1, b2), decay = group["betas"], 1 - group["lr"] * group["weight_decay"]
    left1, left2 = b1**lags, b2**lags
    new2 = (1 - left2) * lags ** group["noise"]
    return np.stack([left1, 1 - left1, left2, new2, decay**lags]).astype(np.float32)
