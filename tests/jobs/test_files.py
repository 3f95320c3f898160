"""Files of data sets: what is missing, short or altered is refused by name."""

import hashlib
from pathlib import Path

import pytest

from okrt.errors import UsageError
from okrt.jobs.files import Folder


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"second")
    return tmp_path


def test_reads_what_is_there(root: Path) -> None:
    folder = Folder(str(root), {"a": sha256(b"first")})
    assert folder.read("a", size=5)[:] == b"first"
    assert folder.text("sub/b") == "second"
    assert folder.has("a") and not folder.has("c")
    assert folder.read("sub/b", md5=hashlib.md5(b"second").hexdigest())[:] == b"second"


def test_sum_over_all_is_that_of_sha256sum(root: Path) -> None:
    listing = f"{sha256(b'first')}  a\n{sha256(b'second')}  sub/b\n"
    total = sha256(listing.encode())
    for sums in ({}, {".": total}):
        folder = Folder(str(root), sums)
        folder.read("sub/b")
        folder.read("a")
        assert folder.describe() == f"2 files in {root}, sha256 {total}"
    folder = Folder(str(root), {".": total})
    folder.read("a")
    with pytest.raises(UsageError, match=total):
        folder.describe()


def test_refusals_name_the_file(root: Path) -> None:
    (root / "empty").touch()
    (root / "latin").write_bytes(b"caf\xe9")
    wrong = "0" * 64
    with pytest.raises(UsageError, match="nowhere"):
        Folder(str(root / "nowhere"), {})
    folder = Folder(str(root), {"a": wrong})
    with pytest.raises(UsageError, match=f"{root / 'c'} is missing"):
        folder.read("c")
    with pytest.raises(UsageError, match=f"{root / 'a'} has 5 bytes, expected 6"):
        folder.read("a", size=6)
    with pytest.raises(UsageError, match=f"{root / 'a'} is altered.*{sha256(b'first')}, expected {wrong}"):
        folder.read("a")
    with pytest.raises(UsageError, match=r"sub/b is altered.*md5.*expected abc"):
        folder.read("sub/b", md5="abc")
    with pytest.raises(UsageError, match="empty has 0 bytes"):
        folder.read("empty")
    with pytest.raises(UsageError, match="latin is not UTF-8"):
        folder.text("latin")


def test_a_sum_for_a_file_that_is_not_read_is_an_error(root: Path) -> None:
    folder = Folder(str(root), {"aa": "0" * 64})
    folder.read("a")
    with pytest.raises(UsageError, match="'aa'"):
        folder.describe()
