"""DataParallel over real MPI: against one process that sees the batches of all ranks."""

import copy
import warnings

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

import okrt
from okrt.errors import PeerError, PlanMismatch, UsageError

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
SPARSE = [name for name in okrt.reducers() if name != "dense"]


class Net(nn.Module):
    """Shared weights, a frozen layer, and a branch that some batches do not use."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.branch = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.use_branch = branch

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        x = self.frozen(x)
        return self.last(self.branch(x) if self.use_branch else x)


def net(seed: int = 0, **options) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return F.cross_entropy(model(x), y)


def wrap(module: nn.Module, reducer: str, **options) -> okrt.DataParallel:
    if reducer != "dense":
        options.setdefault("density", 0.1)
    return okrt.DataParallel(module, reducer, **options)


def mean_gradients(module: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Of all ranks' batches, in float64, by one process."""
    alone = copy.deepcopy(module).double()
    for p in alone.parameters():
        p.grad = None
    for rank in range(SIZE):
        x, y = batch(rank, step)
        (F.cross_entropy(alone(x.double()), y) / SIZE).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def assert_gradients(module: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    for name, p in module.named_parameters():
        if expected[name] is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad.double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_same_on_all_ranks(tensors) -> None:
    mine = b"".join(t.detach().float().numpy().tobytes() for t in tensors)
    assert len(set(COMM.allgather(mine))) == 1


@pytest.mark.parametrize("bucket_mb", [None, 1e-4])
def test_dense_gives_the_gradient_of_all_batches(bucket_mb):
    module = net(seed=RANK)
    model = wrap(module, "dense", bucket_mb=bucket_mb)
    assert_same_on_all_ranks(module.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        expected = mean_gradients(module, step)
        optimizer.zero_grad()
        loss(model, RANK, step).backward()
        assert_gradients(module, expected)
        optimizer.step()
        assert_same_on_all_ranks(module.parameters())
    assert len(model.reducers) == (1 if bucket_mb is None else 3)


@pytest.mark.parametrize("name", okrt.reducers())
def test_nothing_is_lost_over_steps(name):
    """What was delivered and what is kept back add up to all gradients."""
    model = wrap(net(), name)
    parameters = list(model.module.parameters())
    given, got = ({p: torch.zeros(p.shape, dtype=torch.float64) for p in parameters} for _ in range(2))
    for step in range(5):
        expected = mean_gradients(model.module, step)
        for key, p in model.module.named_parameters():
            p.grad = None
            if expected[key] is not None:
                given[p] += expected[key]
        loss(model, RANK, step).backward()
        for p in parameters:
            if p.grad is not None:
                got[p] += p.grad
        assert model.last.selected <= 1.25 * model.last.k
    if name != "dense":
        for bucket in model._buckets:
            kept = COMM.allreduce(bucket.reducer.residual.astype(np.float64)) / SIZE
            for slot in bucket.slots:
                got[slot.parameter] += torch.from_numpy(kept[slot.start : slot.stop]).view(slot.view.shape)
    for p in parameters:
        torch.testing.assert_close(got[p], given[p], rtol=1e-4, atol=1e-6)


def test_a_branch_that_only_one_rank_uses():
    model = wrap(net(), "dense")
    for step in range(3):
        model.module.use_branch = RANK == LAST and step > 0
        model.zero_grad()
        loss(model, RANK, step).backward()
        assert (model.module.branch.weight.grad is not None) == (step > 0)
        assert model.module.unused.weight.grad is None
        assert model.module.frozen.weight.grad is None
        if step:
            alone = copy.deepcopy(model.module)
            alone.zero_grad()
            alone.use_branch = True
            loss(alone, LAST, step).backward()
            torch.testing.assert_close(model.module.branch.weight.grad, alone.branch.weight.grad / SIZE)
            assert_same_on_all_ranks([model.module.branch.weight.grad])


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates_locally(steps_before, set_to_none):
    model = wrap(net(), "dense")
    for step in range(steps_before):
        loss(model, RANK, step).backward()
    model.zero_grad(set_to_none)
    with model.no_sync():
        for step in (5, 6):
            loss(model, RANK, step).backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    (loss(alone, RANK, 5) + loss(alone, RANK, 6)).backward()
    torch.testing.assert_close(model.module.first.weight.grad, alone.first.weight.grad)
    loss(model, RANK, 7).backward()
    parts = [mean_gradients(model.module, step) for step in (5, 6, 7)]
    expected = {name: None if g is None else sum(part[name] for part in parts) for name, g in parts[0].items()}
    assert_gradients(model.module, expected)


@pytest.mark.parametrize("name", ["dense", "oktopk"])
def test_several_backwards_add_up(name):
    """What was reduced once is not reduced again: at density 1 a sparse reducer gives the same."""
    model = wrap(net(), name, **({} if name == "dense" else {"density": 1.0}))
    for step in range(3):
        loss(model, RANK, step).backward()
    parts = [mean_gradients(model.module, step) for step in range(3)]
    expected = {key: None if g is None else sum(part[key] for part in parts) for key, g in parts[0].items()}
    assert_gradients(model.module, expected)


def test_several_backwards_keep_what_is_there():
    """A sparse reduction adds to p.grad, and p.grad does not go through the reducer again."""
    model, once = wrap(net(), "oktopk"), wrap(net(), "oktopk")
    total = {}
    for step in range(3):
        loss(model, RANK, step).backward()
        once.zero_grad()
        loss(once, RANK, step).backward()
        for key, p in once.module.named_parameters():
            if p.grad is not None:
                total[key] = total.get(key, 0) + p.grad.clone()
    for key, p in model.module.named_parameters():
        if key in total:
            torch.testing.assert_close(p.grad, total[key])


def test_clipping_before_error_feedback():
    model, plain = wrap(net(), "dense", clip_norm=0.05), net()
    plain.load_state_dict(model.module.state_dict())
    loss(plain, RANK, 0).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
    assert norm > 0.05
    loss(model, RANK, 0).backward()
    for p, q in zip(model.module.parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            expected = COMM.allreduce(q.grad.double().numpy()) / SIZE
            torch.testing.assert_close(p.grad.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8).to(dtype), nn.Linear(8, 4))
    model = wrap(module, "oktopk", density=1.0)
    x, y = batch(RANK, 0)
    F.cross_entropy(module[1](model.module[0](x.to(dtype)).float()), y).backward()
    assert len(model.reducers) == 2
    assert module[0].weight.grad.dtype == dtype
    alone = copy.deepcopy(module)
    alone.zero_grad()
    F.cross_entropy(alone[1](alone[0](x.to(dtype)).float()), y).backward()
    expected = COMM.allreduce(alone[0].weight.grad.double().numpy()) / SIZE
    torch.testing.assert_close(module[0].weight.grad.double().numpy(), expected, rtol=2e-2, atol=1e-3)
    assert_same_on_all_ranks(p.grad for p in module.parameters())


def test_statistics_of_batch_norm_are_averaged():
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model = wrap(module, "oktopk")
    alone = copy.deepcopy(module)
    for step in range(2):
        x, y = batch(RANK, step)
        alone.load_state_dict(model.state_dict())
        alone(x)
        F.cross_entropy(model(x), y).backward()
        for key in ("running_mean", "running_var"):
            expected = COMM.allreduce(getattr(alone[1], key).double().numpy()) / SIZE
            torch.testing.assert_close(getattr(module[1], key).double().numpy(), expected, rtol=1e-5, atol=1e-6)
        assert_same_on_all_ranks(module.buffers())
    assert int(module[1].num_batches_tracked) == 2


def trained(name: str, steps: range, state: tuple | None = None) -> tuple:
    """The states of model and reducers after these steps of plain SGD."""
    model = wrap(net(), name, bucket_mb=1e-4)
    if state:
        model.load_state_dict(state[0])
        model.load_reducer_state_dict(state[1])
    for step in steps:
        model.zero_grad()
        loss(model, RANK, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return copy.deepcopy(model.state_dict()), copy.deepcopy(model.reducer_state_dict())


@pytest.mark.parametrize("name", ["dense", "oktopk"])
def test_state_goes_on_where_it_was(name):
    unbroken = trained(name, range(4))
    resumed = trained(name, range(2, 4), trained(name, range(2)))
    for key, value in unbroken[0].items():
        assert torch.equal(value, resumed[0][key]), key
    for a, b in zip(unbroken[1]["buckets"], resumed[1]["buckets"], strict=True):
        assert a["parameters"] == b["parameters"]
        for key, value in a["reducer"].items():
            assert np.array_equal(value, b["reducer"][key]), key
    net().load_state_dict(unbroken[0])


def test_overlap_is_measured():
    model = wrap(net(), "dense", bucket_mb=1e-4)
    for step in range(2):
        loss(model, RANK, step).backward()
    assert model.last.comm_s > 0
    assert model.last.wait_s >= 0
    assert model.last.k == sum(p.numel() for p in model.parameters() if p.requires_grad)
    if SIZE > 1:
        assert model.last.bytes_received > 4 * model.last.k * (SIZE - 1) / SIZE


def test_nan_on_one_rank_is_an_error_on_all():
    model = wrap(net(), "oktopk")
    loss(model, RANK, 0).backward()
    if RANK == LAST:
        with torch.no_grad():
            model.module.last.bias[0] = np.nan
    with pytest.raises(UsageError, match="NaN or Inf in the gradient of rank"):
        loss(model, RANK, 1).backward()


def test_nan_is_skipped_by_policy():
    model = wrap(net(), "oktopk", nan="skip")
    loss(model, RANK, 0).backward()
    model.zero_grad()
    (loss(model, RANK, 1) * (np.inf if RANK == LAST else 1)).backward()
    assert model.last.skipped
    assert not model.module.last.weight.grad.any()


@pytest.mark.mpi(min_size=2)
def test_different_models_are_named():
    with pytest.raises(PlanMismatch, match=r"parameter weight is float32 \(2, 3\) on rank 0"):
        okrt.DataParallel(nn.Linear(4 if RANK == LAST else 3, 2))


@pytest.mark.mpi(min_size=2)
def test_a_model_that_one_rank_cannot_train():
    with pytest.raises(UsageError if RANK == LAST else PeerError, match="float64"):
        okrt.DataParallel(nn.Linear(3, 2).to(torch.float64 if RANK == LAST else torch.float32))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"reducer": "okttopk"}, "unknown reducer"),
        ({"densty": 0.1}, "unknown option 'densty'"),
        ({"density": 2}, "density is 2"),
        ({"bucket_mb": 0}, "bucket_mb is 0"),
        ({"clip_norm": -1}, "clip_norm is -1"),
    ],
)
def test_wrong_options(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        okrt.DataParallel(net(), **options)


def test_models_that_cannot_be_trained():
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        okrt.DataParallel(nn.Linear(2, 2).requires_grad_(False))
    model = wrap(net(), "dense")
    model.module.frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"frozen.weight was frozen"):
        loss(model, RANK, 0)
    embedding = okrt.DataParallel(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(UsageError, match="sparse=False"):
        embedding(torch.tensor([1])).sum().backward()


def test_a_backward_that_failed_is_noticed():
    model = wrap(net(), "dense")
    loss(model, RANK, 0).backward()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise ArithmeticError("broken")

    out = model.module.last(Fails.apply(model.module.first(batch(RANK, 0)[0])))
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="last backward did not end"):
        loss(model, RANK, 1)


def test_autograd_grad_leaves_everything_alone():
    model = wrap(net(), "oktopk")
    loss(model, RANK, 0).backward()
    before = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    torch.autograd.grad(loss(model, RANK, 1), list(before))
    for p, gradient in before.items():
        assert torch.equal(p.grad, gradient)


def test_checkpointed_activations():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = wrap(net(), "dense")
        inner = model.module

        def out(x, inner=inner, reentrant=reentrant):
            hidden = checkpoint(inner.first, x.requires_grad_(), use_reentrant=reentrant)
            return inner.last(inner.frozen(torch.tanh(hidden)))

        for _ in range(2):
            model.zero_grad()
            x, y = batch(RANK, 0)
            F.cross_entropy(out(x), y).backward()
        alone = copy.deepcopy(inner)
        for p in alone.parameters():
            p.grad = None
        for rank in range(SIZE):
            x, y = batch(rank, 0)
            hidden = torch.tanh(alone.first(x))
            (F.cross_entropy(alone.last(alone.frozen(hidden)), y) / SIZE).backward()
        for name in ("first", "last"):
            torch.testing.assert_close(getattr(inner, name).weight.grad, getattr(alone, name).weight.grad)


@pytest.mark.parametrize("name", SPARSE)
def test_lag_adamw_gets_what_was_delivered(name):
    """The same step from the reducer's indexes as from the gradient alone, where zero means not delivered."""
    models = [wrap(net(), name) for _ in range(2)]
    optimizers = [okrt.LagAdamW(model.parameters(), lr=0.1, balance=0) for model in models]
    for step in range(4):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, RANK, step).backward()
            if i:
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad.clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert_same_on_all_ranks(models[0].parameters())


def test_the_wrapped_model_is_dropped():
    """No warning and no thread is left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrap(net(), "dense")
        loss(model, RANK, 0).backward()
        thread = model._courier._thread
        del model
        import gc

        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("dense_steps", [0, 2])
def test_balanced_deliveries_lose_nothing(dense_steps):
    """Residuals hold weighted gradients: over the weights they are what was not delivered. All ranks weigh alike."""
    model = wrap(net(), "oktopk", dense_steps=dense_steps)
    optimizer = okrt.LagAdamW(model.parameters(), lr=0.01, balance=0.5)
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    given, got = ({p: torch.zeros(p.shape, dtype=torch.float64) for p in parameters} for _ in range(2))
    for step in range(8):
        expected = mean_gradients(model.module, step)
        optimizer.zero_grad()
        loss(model, RANK, step).backward()
        for key, p in model.module.named_parameters():
            if expected[key] is not None:
                given[p] += expected[key]
            if p.grad is not None:
                got[p] += p.grad
        optimizer.step()
        assert_same_on_all_ranks(parameters)
    (bucket,) = model._buckets
    assert_same_on_all_ranks([bucket.weights])
    assert len(np.unique(bucket.weights.numpy())) > 10
    kept = COMM.allreduce(bucket.reducer.residual.astype(np.float64) / bucket.weights.numpy()) / SIZE
    for slot in bucket.slots:
        got[slot.parameter] += torch.from_numpy(kept[slot.start : slot.stop]).view(slot.view.shape)
    for p in parameters:
        torch.testing.assert_close(got[p], given[p], rtol=1e-4, atol=1e-6)


def test_balance_lets_small_gradients_through():
    """Two layers, one with a hundredth of the other's gradient: by magnitude it hardly gets a turn."""
    turns = {}
    for balance in (0.0, 1.0):
        torch.manual_seed(0)
        small, large = nn.Parameter(torch.zeros(500)), nn.Parameter(torch.zeros(500))
        module = nn.ParameterList([small, large])
        model = okrt.DataParallel(module, density=0.02, dense_steps=2)
        optimizer = okrt.LagAdamW(model.parameters(), lr=0.01, balance=balance, betas=(0.9, 0.99))
        turns[balance] = 0
        for step in range(40):
            noise = torch.randn(2, 500, generator=torch.Generator().manual_seed(100 * step + RANK))
            optimizer.zero_grad()
            (0.01 * small @ noise[0] + large @ noise[1]).backward()
            optimizer.step()
            turns[balance] += 0 if step < 2 else int(torch.count_nonzero(small.grad))
        assert_same_on_all_ranks([small, large])
    assert turns[0.0] < 40
    assert turns[1.0] > 100
