"""`okrt selftest`: as a user starts it, and with something broken."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import okrt
from okrt.cli.tally import Tally
from okrt.kernels import reference
from okrt.kernels.host import Host
from okrt.perf.kernel_checks import names
from okrt.perf.reducer_checks import check_reducer
from okrt.reducers import OkTopk
from tests.ranks import run_ranks

SMALL = ["selftest", "--device", "cpu", "--elements", "3000"]


def rows(out: str) -> dict[str, list[str]]:
    """Of the table, by their first words."""
    return {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(" ") and line.split()}


def check_passed(out: str, ranks: str) -> None:
    table = rows(out)
    bandwidths = []
    for name in names(Host):
        assert int(table[name][1]) >= 25 and table[name][2] == "ok"
        if name != "cuts":
            bandwidths.append(float(table[name][3]))
            assert re.fullmatch(r"\d+%", table[name][4])
    assert min(bandwidths) > 0 and float(table["copy"][1]) > 0
    for name in okrt.reducers():
        assert int(table[name][1]) >= 6 and table[name][2] == "ok"
    said = re.fullmatch(rf"selftest passed: (\d+) checks on {ranks}, cpu", out.splitlines()[-1])
    assert said, out
    assert int(said[1]) == sum(int(cells[1]) for cells in table.values() if cells[2:3] == ["ok"])


def test_one_rank(command: Callable) -> None:
    code, out, err = command(*SMALL)
    assert (code, err) == (0, "")
    check_passed(out, "1 rank")
    assert "ring not tried, it takes two ranks" in " ".join(out.split())


def test_ranks_that_it_starts(start: Callable) -> None:
    done = start("okrt", *SMALL, "--ranks", 3)
    assert (done.returncode, done.stderr) == (0, "")
    check_passed(done.stdout, "3 ranks")
    assert rows(done.stdout)["ring"][1:3] == ["6", "ok"]


def test_no_gpu_is_one_line_however_many_ranks(start: Callable) -> None:
    done = start("okrt", "selftest", "--device", "cuda", ranks=2, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (64, "")
    assert re.fullmatch(r"okrt: --device cuda: .*(no GPU can be used here|missing, pip install).*\n", done.stderr)


def test_no_cupy(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, out, err = command("selftest", "--device", "cuda")
    assert (code, out) == (64, "")
    assert re.fullmatch(r"okrt: --device cuda: .*cupy is missing, pip install 'okrt\[cuda12\]'.*\n", err)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "gpu"], "--device is gpu: choose cpu or cuda"),
        (["--elements", "0"], "--elements is 0: it must be at least 1"),
    ],
)
def test_options_that_cannot_be(command: Callable, options: list[str], said: str) -> None:
    assert command("selftest", *options) == (64, "", f"okrt: {said}\n")


def test_a_kernel_that_is_off_by_one(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Host.count
    monkeypatch.setattr(Host, "count", lambda self, values, threshold: right(self, values, threshold) + 1)
    code, out, err = command(*SMALL)
    assert (code, err) == (1, "")
    assert "count, rank 0: 81 of 81 checks, the first: 0 elements, normal, fp32: returned 1 instead of 0" in out
    assert "not tried, since what they need has failed: ring, reducers, bandwidth" in out
    assert out.splitlines()[-1] == "selftest failed: count (rank 0), counts (rank 0)"


def test_a_kernel_that_writes_the_wrong_element(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(dense: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
        reference.take(dense, index, out)
        if index.size > 700:
            dense.base[4 * dense.itemsize] = 0  # a byte before its beginning

    monkeypatch.setattr(Host, "take", staticmethod(take))
    code, out, _ = command(*SMALL)
    assert code == 1
    assert re.search(r"take, rank 0: 2 of 27 .* 3000 .*: array 0 is wrong at 1 elements, the first is -5", out)


def test_a_kernel_that_raises_and_one_that_has_no_case(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(Host, "mean", staticmethod(mean))
    monkeypatch.setattr(reference, "a_new_one", lambda x: x, raising=False)
    monkeypatch.setattr(Host, "a_new_one", lambda self, x: x, raising=False)
    code, out, err = command(*SMALL)
    assert (code, err) == (1, "")
    assert "the first: there is no case for it in okrt.perf.kernel_inputs" in out
    assert "mean, rank 0: 1 of 0 checks, the first: ZeroDivisionError: by zero" in out
    assert out.splitlines()[-1] == "selftest failed: a_new_one (rank 0), mean (rank 0)"


def tallies(monkeypatch: pytest.MonkeyPatch, broken: Callable) -> list[Tally]:
    """Of three ranks that try oktopk, whose result broken(reducer, result) changes."""
    right = OkTopk.allreduce
    monkeypatch.setattr(OkTopk, "allreduce", lambda self, x: broken(self, right(self, x)))

    def body(transport):
        tally = Tally(transport, Progress(disable=True))
        tally.add("dense", check_reducer("dense", transport, Host(), 500), is_collective=True)
        tally.add("oktopk", check_reducer("oktopk", transport, Host(), 500), is_collective=True)
        return tally

    return run_ranks(3, body)


def test_a_reducer_that_is_wrong_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(reducer, result):
        if reducer.transport.rank == 1 and reducer.density < 1:
            result[7] += np.float32(0.01)
        return result

    found = tallies(monkeypatch, broken)
    assert {tally.verdict() for tally in found} == {"selftest failed: oktopk (rank 1)"}
    found[0].show(Console(width=200), "")
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("oktopk, rank 1: 6 of 9")]
    assert "step 0: the result is not that of rank 0; the gradients are not what was delivered and" in told


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda r, y: y if r.density < 1 else y * np.float32(1.001), "the result is not that of dense"),
        (lambda r, y: vars(r.last).update(words_received=6000) or y, "6000 words received, at most 2088 allowed"),
        (lambda r, y: y if r.residual is None else r.residual.__imul__(0.5) is None or y, "what was kept"),
    ],
)
def test_what_a_reducer_may_break(monkeypatch: pytest.MonkeyPatch, breaks: Callable, said: str) -> None:
    (tally, *_) = tallies(monkeypatch, breaks)
    assert list(tally.failures) == ["oktopk"]
    assert said in tally.failures["oktopk"][0]


RAISES = """
from okrt.cli import main
from okrt.reducers import OkTopk

right = OkTopk._exchange

def exchange(self, selection, n):
    if self.transport.rank == 1:
        raise KeyError("gone")
    return right(self, selection, n)

OkTopk._exchange = exchange
main.main()
"""


def test_a_rank_that_raises_ends_the_job(start: Callable, tmp_path: Path) -> None:
    """The other one is in the middle of an exchange with it."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    done = start("python", script, *SMALL, ranks=2, limit_s=30)
    assert done.returncode == 1
    assert "SelftestFailure: selftest failed: oktopk (rank 1): KeyError: 'gone'" in done.stderr
