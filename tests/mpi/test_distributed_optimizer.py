"""DistributedOptimizer over real MPI: replicas stay alike, and with one gradient on all ranks it is the optimizer."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import okrt
from okrt.errors import NonFiniteGradient, PlanMismatch, UsageError
from tests.laws import top

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.BatchNorm1d(9), nn.Linear(9, 3))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 6, generator=generator)).square().mean().backward()


def vector(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def assert_alike(model: nn.Module) -> None:
    mine = b"".join(t.detach().float().numpy().tobytes() for t in [*model.parameters(), *model.buffers()])
    assert len(set(COMM.allgather(mine))) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["dense", "topka", "gtopk", "oktopk"])
def test_replicas_stay_bit_identical(name, kind):
    model = net(seed=RANK)
    options = {} if name == "dense" else {"density": 0.1}
    optimizer = okrt.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model, name, **options)
    assert_alike(model)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, RANK, step)
        before = vector(model)
        optimizer.step()
        assert_alike(model)
        assert (vector(model) != before).any()
        assert optimizer.last.bytes_received > 0 or SIZE == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_gradient_on_all_ranks_is_the_optimizer_itself(kind):
    """Weight decay included, which is so applied once."""
    model, alone = net(), net()
    optimizer = okrt.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model, "dense")
    plain = OPTIMIZERS[kind](alone.parameters())
    for step in range(5):
        for module, stepped in ((model, optimizer), (alone, plain)):
            stepped.zero_grad()
            backward(module, 0, step)
            stepped.step()
        np.testing.assert_allclose(vector(model), vector(alone), rtol=1e-4, atol=2e-5)


def test_plain_sgd_is_algorithm_2():
    """w changes by the mean of what was delivered of residual + lr * gradient, and nothing is lost."""
    model = net()
    optimizer = okrt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, "oktopk", density=0.05)
    start, given = vector(model), 0.0
    for step in range(6):
        optimizer.zero_grad()
        backward(model, RANK, step)
        mine = torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy()
        given = given + 0.1 * COMM.allreduce(mine) / SIZE
        optimizer.step()
    kept = COMM.allreduce(optimizer.reducers[0].residual.astype(np.float64)) / SIZE
    np.testing.assert_allclose(start - vector(model) + kept, given, rtol=1e-4, atol=1e-6)


def test_decoupled_weight_decay_does_not_travel():
    """A parameter without gradient shrinks by exactly its factor on every step, at any density."""
    model = nn.Linear(50, 1, bias=False)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = okrt.DistributedOptimizer(inner, model, "oktopk", density=0.02)
    start = vector(model)
    for _ in range(4):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    np.testing.assert_allclose(vector(model), start * 0.95**4, rtol=1e-5)
    assert inner.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_momentum_masking(values, complete):
    """Momentum is zero where this rank's update was delivered, whatever rounding keeps of it, and only there."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"density": 0.05, "values": values, "complete": complete}
    optimizer = okrt.DistributedOptimizer(inner, model, "topka", momentum_masking=True, **options)
    momentum = np.zeros_like(vector(model))
    kept = momentum
    for step in range(3):
        optimizer.zero_grad()
        backward(model, RANK, step)
        momentum = 0.9 * momentum + torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy()
        optimizer.step()
        sent = top(kept + 0.1 * momentum, optimizer.reducers[0].last.k)
        if complete:
            sent = np.unique(np.concatenate(COMM.allgather(sent)))
        momentum[sent] = 0
        left = torch.cat([inner.state[p]["momentum_buffer"].flatten() for p in model.parameters()]).numpy()
        assert not left[sent].any()
        np.testing.assert_allclose(left, momentum, rtol=1e-4, atol=1e-6)
        kept = optimizer.reducers[0].residual.astype(np.float64)


def test_momentum_masking_whatever_the_order_of_memory():
    """That of channels_last is not that of the elements."""
    momenta = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).to(memory_format=memory_format)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = okrt.DistributedOptimizer(inner, model, "topka", density=0.1, momentum_masking=True)
        for step in range(2):
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + 10 * RANK + i)
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
            optimizer.step()
        momenta.append(torch.cat([inner.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()]))
        k = optimizer.reducers[0].last.k
    assert torch.equal(*momenta)
    assert k <= int((momenta[0] == 0).sum()) < momenta[0].numel() / 2


def test_clipping():
    model, alone = net(), net()
    optimizer = okrt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, "dense", clip_norm=0.01)
    backward(alone, RANK, 0)
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    mine = torch.cat([p.grad.flatten() for p in alone.parameters()]).double().numpy()
    before = vector(model)
    backward(model, RANK, 0)
    optimizer.step()
    np.testing.assert_allclose(before - vector(model), COMM.allreduce(mine) / SIZE, rtol=1e-3, atol=1e-6)


def test_schedulers_work():
    model = net()
    optimizer = okrt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, "dense")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    backward(model, RANK, 0)
    optimizer.step()
    scheduler.step()
    before = vector(model)
    optimizer.step()
    np.testing.assert_array_equal(vector(model), before)


def run(steps: range, state: tuple | None = None) -> tuple:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = okrt.DistributedOptimizer(inner, model, "oktopk", density=0.05)
    if state:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        optimizer.load_reducer_state_dict(state[2])
    for step in steps:
        optimizer.zero_grad()
        backward(model, RANK, step)
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.reducer_state_dict()))


def test_state_goes_on_where_it_was():
    unbroken, resumed = run(range(6)), run(range(3, 6), run(range(3)))
    for key, value in unbroken[0].items():
        assert torch.equal(value, resumed[0][key]), key
    assert np.array_equal(*(s[2]["buckets"][0]["reducer"]["residual"] for s in (unbroken, resumed)))


def test_mistakes():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="pass the plain model"):
        okrt.DistributedOptimizer(sgd, okrt.DataParallel(net(), "dense"))
    with pytest.raises(UsageError, match="the parameters of the model"):
        okrt.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    with pytest.raises(UsageError, match="momentum_masking is for SGD"):
        okrt.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, momentum_masking=True)
    with pytest.raises(UsageError, match="clip_norm is 0"):
        okrt.DistributedOptimizer(sgd, model, clip_norm=0)
    with pytest.raises(UsageError, match="unknown reducer"):
        okrt.DistributedOptimizer(sgd, model, "okt")


@pytest.mark.mpi(min_size=2)
def test_different_settings_are_named():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanMismatch, match=r"density is 0\.1 on rank 0"):
        okrt.DistributedOptimizer(sgd, model, density=0.2 if RANK == LAST else 0.1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nan_on_one_rank_touches_nothing(kind):
    """Neither weights nor moments nor residuals, on any rank; by policy an error or a step passed over."""
    for nan in ("raise", "skip"):
        model = net()
        inner = OPTIMIZERS[kind](model.parameters())
        optimizer = okrt.DistributedOptimizer(inner, model, "oktopk", density=0.1, nan=nan)
        backward(model, RANK, 0)
        optimizer.step()
        before = copy.deepcopy((vector(model), inner.state_dict()["state"], optimizer.reducers[0].residual))
        if RANK == LAST:
            model[0].weight.grad[0, 0] = np.nan
        if nan == "raise":
            with pytest.raises(NonFiniteGradient, match=f"gradient of rank {LAST};"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.last.skipped
            assert optimizer.skipped_steps == 1
        after = (vector(model), inner.state_dict()["state"], optimizer.reducers[0].residual)
        np.testing.assert_array_equal(before[0], after[0])
        np.testing.assert_array_equal(before[2], after[2])
        assert str(before[1]) == str(after[1])
        optimizer.zero_grad()
        backward(model, RANK, 1)
        optimizer.step()
        assert np.isfinite(vector(model)).all()
        assert (vector(model) != before[0]).any()
