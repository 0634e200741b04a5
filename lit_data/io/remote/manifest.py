"""Record of the files of a mirror with their checksums; the next start reads only what changed."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lit_data.errors import DataError, escape
from lit_data.files import replacing
from lit_data.io.store.files import write_all

NAME: Final = ".manifest.jsonl"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class MirroredFile:
    """A file of the mirror.

    Args:
        version: What the server said of it when it was read.
        size_bytes: Its size.
        mtime_ns: Its local time, as the disk gave it back.
    """

    version: str
    size_bytes: int
    mtime_ns: int

    def is_at(self, path: Path) -> bool:
        """Return True if the local file is the one that was read."""
        try:
            status = path.lstat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


class Manifest:
    """Record of a mirror.

    Lines are added while files arrive; the last line of a name counts.

    A line is written before its file gets its name: then a kill in between leaves a line that no
    file fits, which is read anew, and never a file that nobody knows of.

    Args:
        folder: Where the record lies.
        url: What is mirrored; a record of anything else is not used.

    Attributes:
        entries: By name.
        complete: For the key of each scope that is there as a whole: how many files it has.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._path, self._url = folder / NAME, url
        self.entries: dict[str, MirroredFile] = {}
        self.complete: dict[str, int] = {}
        self._load()

    def begin(self) -> None:
        """Write the record anew, with nothing complete: from here on files change."""
        self.complete = {}
        self._write()

    def add(self, name: str, entry: MirroredFile) -> None:
        """Note a file that is about to get its name."""
        self.entries[name] = entry
        # One write of one line with O_APPEND is never torn by another thread's.
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_all(fd, memoryview(_encode({"name": name, **asdict(entry)})))
        finally:
            os.close(fd)

    def finish(self, scope: str, files: int, *, kept: Mapping[str, int] | None = None) -> None:
        """Note that a scope is there as a whole.

        Args:
            scope: Its key.
            files: How many files it has.
            kept: Other scopes that are complete still; none once files have changed.
        """
        self.complete = {**(kept or {}), scope: files}
        self._write()

    def forget(self, names: Iterable[str]) -> None:
        """Leave files out; the next `begin` or `finish` writes that."""
        for name in names:
            self.entries.pop(name, None)

    def _write(self) -> None:
        head = {"format": _FORMAT, "url": self._url, "complete": self.complete}
        lines = (_encode({"name": name, **asdict(entry)}) for name, entry in self.entries.items())
        with replacing(self._path) as file:
            file.writelines([_encode(head), *lines])

    def _load(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return
        head = _decode(lines[0]) if lines else {}
        if (head.get("format"), head.get("url")) != (_FORMAT, self._url):
            return
        complete = head.get("complete")
        if isinstance(complete, dict):
            self.complete = {
                key: files for key, files in complete.items() if isinstance(files, int)
            }
        for row in map(_decode, lines[1:]):
            name, values = (
                row.get("name"),
                (row.get("version"), row.get("size_bytes"), row.get("mtime_ns")),
            )
            if (
                isinstance(name, str)
                and isinstance(values[0], str)
                and all(isinstance(v, int) for v in values[1:])
            ):
                self.entries[name] = MirroredFile(*values)  # type: ignore[arg-type]  # their types are checked


def _encode(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    """A line; empty if it was cut short by a kill."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


SUMS_NAME: Final = "SHA256SUMS"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")


def parse_list(content: bytes, what: str) -> dict[str, str | None]:
    """Read a list of files, with or without their SHA-256 sums.

    Each line is a name, or a sum and a name; empty lines and those with ``#`` are left out.

    Args:
        content: UTF-8 text.
        what: Address of the list, for messages.

    Returns:
        For each name its sum in small letters, or none.

    Raises:
        DataError: It is no such text, is empty, or states two sums for one name.
    """
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: is no text in UTF-8") from error
    sums: dict[str, str | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.lstrip().startswith("<"):
            raise DataError(
                f"{what}, line {number}: is HTML and no list of files: {escape(line[:80])}"
            )
        match = _LINE.fullmatch(line)
        stated, name = (match[1].lower(), match[2]) if match else (None, line.strip())
        name = name.removeprefix("./")
        if sums.setdefault(name, stated) != stated:
            raise DataError(
                f"{what}, line {number}: {escape(name)} is there twice, with other sums"
            )
    if not sums:
        raise DataError(f"{what}: names no file")
    return sums
