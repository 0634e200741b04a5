"""`Transport`: reads and writes files of a folder on a server or a shared disk, from any thread.

Mirrors and shards both use it. One thread with an event loop talks to a server. It ends with the
transport, so that later forks find neither thread nor connection.
"""

import asyncio
import logging
import os
import shutil
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self, TypeVar

from typing_extensions import override

from lit_data.core.addresses import WEB, Address, RemoteOptions, is_remote, parse_address
from lit_data.core.errors import ConfigError, DataError, StoreSpaceError, show_path
from lit_data.core.files import NO_SPACE, open_regular
from lit_data.core.temp import sweep, temp_folder
from lit_data.images.scope import Scope
from lit_data.wings.remote.connection import (
    S3,
    Connection,
    ListedConnection,
    S3Connection,
    call_each,
)
from lit_data.wings.remote.faults import UnreachableError, too_large
from lit_data.wings.remote.web import WebConnection

T = TypeVar("T")
_ENDING_S = 5.0
_CHUNK_BYTES = 2**20

TALKATIVE = (
    "botocore",
    "aiobotocore",
    "s3fs",
    "fsspec",
    "aiohttp",
    "urllib3",
    "asyncio",
    "boto3",
)
keepers: set[object] = set()
_levels_before: dict[str, int] = {}
_quieting = threading.Lock()


def open_transport(root: str, options: RemoteOptions) -> "Transport":
    """Return the transport of an address or a local folder; nothing is read yet."""
    if is_remote(root):
        return ServerTransport(parse_address(root), options)
    return FolderTransport(Path(root), options)


class Transport(ABC):
    """Files in a folder, each complete or missing; methods may be called from any thread.

    Every method raises `UnreachableError` or another `DataError` if the folder cannot be reached or
    used.
    """

    @abstractmethod
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        """Copy a file to a new local one; raise an error if it is larger than allowed."""

    @abstractmethod
    def put(self, path: Path, name: str) -> None:
        """Copy a local file there, replacing one with its name."""

    @abstractmethod
    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file of a folder, by name; empty if the folder does not exist."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the folder, for messages."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a small file; raise an error if it is larger than allowed."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            self.get(name, path, most_bytes)
            return path.read_bytes()


class FolderTransport(Transport):
    """Files in a local folder, which may be a slow or unreliable mount.

    Args:
        folder: Folder, which need not exist yet.
        options: Number of retries, and waiting time.
    """

    def __init__(self, folder: Path, options: RemoteOptions) -> None:
        self._folder = folder
        self._options = options
        self._swept: set[Path] = set()

    @override
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        for left in reversed(range(self._options.retries + 1)):
            try:
                return self._copy(self._folder / name, path, most_bytes)
            except FileNotFoundError as error:
                missing = show_path(error.filename)
                raise DataError(f"{missing}: not found; check data.root") from error
            except OSError as error:
                if not left:
                    raise DataError(f"{self}: cannot be read ({error.strerror})") from error
            time.sleep(self._options.backoff_s)
        raise AssertionError("the last try returns or raises")

    @override
    def put(self, path: Path, name: str) -> None:
        try:
            self._put(path, self._folder / name)
        except OSError as error:
            kind = StoreSpaceError if error.errno in NO_SPACE else DataError
            raise kind(
                f"{self}: cannot be written ({error.strerror}); name another address"
            ) from error

    def _put(self, path: Path, target: Path) -> None:
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
        except OSError as error:
            raise DataError(f"{self}: cannot be read ({error.strerror})") from error

    @override
    def __str__(self) -> str:
        return show_path(self._folder)

    def _open(self, source: Path) -> BinaryIO:
        try:
            return open_regular(source)
        except DataError as error:
            raise DataError(f"{show_path(source)}: {error}; prepare the set again") from error

    def _copy(self, source: Path, path: Path, most_bytes: int) -> None:
        with self._open(source) as file, path.open("wb") as target:
            left = most_bytes + 1
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                target.write(chunk)
                left -= len(chunk)
        if not left:
            raise too_large(show_path(source), most_bytes)


class ServerTransport(Transport):
    """Files at an address. The connection is opened by the first call in a process, and kept.

    It is a context manager that closes the connection at the end; otherwise the connection ends
    with the transport.

    Args:
        address: Address of the folder.
        options: Options for reading from the server.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self._address = address
        self._options = options
        self._threads: dict[int, _ConnectionThread] = {}  # by process
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Self], tuple[Address, RemoteOptions]]:
        return type(self), (self._address, self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        thread = self._threads.pop(os.getpid(), None)
        if thread is not None:
            thread.end()

    @override
    def get(self, name: str, path: Path, most_bytes: int) -> None:
        self.call(lambda connection: connection.get(name, path, most_bytes))

    @override
    def put(self, path: Path, name: str) -> None:
        if self._address.scheme in WEB:
            raise ConfigError(
                f"{self}: web servers are read-only; write to s3://... or a folder, and serve that"
            )
        self.call(lambda connection: connection.put(path, name))

    @override
    def list_sizes(self, folder: str) -> dict[str, int]:
        return self.call(lambda connection: connection.list_sizes(folder))

    def put_all(self, paths: Sequence[Path], folder: Path) -> None:
        """Copy local files there, several at a time, with their paths relative to a folder."""

        async def put_each(connection: Connection) -> None:
            async def put(path: Path) -> None:
                await connection.put(path, path.relative_to(folder).as_posix())

            await call_each(put, paths, connection.options.connections)

        self.call(put_each)

    def list_times(self, scope: Scope) -> dict[str, float]:
        """Return the time when each file of a scope was written, seconds since 1970, by its path."""
        files = self.call(lambda connection: connection.list_files(scope))
        return {file.name: file.mtime_s for file in files}

    @override
    def __str__(self) -> str:
        return str(self._address)

    def call(self, make: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine that is made with the open connection, and return its result.

        Raises:
            UnreachableError: The options forbid asking the server.
            LitDataError: Error of the coroutine.
        """
        if self._options.offline == "always":
            raise UnreachableError(
                f"{self}: data.remote.offline=always, but not all of it is on this machine"
            )
        with self._lock:
            # A forked child does not have the thread that would answer.
            thread = self._threads.get(os.getpid())
            if thread is None:
                thread = _ConnectionThread(_connect(self._address, self._options))
                self._threads[os.getpid()] = thread
                weakref.finalize(self, thread.end)
        return thread.call(make)


class _ConnectionThread:
    """A thread with an event loop and an open connection, for calls of other threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lit_data remote", daemon=True)
        self._thread.start()

    def call(self, make: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        loop = self._loop.result()
        future = asyncio.run_coroutine_threadsafe(make(self._connection), loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C also
            future.cancel()
            raise

    def end(self) -> None:
        """Cancel calls in progress and close the connection."""
        if not self._thread.is_alive():  # it has ended, or this is a fork
            return
        with suppress(Exception):  # it was never open, or is closed
            self._loop.result().call_soon_threadsafe(self._closing.set)
        self._thread.join(_ENDING_S)

    def _run(self) -> None:
        with quiet_clients():
            asyncio.run(self._serve())  # at its end it cancels calls in progress

    async def _serve(self) -> None:
        try:
            await self._connection.open()
        except Exception as error:
            self._loop.set_exception(error)
            return
        self._loop.set_result(asyncio.get_running_loop())
        try:
            await self._closing.wait()
        finally:
            await self._connection.close()


def _connect(address: Address, options: RemoteOptions) -> Connection:
    """Return the unopened connection for an address."""
    if address.scheme in S3:
        return S3Connection(address, options)
    if address.scheme in WEB:
        return WebConnection(address, options)
    return ListedConnection(address, options)


@contextmanager
def quiet_clients() -> Iterator[None]:
    """Keep clients from logging requests, because their headers contain tokens.

    This holds even if everything else is logged. Several threads may use it at a time: it ends with
    the last of them.
    """
    keeper = object()
    with _quieting:
        if not keepers:
            for name in TALKATIVE:
                logger = logging.getLogger(name)
                _levels_before[name] = logger.level
                logger.setLevel(max(logger.level, logging.WARNING))
        keepers.add(keeper)
    try:
        yield
    finally:
        with _quieting:
            keepers.discard(keeper)
            if not keepers:
                for name, level in _levels_before.items():
                    logging.getLogger(name).setLevel(level)
