"""Which entries to send."""

from okrt.select.base import Selection, Selector
from okrt.select.exact import Exact
from okrt.select.gaussian import Gaussian
from okrt.select.reuse import Reuse

SELECTORS: dict[str, type[Selector]] = {"exact": Exact, "gaussian": Gaussian, "reuse": Reuse}

__all__ = ["SELECTORS", "Selection", "Selector"]
