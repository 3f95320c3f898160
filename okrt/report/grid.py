"""The grid of a sweep as a reader sees it: what varies, what is the same throughout, and what to call it."""

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from okrt.report.sweep_file import DONE, Sweep

EXACT = ("dense", "gloo")
"""reducers without a density: one point stands for all densities"""
MOST_PANELS = 6
UNIT_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}

Setting = dict[str, Any]


class Grid:
    """The points of a sweep by their settings. In weak scaling `elements` is that of one rank: it stays."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.config: dict[str, Any] = json.loads(sweep.attributes.get("config", "{}"))
        self.weak = self.config.get("scaling") == "weak"
        self.is_job = "elements" not in sweep.settings
        columns = [sweep.points[name].tolist() for name in sweep.settings]
        self.points: list[Setting] = [dict(zip(sweep.settings, row, strict=True)) for row in zip(*columns, strict=True)]
        if self.weak and not self.is_job:
            for point in self.points:
                point["elements"] //= point["ranks"]
        self.done = sweep.numbers(DONE)
        self.reducers = list(dict.fromkeys(point["reducer"] for point in self.points))
        names = [name for name in sweep.settings if name not in ("ranks", "reducer")]
        self.varied = [name for name in names if len(self.values(name)) > 1]
        """other than ranks and reducer"""
        self.fixed: Setting = {name: self.values(name)[0] for name in names if len(self.values(name)) == 1}

    def values(self, name: str, numbers: Iterable[int] | None = None) -> list[Any]:
        """Those that occur, in order; numbers and network rates by size, others as in the spec."""
        chosen = self.points if numbers is None else [self.points[number] for number in numbers]
        found = list(dict.fromkeys(p[name] for p in chosen if name != "density" or p["reducer"] not in EXACT))
        if name == "lab":
            return sorted(found, key=lambda rate: bits_per_s(rate) or np.inf)
        return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found

    def select(self, **setting: Any) -> list[int]:
        """Measured points with these settings; exact reducers are there at every density."""
        return [
            number
            for number in self.done
            if all(
                self.points[number][name] == value or (name == "density" and self.points[number]["reducer"] in EXACT)
                for name, value in setting.items()
            )
        ]

    def panels(self, x: str) -> tuple[list[Setting], str]:
        """Settings of the small multiples of a plot over x, and a note on what had to be left out of it."""
        chosen = {name: self.values(name, self.done) or self.values(name) for name in self.varied if name != x}
        notes = []
        if x != "ranks" and len(ranks := self.values("ranks", self.done)) > 1:
            # The most of those at which most can be seen: a sweep may be unfinished.
            counts = [len(self.values(x, self.select(ranks=count))) for count in ranks]
            chosen["ranks"] = [max(zip(counts, ranks, strict=True))[1]]
            notes.append(label("ranks", chosen["ranks"][0]))
        for name in reversed(self.varied):
            if np.prod([len(values) for values in chosen.values()]) <= MOST_PANELS:
                break
            if name in chosen:
                counts = [len(self.select(**{name: value})) for value in chosen[name]]
                chosen[name] = [chosen[name][int(np.argmax(counts))]]
                notes.append(label(name, chosen[name][0]))
        panels = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
        note = f"Shown at {', '.join(notes)}; the table has the others." if notes else ""
        return [panel for panel in panels if self.select(**panel)], note

    def title_of(self, panel: Setting, panels: list[Setting]) -> str:
        """What sets this panel apart from the others."""
        return ", ".join(label(name, value) for name, value in panel.items() if any(p[name] != value for p in panels))

    def subtitle(self, panels: list[Setting] | None = None) -> str:
        """What is the same in all points, and in all of these panels."""
        told = {name: value for name, value in self.fixed.items() if name != "lab" or value}
        if len(ranks := self.values("ranks")) == 1:
            told = {"ranks": ranks[0]} | told
        parts = [self.label(name, value) for name, value in told.items()]
        if self.is_job:
            parts.insert(0, str(self.config.get("job") or "a job"))
        if len(ranks) > 1:
            parts.append("weak scaling" if self.weak else "strong scaling")
        common = {
            name: value for name, value in (panels or [{}])[0].items() if all(p[name] == value for p in panels or ())
        }
        only = [self.label(name, value) for name, value in common.items() if name not in told]
        return " · ".join(parts + ([f"only {', '.join(only)}"] if only else []))

    def label(self, name: str, value: Any) -> str:
        return label(name, value) + (" a rank" if name == "elements" and self.weak else "")

    def describe(self, number: int, *names: str) -> str:
        """A point in words, by what varies."""
        point = self.points[number]
        shown = [name for name in self.varied if not (name == "density" and point["reducer"] in EXACT)]
        return ", ".join(self.label(name, point[name]) for name in (*names, *shown))


def bits_per_s(rate: Any) -> float | None:
    """Of a rate such as 1gbit; None for no lab."""
    match = re.fullmatch(r"([\d.]+)([kmg])bit", str(rate))
    return float(match[1]) * UNIT_BITS[match[2]] if match else None


def label(name: str, value: Any) -> str:
    """A setting in words."""
    if name == "ranks":
        return "1 rank" if value == 1 else f"{value} ranks"
    if name == "elements":
        return f"{value:,} elements"
    if name == "density":
        return f"density {percent(value)}"
    if name == "lab":
        return f"{rate_text(value)} between the ranks" if value else "no lab"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def rate_text(rate: Any) -> str:
    bits = bits_per_s(rate)
    if bits is None:
        return str(rate) or "none"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
