"""Which entries to send."""

from okrt.select.base import Selection, Selector
from okrt.select.exact import Exact
from okrt.select.gaussian import Gaussian
from okrt.select.reuse import Reuse
from okrt.select.sidco import Sidco, SidcoExponential, SidcoGamma, SidcoPareto

SELECTORS: dict[str, type[Selector]] = {
    "exact": Exact,
    "gaussian": Gaussian,
    "reuse": Reuse,
    "sidco": Sidco,
    "sidco-exponential": SidcoExponential,
    "sidco-gamma": SidcoGamma,
    "sidco-pareto": SidcoPareto,
}

__all__ = ["SELECTORS", "Selection", "Selector"]
