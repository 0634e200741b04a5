"""Bringing files from a server into a mirror: each whole and compared with what the server states, or not at all."""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from lit_data.errors import DataError, Problems, StoreError, show_path
from lit_data.io.progress import DELAY_S
from lit_data.io.remote.connection import Connection, RemoteFile
from lit_data.io.remote.faults import ACCESS_ADVICE, BrokenReadError, UnreachableError
from lit_data.io.remote.manifest import Manifest, MirroredFile
from lit_data.io.remote.runner import call_each

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

_MOST_FAULTS: Final = 100  # then no more files are asked for


class BytesBar:
    """Progress bar of bytes on stderr, shown after ``DELAY_S``; a context manager.

    Args:
        what: One or two words in front of the bar.
        total_bytes: How many there will be.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, new_bytes: int) -> None:
        """Count bytes, from any thread; negative ones are those that have to be read again."""
        with self._lock:
            self._done_bytes += new_bytes
            if self._bar is None and time.monotonic() - self._started_s > DELAY_S:
                self._bar = _start(self._what, self._total_bytes)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done_bytes)


def _start(what: str, total_bytes: int) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=total_bytes)
    bar.start()
    return bar


_NS: Final = 10**9


class Fetcher:
    """Reads many files at a time.

    Args:
        connection: Where from.
        manifest: Learns of each file.
        folder: Of the mirror.
        temp: A folder on the same disk, for files that are not whole yet.
        bar: Counts bytes.
    """

    def __init__(
        self, connection: Connection, manifest: Manifest, *, folder: Path, temp: Path, bar: BytesBar
    ) -> None:
        self._connection, self._manifest = connection, manifest
        self._folder, self._temp, self._bar = folder, temp, bar
        self._faults: dict[str, str] = {}
        self._real_folders: set[Path] = {folder}
        self._has_other_tags = False  # ETags turned out to be no sums

    async def run(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files.

        Raises:
            UnreachableError: The server does not answer any more; what has arrived is kept.
            DataError: Lists all files that cannot be read, or are not what the server states.
        """
        await call_each(self._try, list(enumerate(files)), self._connection.options.connections)
        self._raise_faults(len(files))

    async def _try(self, numbered: tuple[int, RemoteFile]) -> None:
        number, file = numbered
        if len(self._faults) >= _MOST_FAULTS:
            return
        path = self._temp / str(number)
        try:
            await self._fetch(file, path)
        except UnreachableError:
            raise
        except DataError as error:
            self._faults[file.name] = str(error)
        finally:
            path.unlink(missing_ok=True)

    def _raise_faults(self, files: int) -> None:
        """Raise one error for all files, with the advice that many of them share at its end."""
        problems = Problems()
        for name, text in sorted(self._faults.items()):
            problems.add(self._connection.address.name(name), text.removesuffix(ACCESS_ADVICE))
        if len(problems):
            what = (
                f"{len(problems)} of {files} files of {self._connection.address} could not be read"
            )
            denied = any(text.endswith(ACCESS_ADVICE) for text in self._faults.values())
            raise problems.make_error(what, ACCESS_ADVICE.removeprefix("; ") if denied else "")

    async def _fetch(self, file: RemoteFile, path: Path) -> None:
        wrong: list[str] = []

        async def once() -> MirroredFile:
            arrived: list[int] = []

            def tell(new_bytes: int) -> None:
                arrived.append(new_bytes)
                self._bar.add(new_bytes)
                if sum(arrived) > file.size_bytes:  # at once, before it fills the disk
                    raise BrokenReadError(
                        f"more than the {file.size_bytes} bytes arrive that the server states"
                    )

            try:
                path.unlink(missing_ok=True)
                await self._connection.fetch(file.name, path, tell)
                await asyncio.to_thread(_check_size, file, path)
                await self._check_sum(file, path, wrong)
                return await asyncio.to_thread(_finish, file, path)
            except BaseException:
                self._bar.add(-sum(arrived))
                raise

        entry: MirroredFile = await self._connection.insist(once, file.name)
        await asyncio.to_thread(self._publish, file, path, entry)

    async def _check_sum(self, file: RemoteFile, path: Path, wrong: list[str]) -> None:
        """Compare the sums; the same wrong one twice is the server's, another try cannot help.

        Raises:
            BrokenReadError: The sum is wrong for the first time.
            DataError: It stays wrong.
        """
        algorithm, stated = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
        skipped = algorithm == "md5" and self._has_other_tags
        if stated is None or skipped or not self._connection.options.checksums:
            return
        read_sum = await asyncio.to_thread(_digest, path, algorithm)
        if read_sum == stated:
            return
        if algorithm == "md5" and not await self._connection.is_sum(file):
            log.info("%s: ETags there are no sums; sizes are compared", self._connection.address)
            self._has_other_tags = True
            return
        wrong.append(read_sum)
        if wrong.count(read_sum) < 2 and self._connection.options.retries:
            raise BrokenReadError(
                f"the {algorithm.upper()} sum is {read_sum}, the server states {stated}"
            )
        raise DataError(
            f"{self._connection.address.name(file.name)}: its {algorithm.upper()} sum is "
            f"{read_sum}, the server states {stated}: the file there is damaged or the stated sum "
            "is out of date; mend it there, or set data.remote.checksums=false, which compares "
            "sizes only"
        )

    def _publish(self, file: RemoteFile, path: Path, entry: MirroredFile) -> None:
        """Give a whole file its name, which may replace an older file and never follows a link."""
        target = self._folder / file.name
        self._make_parents(target.parent)
        self._manifest.add(file.name, entry)
        path.replace(target)

    def _make_parents(self, folder: Path) -> None:
        if folder in self._real_folders:
            return
        self._make_parents(folder.parent)
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise StoreError(
                f"{show_path(folder)} is a link, which a mirror never holds; remove it"
            )
        self._real_folders.add(folder)


def choose_mtime_ns(file: RemoteFile) -> int:
    """A local time that is the same on every machine, and another one for each version of a file.

    Stores know their sources by size and time, and servers tell times in whole seconds only; so the
    version chooses the nanoseconds.
    """
    digest = hashlib.sha256(file.version.encode("utf-8", "surrogateescape")).digest()
    return file.mtime_s * _NS + int.from_bytes(digest[:8], "little") % _NS


def _check_size(file: RemoteFile, path: Path) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise BrokenReadError(f"{size_bytes} bytes arrived, the server states {file.size_bytes}")


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(
            stream, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()


def _finish(file: RemoteFile, path: Path) -> MirroredFile:
    """Bring a file to the disk and give it its time."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    mtime_ns = choose_mtime_ns(file)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    status = path.stat()
    return MirroredFile(file.version, status.st_size, status.st_mtime_ns)
