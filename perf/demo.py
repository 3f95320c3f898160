"""Dense and Ok-Topk side by side: trains gpt_bytes with each, then shows a table and a picture of both.

python -m okrt.perf.demo [--ranks 4] [--steps 400] [--out runs/demo] [--lab RATE] [--set KEY=VALUE]…
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich import box
from rich.console import Console
from rich.table import Table

from okrt.errors import EX_USAGE

JOB = "gpt_bytes"
# What each run changes in the job.
RUNS = {
    "dense": ("reducer.name=dense", "optimizer.name=adamw", "optimizer.betas=[0.9, 0.95]"),
    "oktopk": ("reducer.name=oktopk",),
}
OWN_KEYS = ("steps", "reducer.name", "optimizer.name")
STEPS = 400
EVALUATIONS = 20
RATES = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9}
# Blue and vermilion: told apart by the colour-blind too.
COLOURS = {"dense": "#0072B2", "oktopk": "#D55E00"}
INK = "#444444"


@dataclass(frozen=True)
class Curve:
    """Held-out loss over what it took."""

    step: np.ndarray
    received_mb: np.ndarray
    loss: np.ndarray


@dataclass(frozen=True)
class Result:
    """A run in numbers; bytes are those that the rank with the most received."""

    steps: int
    exact_steps: int
    """at the start, in which a sparse reducer sends everything; all of them for dense"""
    loss: float
    """held out, at the end"""
    received_bytes: float
    step_s: float
    """median, of the slowest rank"""
    words_over_k: tuple[float, float] | None
    """median and largest of the steps that are not exact, if there are any"""
    ranks: int

    @property
    def bytes_a_step(self) -> float:
        return self.received_bytes / self.steps

    @property
    def bound(self) -> float:
        return 6 * (self.ranks - 1) / self.ranks


def train(name: str, folder: Path, ranks: int, lab: str | None, settings: list[str]) -> int:
    """Runs okrt train in this terminal, in place of an older run there; its exit code."""
    if (folder / "run.h5").exists():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "run.h5").unlink()
    command = [sys.executable, "-m", "okrt", "train", JOB, "--ranks", str(ranks), "--out", str(folder)]
    command += [f"--set={setting}" for setting in (*settings, *RUNS[name])]
    with subprocess.Popen([*command, *(["--lab", lab] if lab else [])]) as training:
        # Ctrl-C reaches the run by itself; either way the demo ends after it, and leaves nothing behind.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: training.terminate()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            code = training.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def read(folder: Path) -> tuple[Result, Curve]:
    """What run.h5 says."""
    with h5py.File(folder / "run.h5") as file:
        columns = {name: column[()] for name, column in file["steps"].items()}
        reducer = json.loads(file.attrs["config"])["reducer"]
        ranks = file["ranks/rank"].size
    steps = columns["step"].size
    exact_steps = steps if reducer["name"] == "dense" else min(steps, reducer["dense_steps"])
    evaluated = np.flatnonzero(np.isfinite(columns["eval_loss"]))
    words = columns["words_over_k"][exact_steps:]
    result = Result(
        steps=steps,
        exact_steps=exact_steps,
        loss=float(columns["eval_loss"][evaluated[-1]]),
        received_bytes=float(columns["bytes_received"].sum()),
        step_s=float(np.median(columns["step_s"])),
        words_over_k=(float(np.median(words)), float(words.max())) if words.size else None,
        ranks=ranks,
    )
    received_mb = np.cumsum(columns["bytes_received"]) / 1e6
    return result, Curve(columns["step"][evaluated], received_mb[evaluated], columns["eval_loss"][evaluated])


def short(figure: float) -> str:
    """Three digits, and no exponent."""
    return np.format_float_positional(figure, 3, unique=False, fractional=False, trim="-")


def table(results: dict[str, Result]) -> Table:
    dense, oktopk = results["dense"], results["oktopk"]
    exact = f", after {oktopk.exact_steps} exact steps" if oktopk.exact_steps else ""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for name in results:
        shown.add_column(name, justify="right", no_wrap=True, style="bold" if name == "oktopk" else "")

    def row(what: str, figure: Callable[[Result], str]) -> None:
        shown.add_row(what, *map(figure, results.values()))

    def words(result: Result, which: int) -> str:
        return "–" if result.words_over_k is None else f"{result.words_over_k[which]:.2f}"  # noqa: RUF001

    row("held-out loss at the end", lambda result: f"{result.loss:.4f}")
    row("MB received by a rank", lambda result: short(result.received_bytes / 1e6))
    row("MB received a step, mean", lambda result: short(result.bytes_a_step / 1e6))
    row("times fewer than dense", lambda result: f"{dense.received_bytes / result.received_bytes:.1f}")
    row(f"words/k a step, median{exact}", lambda result: words(result, 0))
    row(f"words/k a step, max; the bound 6(P-1)/P is {oktopk.bound:.2f}", lambda result: words(result, 1))
    row("ms a step, median, measured here", lambda result: short(1e3 * result.step_s))
    for name, rate in RATES.items():
        wire_ms = [short(8e3 * result.bytes_a_step / rate) for result in results.values()]
        shown.add_row(f"ms a step on a wire of {name}, by arithmetic *", *wire_ms)
    shown.caption = "* the bytes a step × 8 / rate, without compute or latency"
    shown.caption_justify = "left"
    return shown


def comparison(dense: Result, oktopk: Result) -> tuple[str, str]:
    """Bytes and loss of oktopk, as the beginnings of "than dense" and "dense"."""
    fewer = dense.received_bytes / oktopk.received_bytes
    percent = 100 * (oktopk.loss / dense.loss - 1)
    loss = f"a held-out loss {abs(percent):.1f} % {'above' if percent > 0 else 'below'} that of"
    if f"{abs(percent):.1f}" == "0.0":
        loss = "the same held-out loss as"
    return f"{fewer:.1f} times fewer bytes" if fewer >= 1.05 else "no fewer bytes", loss


def verdict(dense: Result, oktopk: Result, lab: str | None) -> str:
    """What was seen, in plain words."""
    fewer, loss = comparison(dense, oktopk)
    text = f"After {oktopk.steps} steps, one run each, oktopk had received {fewer} than dense and had {loss} dense."
    if oktopk.words_over_k is None:
        text += " All its steps were exact: with more steps, or a smaller reducer.dense_steps, it would send less."
    else:
        most = oktopk.words_over_k[1]
        within = "within" if most <= oktopk.bound else "above"
        text += f" It received at most {most:.2f} words/k in a step, {within} the bound of {oktopk.bound:.2f}."
    return f"{text} {time_verdict(dense, oktopk, lab)}"


def time_verdict(dense: Result, oktopk: Result, lab: str | None) -> str:
    slower = oktopk.step_s / dense.step_s
    where = f"at {lab} between the ranks" if lab else "on this machine"
    if 0.95 < slower < 1.05:
        text = f"A step took as long as with dense {where}."
    elif slower > 1:
        text = f"A step took {slower:.2f} times as long as with dense {where}."
    else:
        text = f"A step was {1 / slower:.2f} times faster than with dense {where}."
    if lab:
        return text
    text += " There is no network here: the ranks pass bytes through shared memory, where they cost next to nothing."
    extra_s = oktopk.step_s - dense.step_s
    saved_bytes = dense.bytes_a_step - oktopk.bytes_a_step
    if slower < 1.05 or saved_bytes <= 0:
        return text
    return (
        f"{text} So the work of choosing which to send has nothing to set against it: {1e3 * extra_s:.0f} ms more a "
        "step. The bytes saved would make up for these on networks slower than about "
        f"{rate_text(saved_bytes * 8 / extra_s)}: arithmetic, not measured, and without overlap."
    )


def rate_text(bits_a_second: float) -> str:
    return f"{short(bits_a_second / 1e9)} Gbit/s" if bits_a_second >= 1e9 else f"{short(bits_a_second / 1e6)} Mbit/s"


def draw(results: dict[str, Result], curves: dict[str, Curve], folder: Path) -> list[Path]:
    """Both curves over steps and over megabytes, as demo.png and demo.svg."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2, sharey=True)
    fewer, loss = comparison(results["dense"], results["oktopk"])
    title = f"{JOB} on {results['dense'].ranks} ranks: oktopk receives {fewer} than dense,\nand ends with {loss} dense"
    figure.suptitle(title, fontsize=13)
    above = max(results, key=lambda name: results[name].loss)
    for axes, column in ((over_steps, "step"), (over_bytes, "received_mb")):
        for name, curve in curves.items():
            x, style = getattr(curve, column), {"lw": 4, "alpha": 0.55} if name == "dense" else {"lw": 1.8}
            axes.plot(x, curve.loss, color=COLOURS[name], solid_capstyle="round", **style)
            axes.plot(x[-1], curve.loss[-1], "o", color=COLOURS[name], ms=6)
            axes.annotate(
                f"{name} {curve.loss[-1]:.3f}",
                (x[-1], curve.loss[-1]),
                xytext=(8, 7 if name == above else -7),
                textcoords="offset points",
                va="center",
                color=COLOURS[name],
                fontweight="bold",
                annotation_clip=False,
            )
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", lw=0.8)
        axes.tick_params(colors=INK, length=3)
    over_steps.set_xlim(0, None)
    over_steps.set_ylabel("held-out loss", color=INK)
    over_steps.set_xlabel("steps", color=INK)
    over_bytes.set_xscale("log")
    over_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    over_bytes.xaxis.set_major_formatter("{x:g}")
    over_bytes.xaxis.set_minor_locator(NullLocator())
    over_bytes.set_xlabel("megabytes received by a rank (logarithmic)", color=INK)
    files = [folder / "demo.png", folder / "demo.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    few = f"of each run (default: {STEPS}, some 3.5 minutes for both runs on 4 ranks and two cores)"
    parser.add_argument("--steps", type=int, default=STEPS, help=few)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="its runs dense and oktopk are replaced")
    parser.add_argument("--lab", metavar="RATE", help="one host per rank at this rate, such as 100mbit; needs root")
    parser.add_argument(
        "--set", dest="settings", metavar="KEY=VALUE", action="append", default=[], help="for both runs"
    )
    given = parser.parse_args(arguments)
    if given.ranks < 2:
        parser.exit(EX_USAGE, f"--ranks is {given.ranks}: the demo needs two that send to each other, or more\n")
    for setting in given.settings:
        if (key := setting.partition("=")[0].strip()) in OWN_KEYS:
            parser.exit(EX_USAGE, f"--set {setting}: the demo sets {key} itself (--steps gives the steps)\n")
    settings = [f"eval_every={max(1, given.steps // EVALUATIONS)}", *given.settings, f"steps={given.steps}"]
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    for at, name in enumerate(RUNS, 1):
        console.print(f"[bold]{at} of {len(RUNS)}: {name}[/bold]")
        sys.stdout.flush()
        code = train(name, given.out / name, given.ranks, given.lab, settings)
        if code:
            print(f"the {name} run ended with exit code {code}: no table, no picture", file=sys.stderr)
            return code
    both = {name: read(given.out / name) for name in RUNS}
    results = {name: result for name, (result, _) in both.items()}
    files = draw(results, {name: curve for name, (_, curve) in both.items()}, given.out)
    console.print(table(results))
    console.print(f"{verdict(results['dense'], results['oktopk'], given.lab)}\n")
    console.print(f"Picture: {' and '.join(map(str, files))}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
