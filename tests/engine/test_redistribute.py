"""Residuals for another number of ranks."""

from typing import Any

import numpy as np
import pytest

from okrt.engine.redistribute import redistributed

LENGTHS = (5, 300)


def state(rank: int, with_residual: bool = True) -> dict[str, Any]:
    random = np.random.default_rng(rank)
    reducers = [
        {"reducer": "oktopk", "steps": 7, "selector.last": 0.5 + rank}
        | ({"residual": random.standard_normal(length, dtype=np.float32)} if with_residual else {})
        for length in LENGTHS
    ]
    return {"buckets": [{"parameters": [f"p{i}"], "reducer": reducer} for i, reducer in enumerate(reducers)]}


def residuals(states: list[dict[str, Any]], bucket: int) -> np.ndarray:
    return np.sum([s["buckets"][bucket]["reducer"]["residual"] for s in states], axis=0, dtype=np.float64)


@pytest.mark.parametrize("old", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 9])
def test_the_sum_is_kept(old: int, new: int) -> None:
    """Each rank takes every new-th of the old ones, as the training loop has it."""
    before = [state(rank) for rank in range(old)]
    after = [redistributed(before[rank % old], before[rank::new]) for rank in range(new)]
    for bucket in range(len(LENGTHS)):
        np.testing.assert_allclose(residuals(after, bucket), residuals(before, bucket), rtol=0, atol=1e-5)
    assert all(s["buckets"][0]["reducer"]["residual"].dtype == np.float32 for s in after)


def test_all_else_is_that_of_the_pattern() -> None:
    before = [state(rank) for rank in range(4)]
    after = redistributed(before[1], before[1::2])
    assert [bucket["parameters"] for bucket in after["buckets"]] == [["p0"], ["p1"]]
    assert [bucket["reducer"]["selector.last"] for bucket in after["buckets"]] == [1.5, 1.5]
    for rank, old in enumerate(before):
        for mine, fresh in zip(old["buckets"], state(rank)["buckets"], strict=True):
            np.testing.assert_array_equal(mine["reducer"]["residual"], fresh["reducer"]["residual"])


def test_exact_reducers_have_none() -> None:
    before = [state(rank, with_residual=False) for rank in range(2)]
    assert redistributed(before[0], before) == before[0]
