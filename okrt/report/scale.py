"""The axis of a setting of a sweep."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from okrt.report import plots
from okrt.report.grid import Grid, bits_per_s, percent, rate_text


class Scale:
    """The axis of a setting: by size where it has one, else side by side."""

    def __init__(self, grid: Grid, name: str, numbers: Sequence[int]) -> None:
        self.values = grid.values(name, numbers)
        sizes: list[Any] = [bits_per_s(value) if name == "lab" else value for value in self.values]
        is_number = all(isinstance(size, (int, float)) for size in sizes)
        self.places = [float(size) for size in sizes] if is_number else [float(i) for i in range(len(sizes))]
        self.is_log = is_number and min(self.places) > 0 and max(self.places) >= 4 * min(self.places)
        self.title = {"lab": "network rate", "elements": "elements a rank" if grid.weak else name}.get(name, name)
        texts = {"density": percent, "lab": rate_text, "elements": count_text}
        self.labels = [texts.get(name, plain)(value) for value in self.values]

    def place(self, value: Any) -> float:
        return self.places[self.values.index(value)]

    def put_on(self, axes: Sequence[Axes], titled: Sequence[Axes]) -> None:
        plots.scale_x(axes, self.places, self.labels, self.is_log)
        for axis in titled:
            axis.set_xlabel(self.title)


def plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def count_text(count: int) -> str:
    """As short as it is exact."""
    for size, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= size and len(f"{count / size:g}") <= 5:
            return f"{count / size:g}{name}"
    return f"{count:,}"
