"""Gaussiank: the exchange of TopkA with the threshold of a normal distribution. About 2k(P-1) words."""

from okrt.reducers.base import Cost
from okrt.reducers.topka import TopkA
from okrt.transport.ledger import log2_ceil


class GaussianK(TopkA):
    name = "gaussiank"
    default_selector = "gaussian"

    @staticmethod
    def cost(n: int, k: int, size: int) -> Cost:
        return Cost(2 * log2_ceil(size), 2.5 * k * (size - 1))

    def _cap(self, k: int) -> int:
        """The threshold is right when the count is in 3k/4 … 5k/4."""
        return k + k // 4
