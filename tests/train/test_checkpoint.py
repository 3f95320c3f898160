"""Checkpoints on real files, ranks in one process: exact, complete or not taken, never at the cost of an older one."""

import ast
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import okrt.train.checkpoint
import okrt.train.tree
from okrt.errors import PeerError, PlanMismatch, UsageError
from okrt.train.checkpoint import Checkpoints, Saved
from tests.ranks import run_ranks

INTEGERS = [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)]
NUMPY_DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64"]
TORCH_DTYPES = [*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SIZE = 3


def own_of(rank: int, mark: int = 0) -> dict[str, Any]:
    return {"residual": np.full(1000, 10 * mark + rank, np.float32), "threshold": 0.1 * rank, "moments": {0: (1, [2])}}


def save(folder: Path, step: int, size: int = SIZE, **options: Any) -> list[str]:
    """Saves with success on all ranks, `step` in the model and the rank in what is each rank's; returns the log."""
    log: list[str] = []

    def body(transport: Any) -> bool:
        checkpoints = Checkpoints(folder, transport, log=log.append, **options)
        return checkpoints.save(step, model_of(step), own_of(transport.rank, step), {"seen": step * 10})

    assert run_ranks(size, body) == [True] * size
    return log


def model_of(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 5), float(step)), "bias": torch.full((7,), step, dtype=torch.bfloat16)}


def newest(folder: Path, size: int = SIZE) -> tuple[Saved | None, list[str]]:
    """What all ranks agree on, and the log of rank 0; the others log nothing."""
    logs: list[list[str]] = [[] for _ in range(size)]
    found = run_ranks(size, lambda transport: Checkpoints(folder, transport, log=logs[transport.rank].append).newest())
    assert all(saved == found[0] for saved in found)
    assert not any(logs[1:])
    return found[0], logs[0]


def assert_is(saved: Saved | None, step: int, ranks: int = SIZE) -> None:
    assert saved is not None
    assert (saved.step, saved.ranks, saved.shared) == (step, ranks, {"seen": step * 10})
    assert_same(saved.model(), model_of(step))
    for rank in range(ranks):
        assert_same(saved.own(rank), own_of(rank, step))


def assert_same(a: Any, b: Any) -> None:
    """Same types all the way down, same bits, keys in any order."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert {(type(key), key) for key in a} == {(type(key), key) for key in b}
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        one, other = (tensor.clone(memory_format=torch.contiguous_format).untyped_storage() for tensor in (a, b))
        assert one.tolist() == other.tolist()
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert repr(a) == repr(b)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bits(dtype: str, shape: tuple[int, ...], seed: int, width: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, width), np.uint8)
    return raw & 1 if dtype == "bool" else raw


def numpy_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return bits(dtype, shape, seed, np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def torch_array(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    flat = torch.from_numpy(bits(dtype, shape, seed, kind.itemsize).reshape(-1))
    return flat.view(kind).reshape(shape) if flat.numel() else torch.empty(shape, dtype=kind)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SEEDS = st.integers(0, 1000)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), TEXTS)
ARRAYS = st.one_of(
    st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), SHAPES, SEEDS),
    st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), SHAPES, SEEDS).map(np.transpose),
    st.builds(torch_array, st.sampled_from(TORCH_DTYPES), SHAPES, SEEDS),
    st.builds(numpy_array, st.just("float32"), SHAPES, SEEDS).map(torch.from_numpy),
    st.builds(torch_array, st.just("float32"), st.just((4, 6)), SEEDS).map(lambda tensor: tensor.T[::2]),
    st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), st.just(()), SEEDS).map(lambda array: array[()]),
)
KEYS = st.one_of(TEXTS, st.integers(-5, 5), st.sampled_from(["0", "1", "['a']", "__metadata__"]))
TREES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@example({0: np.zeros(2), "0": np.ones(2), "a": {"b": np.zeros(1)}, "a']['b": np.ones(1)})
@example({"empty": torch.from_numpy(np.empty(0)), "one": torch.empty_strided((1,), (0,)).fill_(2)})
@settings(max_examples=60)
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_trees_come_back_exactly(tree: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (saved,) = run_ranks(1, lambda transport: save_and_find(Path(folder), transport, tree))
        assert_same(saved.own(0), tree)
        assert list(saved.own(0)) == list(tree)


def save_and_find(folder: Path, transport: Any, own: dict) -> Saved:
    checkpoints = Checkpoints(folder, transport)
    assert checkpoints.save(1, {}, own, {})
    saved = checkpoints.newest()
    assert saved is not None
    return saved


def test_what_comes_back_is_memory_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, 1)
    saved, _ = newest(tmp_path)
    assert saved is not None
    own, model = saved.own(1), saved.model()
    for path in saved.path.iterdir():
        with open(path, "r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
    own["residual"] += 1
    model["weight"] += 1
    assert own["residual"].tolist() == [12] * 1000
    assert model["weight"].tolist() == [[2.0] * 5] * 4


def test_parameters_are_kept_as_tensors(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    (saved,) = run_ranks(1, lambda transport: save_and_find(tmp_path, transport, {"layer": layer.state_dict()}))
    assert_same(saved.own(0)["layer"], {name: value.detach() for name, value in layer.named_parameters()})


def test_the_model_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    model = {dtype: torch_array(dtype, (3, 5), seed) for seed, dtype in enumerate(TORCH_DTYPES)}
    model |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).reshape(2, 3).T}
    run_ranks(1, lambda transport: Checkpoints(tmp_path, transport).save(7, model, {}, {}))
    path = tmp_path / "step_00000007" / "model.safetensors"
    assert_same(load_file(path), model)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    (header_bytes,) = np.frombuffer(path.read_bytes()[:8], "<u8")
    header = json.loads(path.read_bytes()[8 : 8 + int(header_bytes)])
    assert header_bytes % 8 == 0
    for name, tensor in model.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0


def test_files_are_as_described(tmp_path: Path) -> None:
    save(tmp_path, 120)
    path = tmp_path / "step_00000120"
    ranks = [f"rank_0000{rank}.safetensors" for rank in range(SIZE)]
    assert names(tmp_path) == ["step_00000120"]
    assert names(path) == ["manifest.json", "model.safetensors", *ranks]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["schema_version"], manifest["step"], manifest["ranks"]) == (1, 120, SIZE)
    assert manifest["shared"] == {"seen": 1200}
    assert sorted(manifest["files"]) == ["model.safetensors", *ranks]
    for name, figures in manifest["files"].items():
        said = subprocess.run(["sha256sum", path / name], capture_output=True, text=True, check=True).stdout.split()[0]
        assert figures == {"size": (path / name).stat().st_size, "sha256": said}


def test_everything_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "checkpoints"
    save(folder, 5, size=2)
    unfinished = f"{folder}/step_00000005.tmp"
    files = [f"{unfinished}/{name}" for name in ("model", "rank_00000", "rank_00001")]
    assert sorted(synced[1:4]) == [f"{name}.safetensors" for name in files]
    assert [synced[0], *synced[4:]] == [str(tmp_path), f"{unfinished}/manifest.json", unfinished, str(folder)]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_another_number_of_ranks_agrees_on_the_newest(tmp_path: Path, size: int) -> None:
    for step in (99_999_999, 100_000_000, 3):
        save(tmp_path, step, size=4, keep=3)
    saved, log = newest(tmp_path, size)
    assert_is(saved, 100_000_000, ranks=4)
    assert log == []


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") == (None, [])
    (tmp_path / "step_00000001").write_text("not a folder")
    (tmp_path / "step_1").mkdir()
    assert newest(tmp_path) == (None, [])


def test_a_folder_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def body(transport: Any) -> None:
        with pytest.raises(OSError, match="file: rank 0: NotADirectoryError"):
            Checkpoints(tmp_path / "file", transport).newest()

    run_ranks(SIZE, body)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b" x")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = ["manifest.json", "model.safetensors", "rank_00000.safetensors", "rank_00002.safetensors"]


@pytest.mark.parametrize("damage", [truncate, lengthen, empty, directory, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_passed_over(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step_00000002" / name)
    saved, log = newest(tmp_path)
    assert_is(saved, 1)
    assert len(log) == 1
    assert f"{tmp_path / 'step_00000002'} is passed over: rank" in log[0]
    assert name in log[0]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001" / name
    intact = path.read_bytes()
    assert_is(newest(tmp_path)[0], 1)
    for place in range(0, len(intact), max(1, len(intact) // 200)):
        flipped = bytearray(intact)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        saved, log = newest(tmp_path, 1)
        assert saved is None
        assert name in log[0]


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", "{}", '"x"', "[" * 100_000, "\udcff", '{"schema_version": 2}', '{"schema_version": 1}']
)
def test_a_manifest_of_other_content(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step_00000002" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    saved, log = newest(tmp_path)
    assert_is(saved, 1)
    assert "step_00000002 is passed over: rank 0, 1, 2: Damaged: manifest.json" in log[0]


def test_a_checkpoint_under_the_name_of_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009")
    saved, log = newest(tmp_path)
    assert_is(saved, 1)
    assert "step_00000009 is passed over" in log[0]
    assert "is of step 1" in log[0]


def test_several_damaged_ones_in_turn(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    truncate(tmp_path / "step_00000003" / "model.safetensors")
    (tmp_path / "step_00000002" / "rank_00001.safetensors").unlink()
    saved, log = newest(tmp_path)
    assert_is(saved, 1)
    assert ["step_00000003" in log[0], "step_00000002" in log[1], len(log)] == [True, True, 2]


def test_only_the_newest_are_kept_and_only_complete_ones_count(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert names(tmp_path) == ["notes.txt", "step_00000020", "step_00000030"]
    truncate(tmp_path / "step_00000030" / "rank_00001.safetensors")
    save(tmp_path, 40)
    assert names(tmp_path) == ["notes.txt", "step_00000020", "step_00000030", "step_00000040"]
    save(tmp_path, 50)
    assert names(tmp_path) == ["notes.txt", "step_00000040", "step_00000050"]


def test_going_back_behind_damaged_ones_keeps_what_is_saved_then(tmp_path: Path) -> None:
    for step in (10, 50, 60):
        save(tmp_path, step, keep=3)
    for step in (50, 60):
        path = tmp_path / f"step_000000{step}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[::-1])
    for step in (20, 30):
        save(tmp_path, step)
        assert_is(newest(tmp_path)[0], step)
    assert names(tmp_path) == ["step_00000020", "step_00000030", "step_00000050", "step_00000060"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    for size in (2, SIZE):
        save(tmp_path, 10, size=size)
        assert_is(newest(tmp_path)[0], 10, ranks=size)
        assert names(tmp_path) == ["step_00000010"]


def test_leftovers_are_never_taken_and_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "step_00000010", tmp_path / "step_00000020.tmp")
    saved, log = newest(tmp_path)
    assert_is(saved, 10)
    assert log == []
    save(tmp_path, 30)
    assert names(tmp_path) == ["step_00000010", "step_00000030"]


def failing_save(folder: Path, step: int, own: Callable[[int], dict], size: int = SIZE) -> str:
    """Saves with failure on all ranks; the one line of the log."""
    logs: list[list[str]] = [[] for _ in range(size)]

    def body(transport: Any) -> bool:
        checkpoints = Checkpoints(folder, transport, log=logs[transport.rank].append)
        return checkpoints.save(step, model_of(step), own(transport.rank), {})

    assert run_ranks(size, body) == [False] * size
    assert [len(log) for log in logs] == [1] + [0] * (size - 1)
    return logs[0][0]


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}])
def test_ranks_that_cannot_write(tmp_path: Path, failing: set[int]) -> None:
    """A limit on the size of files makes their writes fail half-way."""
    save(tmp_path, 10)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        line = failing_save(tmp_path, 20, lambda rank: {"x": np.zeros(200_000 if rank in failing else 1, np.uint8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    ranks = ", ".join(map(str, sorted(failing)))
    assert f"step 20 not saved in {tmp_path}: rank {ranks}: OSError: [Errno {errno.EFBIG}]" in line
    assert names(tmp_path) == ["step_00000010"]
    assert_is(newest(tmp_path)[0], 10)
    save(tmp_path, 20)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = failing_save(tmp_path / "file" / "checkpoints", 1, own_of)
    assert f"not saved in {tmp_path / 'file' / 'checkpoints'}: rank 0: NotADirectoryError" in line


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(options: str) -> Path:
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
            )
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_seen_beforehand(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=1m")
    save(folder, 10)
    free = shutil.disk_usage(folder).free
    line = failing_save(folder, 20, lambda rank: {"x": np.zeros(free // 2, np.uint8)})
    said = [int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit()]
    step, missing, needed, said_free = said
    assert step == 20
    assert said_free == free
    assert missing == needed - free
    assert 3 * (free // 2) < needed < 3 * (free // 2) + 40_000
    assert f"not saved in {folder}: rank 0: OSError: {missing:,} bytes are missing" in line
    assert names(folder) == ["step_00000010"]
    assert_is(newest(folder)[0], 10)


def test_what_the_file_system_has_is_used_up_to_the_end(mounted: Callable[[str], Path]) -> None:
    """What is said to be needed is enough, and not much more than is."""
    folder = mounted("size=1m")
    save(folder, 10)
    left = shutil.disk_usage(folder).free - 60_000

    def body(transport: Any) -> bool:
        return Checkpoints(folder, transport, keep=1).save(20, {}, {"x": np.zeros(left // SIZE, np.uint8)}, {})

    assert run_ranks(SIZE, body) == [True] * SIZE


def test_a_disk_that_fills_up_while_saving(mounted: Callable[[str], Path]) -> None:
    """There are bytes, but no room for another file: ENOSPC comes when a rank writes."""
    folder = mounted("size=4m,nr_inodes=14")
    save(folder, 10)
    line = failing_save(folder, 20, own_of, size=8)
    assert f"not saved in {folder}: rank" in line
    assert f"[Errno {errno.ENOSPC}]" in line
    assert names(folder) == ["step_00000010"]
    assert_is(newest(folder)[0], 10)
    save(folder, 20, keep=1)


REFUSED = {
    "set": ({1}, r"own\['x'\] is a set"),
    "key": ({1.5: 0}, r"own\['x'\] has the key 1.5"),
    "bool key": ({True: 0}, r"own\['x'\] has the key True"),
    "object": (np.array([None]), r"own\['x'\] is a ndarray of object"),
    "order": (np.ones(2, ">f4"), r"own\['x'\] is a ndarray of >f4"),
    "complex128": ([torch.ones(1, dtype=torch.complex128)], r"own\['x'\]\[0\] is a Tensor of torch.complex128"),
    "sparse": (torch.ones(2).to_sparse(), r"own\['x'\] is a Tensor of torch.float32, not dense"),
    "masked": (np.ma.zeros(3), r"own\['x'\] is a MaskedArray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_on_all_ranks(tmp_path: Path, case: str) -> None:
    value, complaint = REFUSED[case]

    def body(transport: Any) -> None:
        bad = transport.rank == 1
        with pytest.raises(UsageError if bad else PeerError, match=complaint):
            Checkpoints(tmp_path, transport).save(1, {}, {"x": value if bad else 0}, {})

    run_ranks(2, body)
    assert names(tmp_path) == []


@pytest.mark.parametrize("shared", [{"x": (1,)}, {1: 2}, {"x": float("nan")}, {"x": torch.ones(1)}])
def test_shared_must_be_plain_json(tmp_path: Path, shared: dict) -> None:
    def body(transport: Any) -> None:
        with pytest.raises(UsageError, match="must be plain JSON"):
            Checkpoints(tmp_path, transport).save(1, {}, {}, shared)

    run_ranks(2, body)


def test_ranks_at_different_steps_are_named(tmp_path: Path) -> None:
    def body(transport: Any) -> None:
        with pytest.raises(PlanMismatch, match="step is 10 on rank 0, 11 on rank 1"):
            Checkpoints(tmp_path, transport).save(10 + transport.rank, {}, {}, {})

    run_ranks(2, body)


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0"):
        run_ranks(1, lambda transport: Checkpoints(tmp_path, transport, keep=0))


KILLED_AT_EVERY_STEP_ON_DISK = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
import torch
from okrt.train.checkpoint import Checkpoints
from tests.ranks import run_ranks

ON_DISK = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
folder = Path(sys.argv[1])

def save(step, value):
    def body(transport):
        own = {"x": np.full(10_000, value + transport.rank)}
        return Checkpoints(folder, transport).save(step, {"w": torch.full((10_000,), value)}, own, {"value": value})
    assert run_ranks(2, body) == [True, True]

def look():
    saved, _ = run_ranks(2, lambda transport: Checkpoints(folder, transport).newest())
    assert saved.model()["w"].tolist() == [saved.shared["value"]] * 10_000
    for rank in (0, 1):
        assert saved.own(rank)["x"].tolist() == [saved.shared["value"] + rank] * 10_000
    return [saved.step, saved.shared["value"]]

def killed_at(count, step):
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, arguments):
            nonlocal seen
            if event in ON_DISK:
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(step, 3)
        os._exit(0)
    return os.waitpid(child, 0)[1]

save(1, 1)
save(2, 2)
before = folder.rename(folder.with_name("before"))
for step in map(int, sys.argv[2:]):
    status = -1
    count = 0
    while status != 0:
        count += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        status = killed_at(count, step)
        left = sorted(path.name for path in folder.iterdir())
        found = look()
        save(4, 4)
        assert look() == [4, 4]
        print(json.dumps([step, status, left, found, sorted(path.name for path in folder.iterdir())]))
"""


def test_kill_9_at_any_moment_of_a_save(tmp_path: Path, start: Callable) -> None:
    """Of a new step, and of one that is there: the process kills itself before its n-th use of the disk, for all n."""
    script = tmp_path / "save.py"
    script.write_text(KILLED_AT_EVERY_STEP_ON_DISK)
    root = str(Path(__file__).parents[2])
    done = start("python", script, tmp_path / "checkpoints", 3, 2, PYTHONPATH=root)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {step for step, *_ in rows} == {2, 3}
    for step in (3, 2):
        rounds = [row[1:] for row in rows if row[0] == step]
        old, new = [2, 2], [step, 3]
        found = [row[2] for row in rounds]
        turn = found.index(new)
        assert found == [old] * turn + [new] * (len(found) - turn)
        assert [row[0] for row in rounds] == [9] * (len(rounds) - 1) + [0]
        lefts = [left for _, left, _, _ in rounds]
        before = ["step_00000001", "step_00000002"]
        assert sorted([*before, f"step_0000000{step}.tmp"]) in lefts
        if step == 2:
            assert ["step_00000001", "step_00000002.old", "step_00000002.tmp"] in lefts
        kept = [[f"step_0000000{found[0]}", "step_00000004"] for found in found]
        assert [row[3] for row in rounds] == kept


def test_nothing_is_unpickled() -> None:
    for module in (okrt.train.checkpoint, okrt.train.tree):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        used = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        used |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        used |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & {"pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle"}
        assert not used & {"torch.load", "torch.save", "np.load", "np.save"}
        assert "torch" in used and sys.modules[module.__name__] is module
