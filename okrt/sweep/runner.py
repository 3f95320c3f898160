"""Point after point: what is done is never done again, what fails is noted, what is interrupted is forgotten."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

import okrt
from okrt.errors import UsageError
from okrt.report import sweep_file
from okrt.report.sweep_file import FAILED, PENDING, Measured, Sweep
from okrt.sweep.lock import SweepLock
from okrt.sweep.spec import Spec
from okrt.train.config import load_job
from okrt.train.metrics import run_attributes
from okrt.train.stop import StopFlag

POLL_S = 0.05
GRACE_S = 15.0
"""for the ranks of a point to end when they are asked to"""
NOT_MEASURED = ("report", "slurm")
"""rooms whose code cannot change a measurement"""
ERROR = re.compile(r"(?:okrt: .+)|(?:[\w.]+(?:Error|Exception|Exit|Interrupt|Failure)\b.*)")


class Interrupted(Exception):
    """A signal asked the sweep to stop."""


@dataclass
class Runner:
    """Runs the points of a spec that are not done yet, and keeps them in a file."""

    spec: Spec
    path: Path
    command: str
    launcher: str | None
    """what starts ranks in place of mpiexec; not those of a lab"""
    stop: StopFlag

    @property
    def _prefix(self) -> str:
        """Of the folders that the ranks of a point leave their result in."""
        return f".{self.path.name}.point-"

    def tidy(self) -> None:
        """Removes what sweeps that were killed have left; only for one who works on the file alone."""
        for folder in self.path.parent.glob(f"{self._prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def open(self, lock: SweepLock, retry: Sequence[int] | None, mix_code: bool) -> Sweep:
        """The file as it is, or a new one. retry: of these points those that failed are to be measured again."""
        config = config_of(self.spec)
        with lock.updating():
            if not self.path.exists():
                attributes = run_attributes(self.command, config, self.spec.file.seed, [os.uname().nodename])
                sweep = sweep_file.new(self.spec.points, self.spec.phases, attributes | {"code": code_version()})
                sweep_file.write(self.path, sweep)
                return sweep
            sweep = sweep_file.read(self.path)
            self._check_same(sweep, config, mix_code)
            again = [number for number in retry or () if number in sweep.numbers(FAILED)]
            for number in again:
                sweep.forget(number)
            if again:
                sweep_file.write(self.path, sweep)
            return sweep

    def _check_same(self, sweep: Sweep, config: Mapping[str, Any], mix_code: bool) -> None:
        """What was measured before and what is to be measured now belong together."""
        before, now = flat(json.loads(sweep.attributes["config"])), flat(json.loads(json.dumps(config)))
        changed = [
            f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
            for key in dict.fromkeys([*before, *now])
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise UsageError(f"{self.path} is of another spec: {'; '.join(changed)}. Use another --out")
        codes = {str(code) for code in sweep.points["code"] if code} | {str(sweep.attributes["code"])}
        if not mix_code and codes != {code_version()}:
            raise UsageError(
                f"{self.path} was measured with other code (okrt {sweep.attributes['okrt_version']}, code "
                f"{', '.join(sorted(codes))}; this is okrt {okrt.__version__}, code {code_version()}): use another "
                "--out, or --mix-code to go on with it (each point tells its code)"
            )

    def run(self, number: int, lock: SweepLock) -> Sweep:
        """Measures a point and puts it into the file; Interrupted if a signal came before it was done."""
        code = code_version()  # that the point starts with, whatever is edited meanwhile
        outcome = self._measure(self.spec.points[number])
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with lock.updating():
            sweep = sweep_file.read(self.path)
            if isinstance(outcome, Measured):
                sweep.record(number, outcome, code, when)
            else:
                sweep.fail(number, outcome, code, when)
            sweep_file.write(self.path, sweep)
        return sweep

    def _measure(self, point: dict[str, Any]) -> Measured | str:
        """What came of it, or why nothing did."""
        # Beside the file: that is where all nodes can read and write.
        with tempfile.TemporaryDirectory(prefix=self._prefix, dir=self.path.parent) as folder:
            result = Path(folder, "result.json")
            with tempfile.TemporaryFile() as printed:
                reason = self._wait(self._start(point, result, printed))
                printed.seek(0)
                text = printed.read().decode(errors="replace")
            if reason or not result.exists():
                return f"{reason or 'no result'}: {complaint(text)}".removesuffix(": ")
            told = json.loads(result.read_text())
        samples = {name: np.array(values) for name, values in told.pop("samples").items()}
        return Measured(samples=samples, **told)

    def _start(self, point: dict[str, Any], result: Path, printed: Any) -> subprocess.Popen[bytes]:
        file = self.spec.file
        what: dict[str, Any] = {"repeat": file.repeat.model_dump(), "phases": self.spec.phases}
        if self.spec.job is None:
            what |= {name: point[name] for name in ("reducer", "elements", "density")} | {"seed": file.seed}
        else:
            what |= {"job": str(self.spec.job), "overrides": self.spec.overrides(point)}
        options = {"settings": json.dumps(what), "result": result, "ranks": point["ranks"], "parent": os.getpid()}
        if point["lab"]:
            options["lab"] = point["lab"]
        elif self.launcher:
            options["launcher"] = filling_nodes(self.launcher, point["ranks"])
        command = [sys.executable, "-m", "okrt", "point", *(f"--{name}={value}" for name, value in options.items())]
        # A session of its own: Ctrl-C reaches the sweep alone, which then ends the point in an orderly way.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Why it failed; empty if it did not."""
        limit_s = self.spec.file.repeat.timeout_s
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            if self.stop.raised:
                end(process)
                raise Interrupted
            if time.monotonic() > deadline:
                end(process)
                return f"not done after {limit_s:g} s"
            time.sleep(POLL_S)
        if self.stop.raised and process.returncode != 0:
            raise Interrupted  # the signal may have reached its ranks as well
        if process.returncode < 0:
            return f"ended by {signal.Signals(-process.returncode).name}"
        return f"exit code {process.returncode}" if process.returncode else ""


def filling_nodes(launcher: str, ranks: int) -> str:
    """srun would spread few ranks over all nodes of the allocation; here they fill one node after the other."""
    tasks = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if Path(launcher.split()[0]).name != "srun" or not tasks.isdigit():
        return launcher
    return f"{launcher} -N {-(-ranks // int(tasks))}"


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complaint(printed: str) -> str:
    """The line that tells most, of what launcher and ranks printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [found[0] for line in lines if (found := ERROR.search(line))]
    own = [line for line in telling if line.startswith("okrt: ")]
    return (own[:1] or telling[-1:] or lines[-1:] or [""])[0][:500]


def config_of(spec: Spec) -> dict[str, Any]:
    """All that a change of would make other points, or other measurements, of the same file."""
    config = spec.file.model_dump(mode="json")
    if spec.job is not None:
        module = load_job(spec.job)[1]
        config["job_sha256"] = digest([spec.job, Path(str(module.__file__))])
    return config


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Keys with dots."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, part in tree.items() for key, value in flat(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def code_version() -> str:
    """Tells two versions of the code apart, also where there is no git or where changes are not committed."""
    top = Path(okrt.__file__).parent
    files: list[Path] = []
    for folder, names, found in os.walk(top, followlinks=True):
        names[:] = sorted(name for name in names if name not in NOT_MEASURED)
        files += [Path(folder, name) for name in sorted(found) if name.endswith(".py")]
    return digest(files)


def digest(files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\n".encode() + file.read_bytes())
    return total.hexdigest()[:12]


def pending(sweep: Sweep, chosen: Sequence[int]) -> list[int]:
    """Those of the chosen points that are to be measured."""
    left = set(sweep.numbers(PENDING))
    return [number for number in chosen if number in left]
