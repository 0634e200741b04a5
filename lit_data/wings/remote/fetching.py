"""Fetching of files from a server into a mirror, and the record of fetched files.

Each file is complete and checked against the server, or does not exist at all.
"""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError, Problems
from lit_data.core.files import replacing
from lit_data.core.progress import ProgressBar
from lit_data.images.store.files import write_all
from lit_data.wings.remote.connection import Connection, RemoteFile, call_each
from lit_data.wings.remote.faults import ACCESS_ADVICE, BrokenReadError, UnreachableError
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

MANIFEST_NAME = ".manifest.jsonl"
_FORMAT = 1
_MOST_FAULTS = 100  # after these, no more files are requested
_NS = 10**9


@dataclass(frozen=True, slots=True)
class MirroredFile:
    """A file of the mirror.

    Args:
        version: Version stated by the server when it was read.
        size_bytes: Size of the file.
        mtime_ns: Local time, as read back from the disk.
    """

    version: str
    size_bytes: int
    mtime_ns: int

    def is_at(self, path: Path) -> bool:
        """Return True if the local file is the one that was fetched."""
        try:
            status = path.lstat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


class Manifest:
    """Record of a mirror, which tells the next start which files need not be read again.

    Lines are added while files arrive; the last line of a name counts.

    A line is written before its file gets its name. So a kill in between leaves a line without a
    matching file, which is then read again, and never a file without a line.

    Args:
        folder: Folder of the record.
        url: Mirrored address; a record of another address is not used.

    Attributes:
        entries: Files by name.
        complete: Number of files of each complete scope, by its key.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._path = folder / MANIFEST_NAME
        self._url = url
        self.entries: dict[str, MirroredFile] = {}
        self.complete: dict[str, int] = {}
        self._load()

    def begin(self, gone: Iterable[str] = ()) -> None:
        """Write the record again without `gone`, and with no complete scope, because files change now."""
        for name in gone:
            del self.entries[name]
        self.complete = {}
        self._write()

    def add(self, name: str, entry: MirroredFile) -> None:
        """Record a file that is about to get its name."""
        self.entries[name] = entry
        # One write of one line with O_APPEND is never mixed with that of another thread.
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_all(fd, memoryview(_encode({"name": name, **asdict(entry)})))
        finally:
            os.close(fd)

    def finish(self, scope: str, files: int) -> None:
        """Record that a scope is complete.

        Args:
            scope: Key of the scope.
            files: Number of its files.
        """
        self.complete[scope] = files
        self._write()

    def _write(self) -> None:
        lines = [_encode({"format": _FORMAT, "url": self._url, "complete": self.complete})]
        for name, entry in self.entries.items():
            lines.append(_encode({"name": name, **asdict(entry)}))
        with replacing(self._path) as file:
            file.writelines(lines)

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
            self.complete = {key: n for key, n in complete.items() if isinstance(n, int)}
        for line in lines[1:]:
            row = _decode(line)
            name, version = row.get("name"), row.get("version")
            size_bytes, mtime_ns = row.get("size_bytes"), row.get("mtime_ns")
            is_text = isinstance(name, str) and isinstance(version, str)
            if is_text and isinstance(size_bytes, int) and isinstance(mtime_ns, int):
                self.entries[str(name)] = MirroredFile(str(version), size_bytes, mtime_ns)


def _encode(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    """Return a line of a record; empty if it was truncated by a kill."""
    try:
        # RecursionError: nested brackets, in a record that somebody changed.
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


@dataclass
class Fetcher:
    """Fetches many files at a time.

    Args:
        connection: Connection to the server.
        manifest: Records each file.
        folder: Folder of the mirror.
        temp: A folder on the same disk, for incomplete files.
        bar: Counts bytes.
    """

    connection: Connection
    manifest: Manifest
    folder: Path
    temp: Path
    bar: ProgressBar

    def __post_init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._has_other_tags = False  # ETags turned out not to be checksums

    async def run(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files.

        Raises:
            UnreachableError: The server does not answer any more; files that have arrived are kept.
            DataError: Files cannot be read, or differ from what the server states; all are listed.
        """
        await call_each(self._try, list(enumerate(files)), self.connection.options.connections)
        if not self._faults:
            return
        problems = Problems()
        advice = ""
        for name, text in sorted(self._faults.items()):
            # Many files share this advice, which is given once, at the end.
            if text.endswith(ACCESS_ADVICE):
                advice = ACCESS_ADVICE.removeprefix("; ")
            problems.add(self.connection.address.name(name), text.removesuffix(ACCESS_ADVICE))
        headline = f"{len(problems)} of {counted(len(files), 'file')} of {self.connection.address} could not be read"
        raise problems.make_error(headline, advice)

    async def _try(self, numbered: tuple[int, RemoteFile]) -> None:
        number, file = numbered
        if len(self._faults) >= _MOST_FAULTS:
            return
        path = self.temp / str(number)
        wrong_sums: list[str] = []
        try:
            entry = await self.connection.insist(
                lambda: self._fetch(file, path, wrong_sums), file.name
            )
            await asyncio.to_thread(self._publish, file, path, entry)
        except UnreachableError:
            raise
        except DataError as error:
            self._faults[file.name] = str(error)
        finally:
            path.unlink(missing_ok=True)

    async def _fetch(self, file: RemoteFile, path: Path, wrong_sums: list[str]) -> MirroredFile:
        """Fetch a file once and check it."""
        arrived: list[int] = []

        def count(new_bytes: int) -> None:
            arrived.append(new_bytes)
            self.bar.advance(new_bytes)

        try:
            path.unlink(missing_ok=True)
            await self.connection.fetch(file.name, path, file.size_bytes, count)
            size_bytes = path.stat().st_size
            if size_bytes != file.size_bytes:
                raise BrokenReadError(
                    f"{size_bytes} bytes were received, but the server states {file.size_bytes}"
                )
            await self._check_sum(file, path, wrong_sums)
            return await asyncio.to_thread(_finish, file, path)
        except BaseException:
            # The next try reads these again.
            self.bar.advance(-sum(arrived))
            raise

    async def _check_sum(self, file: RemoteFile, path: Path, wrong_sums: list[str]) -> None:
        """Compare the checksums; if the same wrong sum comes twice, a retry cannot help.

        Raises:
            BrokenReadError: The sum is wrong for the first time.
            DataError: The sum stays wrong.
        """
        algorithm, stated = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
        is_tag = algorithm == "md5"
        options = self.connection.options
        if stated is None or not options.checksums or (is_tag and self._has_other_tags):
            return
        read_sum = await asyncio.to_thread(_digest, path, algorithm)
        if read_sum == stated:
            return
        if is_tag and not await self.connection.is_sum(file):
            log.info(
                "%s: its ETags are not checksums, so sizes are compared", self.connection.address
            )
            self._has_other_tags = True
            return
        fault = f"{algorithm.upper()} sum is {read_sum}, the server states {stated}"
        if read_sum not in wrong_sums and options.retries:
            wrong_sums.append(read_sum)
            raise BrokenReadError(f"the {fault}")
        raise DataError(
            f"{self.connection.address.name(file.name)}: its {fault}: the file there is damaged "
            "or the stated sum is out of date; fix it there, or set "
            "data.remote.checksums=false, which compares sizes only"
        )

    def _publish(self, file: RemoteFile, path: Path, entry: MirroredFile) -> None:
        """Give a complete file its name, replacing an older file or a link."""
        target = self.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        # In this order, see `Manifest`.
        self.manifest.add(file.name, entry)
        path.replace(target)


def choose_mtime_ns(file: RemoteFile) -> int:
    """Return a local time that is the same on every machine, and different for each version.

    Stores identify their sources by size and time, and servers state times in whole seconds only,
    so the nanoseconds are made from the version.
    """
    digest = hashlib.sha256(file.version.encode("utf-8", "surrogateescape")).digest()
    return file.mtime_s * _NS + int.from_bytes(digest[:8], "little") % _NS


def _digest(path: Path, algorithm: str) -> str:
    make = partial(hashlib.new, algorithm, usedforsecurity=False)  # MD5 is what S3 states
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, make).hexdigest()


def _finish(file: RemoteFile, path: Path) -> MirroredFile:
    """Flush a file to the disk and set its time."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Before the record states that the file exists.
        os.fsync(fd)
    finally:
        os.close(fd)
    mtime_ns = choose_mtime_ns(file)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    status = path.stat()
    return MirroredFile(file.version, status.st_size, status.st_mtime_ns)
