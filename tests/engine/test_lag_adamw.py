"""Lag-aware AdamW: torch's AdamW when all is delivered on every step, the formula of its module otherwise."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import okrt
from okrt.engine import lag_adamw
from okrt.errors import UsageError
from okrt.kernels.host import Host

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1}


def gradients(step: int, shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def steps(optimizer, parameters, per_step) -> None:
    for grads in per_step:
        for p, gradient in zip(parameters, grads, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("noise", [0, 1])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_equals_adamw_when_all_is_delivered(memory_format, noise):
    shapes = [(3, 2, 4, 4), (7,)]
    ours = [
        nn.Parameter(g.contiguous(memory_format=memory_format) if g.ndim == 4 else g) for g in gradients(99, shapes)
    ]
    theirs = copy.deepcopy(ours)
    per_step = [gradients(step, shapes) for step in range(30)]
    steps(okrt.LagAdamW(ours, noise=noise, **SETTINGS), ours, per_step)
    steps(torch.optim.AdamW(theirs, **SETTINGS), theirs, per_step)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_learning_rate_schedulers_and_groups():
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    theirs = copy.deepcopy(parameters)
    results = []
    for kind, ps in ((okrt.LagAdamW, parameters), (torch.optim.AdamW, theirs)):
        optimizer = kind([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:]}], **SETTINGS)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        for step in range(6):
            steps(optimizer, ps, [gradients(step, [(4,), (4,)])])
            scheduler.step()
        results.append(ps)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noise", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_late_delivery_is_the_mean_over_the_lag(dtype, noise):
    """One coordinate, delivered at steps 1, 5 and 50, in float64 by the formula."""
    p = nn.Parameter(torch.tensor([0.5, 0.25], dtype=dtype))
    optimizer = okrt.LagAdamW([p], lag_cap=30, noise=noise, **SETTINGS)
    (b1, b2), lr, decay = SETTINGS["betas"], SETTINGS["lr"], SETTINGS["weight_decay"]
    delivered = {1: 0.8, 5: -1.5, 50: 4.0}
    w, m, v, last = float(p.detach()[0]), 0.0, 0.0, 0
    for step in range(1, 51):
        p.grad = torch.tensor([delivered.get(step, 0.0), 0.0], dtype=dtype)
        optimizer.step()
        if step in delivered:
            lag, last = step - last, step
            g = float(p.grad[0]) / lag
            m, v = b1**lag * m + (1 - b1**lag) * g, b2**lag * v + (1 - b2**lag) * g * g * lag**noise
            w *= (1 - lr * decay) ** lag
            w -= lr * min(lag, 30) * (m / (1 - b1**step)) / ((v / (1 - b2**step)) ** 0.5 + 1e-8)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert float(p.detach()[0]) == pytest.approx(w, rel=tolerance)
    assert float(p.detach()[1]) == 0.25  # never delivered: it rests


@pytest.mark.parametrize("lr", [0.1, 0.06, 0.05, 0.02, 0.0])
def test_a_leap_is_limited_to_steps_at_the_first_learning_rate(lr):
    """To 30 steps at 0.1: of the same gradient in each of 60 steps, so that m / sqrt(v) is 1."""
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = okrt.LagAdamW([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, lag_cap=30)
    steps(optimizer, [p], [[torch.tensor([0.5])]])
    before = float(p.detach())
    optimizer.param_groups[0]["lr"] = lr
    steps(optimizer, [p], [[torch.tensor([0.5 * 60 if step == 59 else 0.0])] for step in range(60)])
    expected = min(60 * lr, 30 * 0.1)
    assert before - float(p.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_noise_counts_as_in_dense_training():
    """400 random signs, delivered one by one and as their sum: the same v and the same way gone, on average."""
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (400, 500))).float()
    gone, moments = [], []
    for late in (False, True):
        p = nn.Parameter(torch.zeros(500))
        optimizer = okrt.LagAdamW([p], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0, lag_cap=1000, noise=1)
        nothing = torch.zeros(500)
        steps(optimizer, [p], [[nothing]] * 399 + [[signs.sum(0)]] if late else [[row] for row in signs])
        gone.append(float(p.detach().square().mean().sqrt()))
        moments.append(float(optimizer.state[p]["moments"][:, 1].mean()))
    assert gone[1] == pytest.approx(gone[0], rel=0.1)
    assert moments[1] == pytest.approx(moments[0], rel=0.1)


def test_lags_beyond_the_table_count_as_its_last(monkeypatch):
    monkeypatch.setattr(lag_adamw, "LONGEST_LAG", 4)
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = okrt.LagAdamW([p], lr=0.0, weight_decay=0.0, betas=(0.5, 0.5))
    for step in range(1, 11):
        p.grad = torch.tensor([10.0 if step == 10 else 0.0])
        optimizer.step()
    assert optimizer.state[p]["moments"][0].tolist() == [1 - 0.5**4, 1 - 0.5**4, 10.0]


def test_a_parameter_without_gradient_rests_and_its_lag_grows():
    p = nn.Parameter(torch.ones(2))
    optimizer = okrt.LagAdamW([p], lr=0.1)
    steps(optimizer, [p], [[torch.ones(2)], [None], [torch.ones(2)]])
    assert optimizer.state[p]["moments"][:, 2].tolist() == [3.0, 3.0]
    torch.testing.assert_close(optimizer.state[p]["moments"][0, 0], torch.tensor(0.1 * 0.81 + 0.19 * 0.5))


def test_state_goes_on_where_it_was():
    parameters = [nn.Parameter(g) for g in gradients(7, [(5,), (2, 3)])]
    other = copy.deepcopy(parameters)
    per_step = [[g * (g.abs() > 1) for g in gradients(step, [(5,), (2, 3)])] for step in range(8)]
    steps(okrt.LagAdamW(parameters, **SETTINGS), parameters, per_step)
    first = okrt.LagAdamW(other, **SETTINGS)
    steps(first, other, per_step[:4])
    second = okrt.LagAdamW(other, **SETTINGS)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, other, per_step[4:])
    for p, q in zip(parameters, other, strict=True):
        assert torch.equal(p, q)


def test_closure_is_called_with_gradients_on():
    p = nn.Parameter(torch.ones(3))
    optimizer = okrt.LagAdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert (p < 1).all()


def test_only_delivered_coordinates_are_touched():
    """With the indexes of DataParallel: what is delivered moves though it is zero, the rest does not."""
    torch.manual_seed(0)
    model = okrt.DataParallel(nn.Linear(40, 25), density=0.02)
    optimizer = okrt.LagAdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 40, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        optimizer.step()
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) != before
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        np.testing.assert_array_equal(moved.numpy(), (gradient != 0).numpy())
        assert int(moved.sum()) == 21  # ceil of 2 % of 1025


@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -1}, {"lag_cap": 0.5}, {"noise": 1.5}]
)
def test_wrong_settings(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        okrt.LagAdamW([nn.Parameter(torch.ones(1))], **wrong)


def test_threads_change_nothing(monkeypatch):
    shapes = [(50, 40), (7,), (300,), (1,)]
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(lag_adamw, "host", functools.partial(Host, threads))
        parameters = [nn.Parameter(g.to(d)) for g, d in zip(gradients(9, shapes), DTYPES, strict=True)]
        optimizer = okrt.LagAdamW(parameters, **SETTINGS)
        steps(
            optimizer,
            parameters,
            [[g.to(d) for g, d in zip(gradients(step, shapes), DTYPES, strict=True)] for step in range(5)],
        )
        results.append(parameters)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)
