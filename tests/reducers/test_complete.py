"""Complete deliveries: what is delivered of a coordinate is the whole mean, and no rank keeps any of it."""

import numpy as np
import pytest

import okrt
from okrt.errors import UsageError
from tests.laws import LAWS, SPARSE, check_bound, check_conservation, check_identical, run, wide

ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-10, "torch.bfloat16": 2.0**-7}


def check_complete(ranks, dtype="float32"):
    """NumPy's mean of gradients and old residuals where something was delivered; nothing is left there but rounding."""
    delivered = np.flatnonzero(wide(ranks[0].result))
    given = np.array([(wide(r.gradient) + r.before)[delivered] for r in ranks])
    allowed = ROUNDING[dtype] * np.abs(given).sum(axis=0) + 1e-7
    assert (np.abs(wide(ranks[0].result)[delivered] - given.mean(axis=0)) <= allowed).all()
    left = np.abs([r.after[delivered] for r in ranks])
    assert (left.max(axis=0) <= (0 if dtype == "float32" else len(ranks) * allowed)).all()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, "float32") for size in (1, 2, 3, 4, 7)),
        *((2, "float16"), (7, "float16")),
        *((1, "torch.bfloat16"), (3, "torch.bfloat16")),
    ],
)
@pytest.mark.parametrize("name", SPARSE)
def test_the_whole_mean_is_delivered(name, size, dtype):
    for law, n, density in (("correlated", 3000, 0.02), ("normal", 999, 0.1), ("single", 7, 0.5), ("normal", 50, 1.0)):
        for ranks in run(name, law, n=n, size=size, steps=5, density=density, dtype=dtype, complete=True):
            check_complete(ranks, dtype)
            check_conservation(ranks)
            check_identical(ranks)


def test_without_it_ranks_keep_their_part():
    ranks = run("oktopk", "normal", n=3000, size=4, steps=5, density=0.02)[-1]
    with pytest.raises(AssertionError):
        check_complete(ranks)


@pytest.mark.parametrize(("k", "size"), [*((k, size) for k in (1, 100) for size in (2, 3, 4, 8)), (2000, 3)])
@pytest.mark.parametrize("law", LAWS)
def test_bound_of_oktopk_on_every_step(law, size, k):
    n = 20 * k + 3
    for ranks in run("oktopk", law, n=n, size=size, steps=7, density=k / n, complete=True):
        check_bound(ranks)
        check_conservation(ranks)
        check_identical(ranks)
        check_complete(ranks)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_words_of_oktopk_on_steady_gradients(size):
    k = 1000
    steps = run("oktopk", "correlated", n=100_000, size=size, steps=40, density=0.01, complete=True)
    for rank in range(size):
        received = [ranks[rank].stats.words_received for ranks in steps[3:]]
        assert np.median(received) <= 5.4 * k * (size - 1) / size
        assert all(0.95 * k <= ranks[rank].stats.selected_global <= k for ranks in steps[3:])


@pytest.mark.parametrize("complete", [1, "yes", None])
def test_bad_value(complete):
    with pytest.raises(UsageError, match=f"complete is {complete!r}.*True or False"):
        okrt.reducer("topka", complete=complete)
