"""The state of reducers for another number of ranks: residuals move so that their sum is kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def redistributed(pattern: dict[str, Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state `pattern` of one old rank, with the sum of the residuals of `states` (none: zeros) for its own."""
    buckets = []
    for place, bucket in enumerate(pattern["buckets"]):
        reducer = dict(bucket["reducer"])
        if "residual" in reducer:
            reducer["residual"] = np.zeros_like(reducer["residual"])
            for state in states:
                reducer["residual"] += state["buckets"][place]["reducer"]["residual"]
        buckets.append(bucket | {"reducer": reducer})
    return {"buckets": buckets}
