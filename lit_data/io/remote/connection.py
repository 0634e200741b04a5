"""An open connection to a folder on a server: what it holds, and the bytes of one file."""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from lit_data.errors import ConfigError
from lit_data.io.remote.address import WEB, Address
from lit_data.io.remote.faults import insist
from lit_data.io.remote.options import RemoteOptions
from lit_data.io.remote.scope import Scope

MAX_LIST_BYTES: Final = 256 * 2**20
"""The largest list of files or index page that is read."""

TALKATIVE: Final = (
    "botocore",
    "aiobotocore",
    "s3fs",
    "fsspec",
    "aiohttp",
    "urllib3",
    "asyncio",
    "boto3",
)
_PACKAGES: Final = {"s3": "s3fs", "s3a": "s3fs"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Name, size and checksums of a file, as its server states them.

    Args:
        name: Path below the root.
        size_bytes: Its size.
        version: Changes with its content: a sum, an ETag or a time; empty where the server states
            none.
        mtime_s: When it was last changed, seconds since 1970; 0 where the server does not say.
        md5: Hexadecimal, where it is known before the file is read.
        sha256: The same.
    """

    name: str
    size_bytes: int
    version: str
    mtime_s: int
    md5: str | None = None
    sha256: str | None = None


class Connection(ABC):
    """A folder on a server, open for reading; an asynchronous context manager.

    Args:
        address: Of the folder.
        options: How it is read.

    Raises:
        ConfigError: fsspec knows no such scheme, or a package is missing.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self.address, self.options = address, options
        self._class = _find_class(address.scheme)
        self._fs: Any = None

    async def __aenter__(self) -> Self:
        settings = self._class._get_kwargs_from_urls(self.address.url) | self.choose_settings(
            self._read_conf()
        )
        if self._class.async_impl:
            settings["asynchronous"] = True
        self._fs = self._class(skip_instance_cache=True, use_listings_cache=False, **settings)
        self.adapt(self._fs)
        return self

    async def __aexit__(self, *args: object) -> None:
        session: Any = getattr(self._fs, "_s3", None) or getattr(self._fs, "_session", None)
        if self._class.async_impl and hasattr(session, "close"):
            with suppress(Exception):
                await session.close()

    @abstractmethod
    def choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the file system, from those of the user's configuration of fsspec."""

    def adapt(self, fs: Any) -> None:  # noqa: ANN401, B027 - fsspec has no types; most need nothing
        """Set what the arguments of a file system cannot."""

    @abstractmethod
    async def list_files(self, scope: Scope) -> Sequence[RemoteFile]:
        """The wanted files, in no order, and with whatever names.

        Raises:
            DataError: There is no such folder, or it may not be read.
        """

    async def is_sum(self, file: RemoteFile) -> bool:
        """Return True if the stated MD5 sum is that of a file's content after all."""
        return file.md5 is not None

    async def read(self, name: str) -> bytes:
        """The content of a small file.

        Raises:
            DataError: It is not there.
        """
        content: bytes = await self.insist(lambda: self.call("cat_file", self.place(name)), name)
        return content

    async def fetch(self, name: str, path: Path, tell: Callable[[int], None]) -> None:
        """Copy a file to a local one, once; raises whatever the client does.

        Args:
            name: Path below the root.
            path: A new local file.
            tell: Called with the number of new bytes.
        """
        pulse = _Pulse(tell)
        await _while_alive(
            self.call("get_file", self.place(name), str(path), callback=pulse), pulse, self.options
        )

    async def put(self, path: Path, name: str) -> None:
        """Copy a local file to the server, whole.

        Raises:
            DataError: It may not be written there.
        """
        await self.insist(lambda: self.call("put_file", str(path), self.place(name)), name)

    async def list_sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file of a folder below the root, by its path below that folder."""
        root = self.place(folder)
        infos: dict[str, Any] = await self.insist(
            lambda: self.call("find", root, detail=True), folder
        )
        return {
            path.removeprefix(root).removeprefix("/"): info["size"]
            for path, info in infos.items()
            if info["type"] == "file" and path != root
        }

    @abstractmethod
    def place(self, name: str) -> str:
        """A file as the file system names it."""

    async def call(self, method: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - fsspec has no types
        """Call a method of the file system, in a thread if it is not asynchronous."""
        if self._class.async_impl:
            return await getattr(self._fs, f"_{method}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self._fs, method), *args, **kwargs)

    async def insist(self, call: Callable[[], Awaitable[Any]], name: str = "") -> Any:  # noqa: ANN401 - as `call`
        """Try again while errors pass; how long one try may take without a byte is the client's setting."""
        return await insist(
            call, self.address.name(name) if name else str(self.address), self.options
        )

    def _read_conf(self) -> dict[str, Any]:
        """The user's own configuration of fsspec, from its files and the environment."""
        from fsspec.config import conf  # type: ignore[import-untyped]

        protocols = (
            self._class.protocol
            if isinstance(self._class.protocol, tuple | list)
            else (self._class.protocol,)
        )
        merged: dict[str, Any] = {}
        for protocol in protocols:
            merged |= conf.get(protocol, {})
        return merged


class _Pulse:
    """The part of fsspec's callbacks that tells of new bytes."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.beats, self._tell = 0, tell

    def set_size(self, size: int | None) -> None:
        """The size is known already."""

    def relative_update(self, inc: int = 1) -> None:
        """Some bytes arrived."""
        self.beats += inc > 0
        self._tell(inc)


async def _while_alive(read: Awaitable[None], pulse: _Pulse, options: RemoteOptions) -> None:
    """Wait for a read for as long as bytes arrive, however long it is; clients limit that each in another way."""
    task, seen = asyncio.ensure_future(read), -1
    try:
        while not task.done():
            if pulse.beats == seen:
                raise TimeoutError
            seen = pulse.beats
            await asyncio.wait({task}, timeout=options.timeout_s)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
    await task


keepers: set[object] = set()
_levels_before: dict[str, int] = {}
_quieting = threading.Lock()


@contextmanager
def quiet_clients() -> Iterator[None]:
    """Keep clients from logging requests, whose headers hold tokens.

    Also where everything else is logged.

    Several threads may ask for it: it ends with the last of them.
    """
    keeper = object()
    with _quieting:
        if not keepers:
            _levels_before.update((name, logging.getLogger(name).level) for name in TALKATIVE)
            for name, level in _levels_before.items():
                logging.getLogger(name).setLevel(max(level, logging.WARNING))
        keepers.add(keeper)
    try:
        yield
    finally:
        with _quieting:
            keepers.discard(keeper)
            if not keepers:
                for name, level in _levels_before.items():
                    logging.getLogger(name).setLevel(level)


def _find_class(scheme: str) -> Any:  # noqa: ANN401 - fsspec has no types
    import fsspec  # type: ignore[import-untyped]

    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError:
        known = ", ".join(f"{name}://" for name in ("s3", *WEB, "gs", "abfs", "sftp", "memory"))
        raise ConfigError(
            f"data.root={scheme}://...: fsspec knows no such scheme; give one such as {known}"
        ) from None
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else str(error).splitlines()[0]
        raise ConfigError(
            f"data.root={scheme}://... needs a package that is not installed: {hint}"
        ) from None
