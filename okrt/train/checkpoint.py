"""Checkpoints: complete and intact, or not taken."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from okrt.errors import UsageError
from okrt.train.tree import TensorFile, flatten, plain_json, read, sha256_of, unflatten
from okrt.transport import Transport
from okrt.world import agree

SCHEMA_VERSION = 1
MODEL, MANIFEST = "model.safetensors", "manifest.json"
MANIFEST_BYTES_PER_FILE = 200  # at most
BLOCK_BYTES = 4096
# A checkpoint; one that the new one of the same step is about to replace; one that is being written or removed.
CHECKPOINT, REPLACED, UNFINISHED = r"step_\d{8,}", r"step_\d{8,}\.old", r"step_\d{8,}\.tmp"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found intact."""

    path: Path
    step: int
    ranks: int
    shared: dict[str, Any]

    def model(self) -> dict[str, torch.Tensor]:
        return read(self.path / MODEL)[0]

    def own(self, rank: int) -> Any:
        """What `rank` gave as its `own`: same types, same bits; tensors are on the CPU."""
        tensors, metadata = read(self.path / _rank_file(rank))
        return unflatten(json.loads(metadata["tree"]), tensors)


class Checkpoints:
    """The checkpoints of a job in one folder that all ranks see."""

    def __init__(self, folder: Path, transport: Transport, keep: int = 2, log: Callable[[str], None] = print) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint is to be kept")
        self._folder = Path(folder)
        self._transport = transport
        self._keep = keep
        self._log = log if transport.rank == 0 else lambda line: None

    def save(
        self, step: int, model: Mapping[str, torch.Tensor], own: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> bool:
        """Collective: writes folder/step_00000120/ and removes all but the newest `keep`; `model` and `shared` (plain
        JSON) are those of rank 0, `own` is each rank's: a tree of dicts, lists, tuples, arrays and scalars.

        False on all ranks if one cannot write: the log says who and why, and the older ones are as they were.
        What cannot be kept in a checkpoint is a UsageError on all ranks.
        """
        files: dict[str, TensorFile] = {}
        refusal = None
        size = 0
        try:
            plain, arrays = flatten(own)
            files[_rank_file(self._transport.rank)] = TensorFile(arrays, {"tree": json.dumps(plain)})
            if self._transport.rank == 0:
                files[MODEL] = TensorFile(model, {"format": "pt"})
                size += len(plain_json(shared)) + MANIFEST_BYTES_PER_FILE * (2 + self._transport.size)
        except UsageError as error:
            refusal = error
        agree(self._transport, {"checkpoint of step": step, "checkpoint folder": self._folder}, refusal, False)
        size += sum(file.size + BLOCK_BYTES for file in files.values())
        needed = np.array([size], np.int64)
        self._transport.allreduce(needed, "sum")

        unfinished = self._folder / f"step_{step:08d}.tmp"

        def write() -> dict[str, Any]:
            return {name: {"size": file.size, "sha256": file.write(unfinished / name)} for name, file in files.items()}

        if self._all_do(step, lambda: self._make_room(unfinished, int(needed[0]))) is None:
            return False
        written = self._all_do(step, write)
        if written is None:
            return False
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "ranks": self._transport.size,
            "shared": shared,
            "files": {name: figures for of_rank in written for name, figures in of_rank.items()},
        }
        if self._all_do(step, lambda: self._publish(unfinished, manifest)) is None:
            return False
        _, complaints = self._gather(lambda: self._remove_old(step))
        if complaints:
            self._log(f"old checkpoints in {self._folder} could not be removed: {'; '.join(complaints)}")
        return True

    def newest(self) -> Saved | None:
        """Collective: the newest complete and intact one; each one passed over is named in the log with the reason.

        OSError on all ranks if the folder is there but cannot be listed.
        """
        lists, complaints = self._gather(lambda: [path.name for path in self._list()])
        if complaints:
            raise OSError(f"no checkpoint can be looked for in {self._folder}: {'; '.join(complaints)}")
        for name in lists[0]:
            path = self._folder / name
            found, complaints = self._gather(functools.partial(self._verify_share, path))
            if not complaints:
                return Saved(path, **found[0])
            self._log(f"checkpoint {path} is passed over: {'; '.join(complaints)}")
        return None

    def _gather(self, work: Callable[[], Any]) -> tuple[list[Any], list[str]]:
        """Does the work and returns what it gave on every rank (plain JSON), and what went wrong where."""
        result, complaint = None, ""
        try:
            result = work()
        except Exception as error:  # of whatever kind: the other ranks wait
            complaint = f"{type(error).__name__}: {error}"
        replies = [json.loads(text) for text in self._transport.gather_texts(json.dumps([result, complaint]))]
        who: dict[str, list[int]] = {}
        for rank, (_, complaint) in enumerate(replies):
            who.setdefault(complaint, []).append(rank)
        complaints = [
            f"rank {', '.join(map(str, ranks))}: {complaint}" for complaint, ranks in who.items() if complaint
        ]
        return [result for result, _ in replies], complaints

    def _all_do(self, step: int, work: Callable[[], Any]) -> list[Any] | None:
        """What the work gave on every rank; None if it failed on any, which is logged and cleared away."""
        results, complaints = self._gather(work)
        if not complaints:
            return results
        if self._transport.rank == 0:
            with contextlib.suppress(OSError):  # the next save tries again, and says so
                self._clear_away()
        self._log(
            f"checkpoint of step {step} not saved in {self._folder}: {'; '.join(complaints)}; "
            "older checkpoints are as they were"
        )
        return None

    def _make_room(self, unfinished: Path, needed: int) -> None:
        if self._transport.rank:
            return
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            _sync(self._folder.parent)
        self._clear_away()
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise OSError(f"{needed - free:,} bytes are missing: {needed:,} are needed, {free:,} are free")
        unfinished.mkdir()

    def _publish(self, unfinished: Path, manifest: dict[str, Any]) -> None:
        if self._transport.rank:
            return
        with open(unfinished / MANIFEST, "x") as file:
            file.write(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        path = unfinished.with_suffix("")
        if path.exists():
            path.rename(path.with_suffix(".old"))
        unfinished.rename(path)
        _sync(self._folder)

    def _list(self) -> list[Path]:
        """All that may be checkpoints, newest first; nothing on ranks other than 0."""
        if self._transport.rank:
            return []
        with contextlib.suppress(FileNotFoundError):
            named = self._named(f"{CHECKPOINT}|{REPLACED}")
            return sorted(named, key=lambda path: (_step_of(path), not path.suffix), reverse=True)
        return []

    def _named(self, pattern: str) -> list[Path]:
        return [path for path in self._folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_dir()]

    def _clear_away(self) -> None:
        """Removes what an interrupted save left, and puts back what it was about to replace."""
        for path in self._named(UNFINISHED):
            shutil.rmtree(path)
        for path in self._named(REPLACED):
            if path.with_suffix("").exists():
                shutil.rmtree(path)
            else:
                path.rename(path.with_suffix(""))

    def _remove_old(self, step: int) -> None:
        """Those after `step` are left alone: the job went back behind them, so they were passed over."""
        if self._transport.rank:
            return
        self._clear_away()
        complete = 0
        for path in self._list():
            if complete == self._keep:
                # Under another name first: what is half removed does not look like a checkpoint.
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))
            elif _step_of(path) <= step and _is_complete(path):
                complete += 1

    def _verify_share(self, path: Path) -> dict[str, Any]:
        """Step, ranks and shared, if this rank's part of the files is intact."""
        manifest = _read_manifest(path)
        files = manifest["files"]
        # The model last: so each rank reads the file that it is about to load.
        for name in sorted(files, key=lambda name: (name == MODEL, name))[self._transport.rank :: self._transport.size]:
            size = (path / name).stat().st_size
            if size != files[name]["size"]:
                raise Damaged(f"{name} has {size:,} bytes, not {files[name]['size']:,}")
            if sha256_of(path / name) != files[name]["sha256"]:
                raise Damaged(f"{name} is not as it was written: its sha256 is another one")
        return {name: manifest[name] for name in ("step", "ranks", "shared")}


class Damaged(Exception):
    """A checkpoint is not as it was written."""


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, known to be as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise Damaged(f"{MANIFEST} holds a {type(manifest).__name__}, not an object")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise Damaged(f"{MANIFEST} has schema_version {version!r:.50}; this okrt reads {SCHEMA_VERSION}")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise Damaged(f"{MANIFEST} is not as it was written: its sha256 is another one")
    if manifest["step"] != _step_of(path):
        raise Damaged(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def _is_complete(path: Path) -> bool:
    try:
        files = _read_manifest(path)["files"]
        return all((path / name).stat().st_size == files[name]["size"] for name in files)
    except (OSError, Damaged):
        return False
