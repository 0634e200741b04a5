"""Whole files of a folder on a server or a local disk, read and written by threads, for as long as they are needed."""

import asyncio
import io
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from typing_extensions import override

from lit_data.errors import ConfigError, DataError, show_path
from lit_data.io.remote.address import WEB, Address, is_remote, parse_address
from lit_data.io.remote.connection import Connection, quiet_clients
from lit_data.io.remote.faults import UnreachableError
from lit_data.io.remote.mirror import connect
from lit_data.io.remote.options import RemoteOptions
from lit_data.io.temp import sweep, temp_folder

T = TypeVar("T")
_ENDING_S: Final = 5.0
_CHUNK_BYTES: Final = 2**20


class Objects(ABC):
    """Files below a folder. Each is there as a whole or not at all; any thread may call.

    Every method raises `UnreachableError` or another `DataError` where the folder cannot be reached
    or used.
    """

    @abstractmethod
    def read(self, name: str, most_bytes: int) -> bytes:
        """The content of a small file, which is refused if it is larger."""

    @abstractmethod
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        """Copy a file to a new local one, and stop where it is larger than it may be."""

    @abstractmethod
    def put(self, path: Path, name: str) -> None:
        """Copy a local file there, in place of one of its name."""

    @abstractmethod
    def list_sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file of a folder, by its name; nothing where the folder is not there."""

    @abstractmethod
    def __str__(self) -> str:
        """The folder, for messages."""


def too_large(what: str, most_bytes: int) -> DataError:
    """The error for a file of a set that is larger than it may be."""
    return DataError(
        f"{what}: more than the {most_bytes} bytes that it may have; prepare the set again"
    )


def open_objects(root: str, options: RemoteOptions) -> Objects:
    """The files below an address or a local folder; nothing is read yet."""
    return (
        ServerObjects(parse_address(root), options)
        if is_remote(root)
        else FolderObjects(Path(root), options)
    )


class FolderObjects(Objects):
    """Files below a local folder, which may be a mount that answers late or not.

    Args:
        folder: May not exist yet.
        options: How often to try, and how long to wait.
    """

    def __init__(self, folder: Path, options: RemoteOptions) -> None:
        self._folder, self._options = folder, options
        self._swept: set[Path] = set()

    @override
    def read(self, name: str, most_bytes: int) -> bytes:
        content = io.BytesIO()
        self._insist(lambda: self._copy(name, content, most_bytes))
        return content.getvalue()

    @override
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        with path.open("wb") as file:
            self._insist(lambda: self._copy(name, file, most_bytes))

    @override
    def put(self, path: Path, name: str) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent not in self._swept:
            sweep(target.parent)  # of writers that were killed
            self._swept.add(target.parent)
        with temp_folder(target.parent) as temp:
            shutil.copyfile(path, temp / target.name)
            (temp / target.name).replace(target)

    @override
    def list_sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._folder / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    @override
    def __str__(self) -> str:
        return show_path(self._folder)

    def _copy(self, name: str, target: BinaryIO, most_bytes: int) -> None:
        """Copy a regular file; what stands in its place, a pipe or an endless device, is not waited for."""
        source = self._folder / name
        target.seek(0)
        target.truncate()
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DataError(f"{show_path(source)}: not a regular file; prepare the set again")
            left = most_bytes + 1
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                target.write(chunk)
                left -= len(chunk)
        target.flush()
        if not left:
            raise too_large(show_path(source), most_bytes)

    def _insist(self, call: Callable[[], T]) -> T:
        for left in reversed(range(self._options.retries + 1)):
            try:
                return call()
            except FileNotFoundError as error:
                raise DataError(
                    f"{show_path(error.filename)}: not found; check data.root"
                ) from error
            except OSError as error:
                if not left:
                    raise DataError(f"{self}: cannot be read ({error.strerror})") from error
            time.sleep(self._options.backoff_s)
        raise AssertionError


class ServerObjects(Objects):
    """Files below an address. The connection is opened by the first call in a process, and kept.

    Args:
        address: Of the folder.
        options: How the server is read.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self._address, self._options = address, options
        self._lines: dict[int, _Line] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["ServerObjects"], tuple[Address, RemoteOptions]]:
        return type(self), (self._address, self._options)

    @override
    def read(self, name: str, most_bytes: int) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "read"
            self.get(name, path, most_bytes)
            return path.read_bytes()

    @override
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        async def fetch(connection: Connection) -> None:
            arrived = [0]

            def tell(new_bytes: int) -> None:
                arrived[0] += new_bytes
                if arrived[0] > most_bytes:  # at once, before it fills the disk
                    raise too_large(f"{self}/{name}", most_bytes)

            def once() -> Awaitable[None]:
                arrived[0] = 0
                return connection.fetch(name, path, tell)

            await connection.insist(once, name)
            if path.stat().st_size > most_bytes:
                raise too_large(f"{self}/{name}", most_bytes)

        self._call(fetch)

    @override
    def put(self, path: Path, name: str) -> None:
        if self._address.scheme in WEB:
            raise ConfigError(
                f"{self}: a web server is only read; write to s3://... or a folder, and serve that"
            )
        self._call(lambda connection: connection.put(path, name))

    @override
    def list_sizes(self, folder: str) -> dict[str, int]:
        return self._call(lambda connection: connection.list_sizes(folder))

    @override
    def __str__(self) -> str:
        return str(self._address)

    def _call(self, make: Callable[[Connection], Awaitable[T]]) -> T:
        if self._options.offline == "always":
            raise UnreachableError(f"{self}: data.remote.offline=always, and this is not all here")
        with self._lock:
            line = self._lines.get(os.getpid())  # a forked child has no thread that would answer
            if line is None:
                line = self._lines[os.getpid()] = _Line(connect(self._address, self._options))
                weakref.finalize(self, line.end)
        return line.call(make)


class _Line:
    """A thread with an event loop and an open connection, which other threads ask."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._is_open = connection, False
        self._loop = asyncio.new_event_loop()
        self._opening = asyncio.Lock()
        self._thread = threading.Thread(target=self._turn, name="lit_data remote", daemon=True)
        self._thread.start()

    def call(self, make: Callable[[Connection], Awaitable[T]]) -> T:
        future = asyncio.run_coroutine_threadsafe(self._answer(make), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Close the connection; called when nobody can ask any more, at the latest before this process ends."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_ENDING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDING_S)

    async def _answer(self, make: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._opening:
            if not self._is_open:
                await self._connection.__aenter__()
                self._is_open = True
        return await make(self._connection)

    async def _close(self) -> None:
        if self._is_open:
            await self._connection.__aexit__(None, None, None)

    def _turn(self) -> None:
        with quiet_clients():
            try:
                self._loop.run_forever()
            finally:
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()
