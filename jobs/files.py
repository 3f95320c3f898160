"""Data files of a job: found, whole and unaltered, or a line that names the file and what was expected."""

import hashlib
import mmap
from pathlib import Path
from typing import Annotated

from pydantic import Field

from okrt.errors import UsageError

Sums = dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
"""The [task.sha256] table: file name to SHA-256; "." is the sum over all files, as the log gives it."""


class Folder:
    """The folder that `task.path` names. Every file is summed as it is read."""

    def __init__(self, path: str, sha256: Sums) -> None:
        self.root = Path(path).expanduser()
        if not self.root.is_dir():
            raise UsageError(f"task.path = {path!r} is not a folder; it should hold the files of the data set")
        self._expected = sha256
        self._sums: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def read(self, name: str, md5: str = "", size: int | None = None) -> mmap.mmap:
        """The bytes of a file that has this size, and its sum in [task.sha256], or else the published `md5`."""
        file = self.root / name
        if not file.is_file():
            raise UsageError(f"{file} is missing; task.path should name the folder that holds it")
        found = file.stat().st_size
        if found == 0 or found != (size or found):
            raise UsageError(f"{file} has {found} bytes, expected {size or 'some'}")
        with file.open("rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._sums[name] = hashlib.sha256(content).hexdigest()
        if name in self._expected:
            _compare(file, "sha256", self._sums[name], self._expected[name])
        elif md5:
            _compare(file, "md5", hashlib.md5(content, usedforsecurity=False).hexdigest(), md5)
        return content

    def text(self, name: str) -> str:
        content = self.read(name)
        try:
            return content[:].decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.root / name} is not UTF-8 text: byte {error.start} is wrong") from None

    def describe(self) -> str:
        """Folder, files read and the sum over them: that of what `sha256sum` prints for them, sorted by name."""
        listing = "".join(f"{self._sums[name]}  {name}\n" for name in sorted(self._sums))
        total = hashlib.sha256(listing.encode()).hexdigest()
        _compare(self.root, "sha256 over all files", total, self._expected.get(".", total))
        unread = sorted(self._expected.keys() - self._sums.keys() - {"."})
        if unread:
            raise UsageError(f"task.sha256 names {unread[0]!r}, but the job reads no such file in {self.root}")
        return f"{len(self._sums)} files in {self.root}, sha256 {total}"


def _compare(file: Path, kind: str, found: str, expected: str) -> None:
    if found != expected:
        raise UsageError(f"{file} is altered or damaged: its {kind} is {found}, expected {expected}")
