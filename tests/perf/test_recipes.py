"""Two recipes compared by their runs of the same seeds."""

from typing import Any

import pytest

from okrt.perf.recipes import paired, parse_seeds


def run(recipe: str, seed: int, loss: float, **other: Any) -> dict[str, Any]:
    return {"recipe": recipe, "seed": seed, "figures": {"loss": loss}, "settings": [], "lab": None} | other


def test_only_pairs_count() -> None:
    losses = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.1, 2.3, 3.2, 4.4]}
    rows = [run(name, seed, loss) for name, of in losses.items() for seed, loss in enumerate(of)]
    rows += [run("a", 7, 100.0), run("b", 8, 100.0), run("b", 0, 100.0, lab="1gbit"), run("c", 0, 100.0)]
    rows.append(run("b", 1, 100.0, settings=["steps=3"]))
    table = paired(rows, "a", "b")
    (cells,) = zip(*(column.cells for column in table.columns), strict=True)
    assert cells[:4] == ("loss", "4", "2.5000", "2.7500")
    # Differences of 0.1, 0.3, 0.2 and 0.4: their deviation is 0.1291, and with four of them 2.353 standard errors are
    # 90 %, 3.182 are 95 %.
    assert [float(cell) for cell in cells[4:6]] == pytest.approx([0.25, 0.06455], abs=1e-5)
    assert [float(end) for end in cells[6].split(" to ")] == pytest.approx([0.09811, 0.40189], abs=2e-4)
    assert [float(end) for end in cells[7].split(" to ")] == pytest.approx([0.04457, 0.45543], abs=2e-4)


@pytest.mark.parametrize("seeds", [[], [3]])
def test_one_pair_tells_nothing(seeds: list[int]) -> None:
    assert paired([run(name, seed, 1.0) for name in "ab" for seed in seeds], "a", "b").row_count == 0


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds("3,7-9,0") == [3, 7, 8, 9, 0]
