"""An open connection to a folder on a server, to list its files and to read and write them.

Everything that asks a server is a coroutine of `Connection`; `lit_data.wings.remote.transport` runs
them.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from typing_extensions import override

from lit_data.core.addresses import WEB, Address, RemoteOptions
from lit_data.core.errors import ConfigError, DataError, first_line, list_problems
from lit_data.core.hosts import check_resolved
from lit_data.images.scope import SUMS_NAME, Scope, check_names, parse_list
from lit_data.wings.remote.faults import insist, too_large
from lit_inspect.counts import counted

T = TypeVar("T")
Item = TypeVar("Item")

MAX_LIST_BYTES = 256 * 2**20
"""Maximum size of a list of files or an index page."""

S3 = ("s3", "s3a")
_S3_OPTIONS = ("endpoint_url", "region", "anon")
# Names of checksums, versions and times of a file in file systems of fsspec.
_TAGS = ("ETag", "etag", "md5Hash", "md5", "content_md5", "checksum", "generation")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Name, size and checksums of a file, as its server states them.

    Args:
        name: Path relative to the root.
        size_bytes: Size of the file.
        version: Changes with the content: a checksum, an ETag or a time; empty if the server states
            none.
        mtime_s: Time of the last change, seconds since 1970; 0 if the server does not state it.
        md5: Hexadecimal checksum, if it is known before the file is read.
        sha256: The same.
    """

    name: str
    size_bytes: int
    version: str
    mtime_s: int
    md5: str | None = None
    sha256: str | None = None


class Connection(ABC):
    """A folder on a server, open for reading.

    Args:
        address: Address of the folder.
        options: Options for reading it.

    Raises:
        ConfigError: fsspec does not know the scheme, or a package is missing.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self.address = address
        self.options = options
        self._class = _find_class(address)
        self._fs: Any = None
        self._root = ""  # as the file system names it
        # Not those of the loop, which are also used to look up host names.
        self._threads = ThreadPoolExecutor(options.connections, "lit_data remote")

    async def open(self) -> None:
        """Make the client, without asking the server anything yet.

        Raises:
            ConfigError: Options do not suit this kind of server.
        """
        import fsspec  # type: ignore[import-untyped]

        settings = self._choose_settings(_read_configuration(self._class))
        if self._class.async_impl:
            settings["loop"] = asyncio.get_running_loop()  # or a thread of fsspec's own outlasts it
        settings |= {"skip_instance_cache": True, "use_listings_cache": False}
        self._fs, self._root = fsspec.url_to_fs(self.address.url, **settings)

    async def close(self) -> None:
        """Close the client."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if hasattr(self._fs, "set_session"):  # which returns the existing one
            with suppress(Exception):
                session = await self._fs.set_session()
                await session.close()

    @abstractmethod
    def _choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of the file system, based on the user's configuration of fsspec."""

    @abstractmethod
    async def list_files(self, scope: Scope) -> Sequence[RemoteFile]:
        """Return the files of a scope, in any order and with any names.

        Raises:
            DataError: The folder does not exist, or reading it is forbidden.
        """

    @abstractmethod
    def full_path(self, name: str) -> str:
        """Return the path of a file in the file system."""

    async def list_dataset(self, scope: Scope) -> list[RemoteFile]:
        """Return the files of a scope, without lists of files, which are not part of a dataset.

        Raises:
            DataError: The folder cannot be listed, or names of files are bad.
        """
        lists = (SUMS_NAME, self.options.file_list)
        files = [file for file in await self.list_files(scope) if file.name not in lists]
        check_names((file.name for file in files), self.address)
        return files

    async def is_sum(self, file: RemoteFile) -> bool:
        """Return True if the stated MD5 sum is really that of the file's content."""
        return file.md5 is not None

    async def get(self, name: str, path: Path, most_bytes: int) -> None:
        """Copy a file to a local one, with retries.

        Raises:
            DataError: The file does not exist, or is larger than allowed.
        """
        await self.insist(lambda: self.fetch(name, path, most_bytes), name)

    async def read(self, name: str) -> bytes:
        """Return the content of a list of files."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "list"
            await self.get(name, path, MAX_LIST_BYTES)
            return path.read_bytes()

    async def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes of a file from `begin` to `end`, excluded.

        Raises:
            DataError: The file is shorter.
        """
        path = self.full_path(name)
        call = partial(self._call, "cat_file", path, start=begin, end=end)
        content: bytes = await self.insist(call, name)
        if len(content) > end - begin:  # of a server without range requests
            content = content[begin:end]
        if len(content) != end - begin:
            raise DataError(f"{self.address.name(name)}: shorter than the server states")
        return content

    async def fetch(
        self, name: str, path: Path, most_bytes: int, count: Callable[[int], None] | None = None
    ) -> None:
        """Copy a file to a local one, without retries; raises any error of the client.

        Args:
            name: Path relative to the root.
            path: A local file.
            most_bytes: Maximum size.
            count: Called with the number of new bytes.

        Raises:
            DataError: The file is larger than allowed.
            TimeoutError: No bytes arrive for `timeout_s`; the total time is not limited.
        """
        too_many = too_large(self.address.name(name), most_bytes)
        loop, timeout_s = asyncio.get_running_loop(), self.options.timeout_s
        async with asyncio.timeout(timeout_s) as limit:

            def arrive(new_bytes: int) -> None:
                arrived.total_bytes += new_bytes
                if count is not None:
                    count(new_bytes)
                if arrived.total_bytes > most_bytes:  # immediately, before it fills the disk
                    raise too_many
                # Possibly from the thread of a client that is not asynchronous.
                loop.call_soon_threadsafe(_extend, limit, loop.time() + timeout_s)

            arrived = _Arrived(arrive)
            path.unlink(missing_ok=True)  # an abandoned try may still write
            await self._call("get_file", self.full_path(name), str(path), callback=arrived)
        if path.stat().st_size > most_bytes:
            raise too_many

    async def put(self, path: Path, name: str) -> None:
        """Copy a local file to the server, completely.

        Raises:
            DataError: Writing there is forbidden.
        """
        await self.insist(lambda: self._call("put_file", str(path), self.full_path(name)), name)

    async def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file of a folder, by its path relative to the folder."""
        root = self.full_path(folder)
        infos = await self._find(root, folder)
        sizes = {}
        for path, info in infos.items():
            if info["type"] == "file" and path != root:
                sizes[path.removeprefix(root).removeprefix("/")] = info["size"]
        return sizes

    async def _find(self, root: str, name: str = "") -> Any:  # noqa: ANN401 - as of `_call`
        """Return facts of each file in a folder, by its path."""
        return await self.insist(lambda: self._call("find", root, detail=True), name)

    async def insist(self, call: Callable[[], Awaitable[T]], name: str = "") -> T:
        """Retry after transient errors; see `lit_data.wings.remote.faults.insist`."""
        what = self.address.name(name) if name else str(self.address)
        return await insist(call, what, self.options)

    async def _call(self, method: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - fsspec has no types
        """Call a method of the file system in a thread; an asynchronous one uses our loop."""
        call = partial(getattr(self._fs, method), *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _refuse_s3_options(self, advice: str = "") -> None:
        for name in _S3_OPTIONS:
            if getattr(self.options, name):
                raise ConfigError(
                    f"remote.{name} is for S3, and data.root is {self.address.scheme}://...{advice}"
                )


class _Arrived:
    """A callback of fsspec, reduced to counting new bytes."""

    def __init__(self, arrive: Callable[[int], None]) -> None:
        self.total_bytes = 0
        self._arrive = arrive

    def set_size(self, size: int | None) -> None:
        """Do nothing, because the size is known already."""

    def relative_update(self, inc: int = 1) -> None:
        """Count new bytes."""
        self._arrive(inc)


def _extend(limit: asyncio.Timeout, end_s: float) -> None:
    with suppress(RuntimeError):  # the file has already arrived
        limit.reschedule(end_s)


class ListedConnection(Connection):
    """A folder of a file system that lists all its files with their sizes."""

    @override
    def _choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        self._refuse_s3_options(
            "; settings of other file systems belong to the configuration files of fsspec, see "
            "docs/remote.md"
        )
        return {}

    @override
    async def list_files(self, scope: Scope) -> Sequence[RemoteFile]:
        root = self.full_path("").rstrip("/")
        listed = await self._find(root)
        if root in listed and len(listed) == 1:
            raise DataError(f"{self.address} is a file: give its folder")
        infos: dict[str, Mapping[str, Any]] = {}
        for path, info in listed.items():
            name = path.removeprefix(root).removeprefix("/")
            # Consoles of S3 make folders as empty objects that end with a slash; the object of the
            # root has no name left.
            if info["type"] == "file" and name and not name.endswith("/"):
                infos[name] = info
        if not infos:
            raise DataError(f"{self.address}: no such folder, or it is empty; check data.root")
        sums = await self._read_sums(infos)
        return [
            self._describe(name, info, sums.get(name))
            for name, info in infos.items()
            if scope.wants(name)
        ]

    @override
    def full_path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    async def _read_sums(self, infos: Mapping[str, object]) -> Mapping[str, str | None]:
        name = self.options.file_list or SUMS_NAME
        if name not in infos and self.options.file_list is None:
            return {}
        list_address = self.address.name(name)
        sums = parse_list(await self.read(name), list_address)
        missing = sorted(sums.keys() - infos.keys())
        if missing:
            faults = [(self.address.name(file), "listed, but missing") for file in missing]
            headline = counted(
                len(missing),
                f"file of {list_address} is missing",
                f"files of {list_address} are missing",
            )
            raise list_problems(faults).make_error(headline)
        return sums

    def _describe(self, name: str, info: Mapping[str, Any], sha256: str | None) -> RemoteFile:
        size_bytes = info.get("size")
        if not isinstance(size_bytes, int):
            raise DataError(f"{self.address.name(name)}: the server states no size")
        tag = str(_first(info, _TAGS) or "").strip('"')
        time = _first(info, _TIMES)
        version = sha256 or tag or str(time or "")
        return RemoteFile(
            name, size_bytes, version, _read_seconds(time), self.find_md5(tag), sha256
        )

    def find_md5(self, tag: str) -> str | None:
        """Return the MD5 sum if the tag of a file is one."""
        return None


class S3Connection(ListedConnection):
    """A folder of an S3 bucket, or of another server that speaks S3."""

    @override
    async def open(self) -> None:
        if self.options.endpoint_url is not None:
            await check_resolved(self.options.endpoint_url, "remote.endpoint_url")
        await super().open()
        self._fs.retries = 1  # no argument sets it; only `insist` retries, or tries multiply

    @override
    def _choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        options = self.options
        client = dict(conf.get("client_kwargs") or {})
        if options.region is not None:
            client["region_name"] = options.region
        config = dict(conf.get("config_kwargs") or {}) | {
            "connect_timeout": options.timeout_s,
            "read_timeout": options.timeout_s,
            "max_pool_connections": options.connections,
            "retries": {"total_max_attempts": 1},
        }
        settings = {"client_kwargs": client, "config_kwargs": config, "max_concurrency": 1}
        if options.endpoint_url is not None:
            settings["endpoint_url"] = options.endpoint_url
        if options.anon:
            settings["anon"] = True
        return settings

    @override
    async def is_sum(self, file: RemoteFile) -> bool:
        """Ask for the headers of an object: if it has its own encryption key, its ETag is not a checksum."""
        bucket, _, key = self.full_path(file.name).partition("/")
        ask = partial(self._call, "call_s3", "head_object", Bucket=bucket, Key=key)
        head = await self.insist(ask, file.name)
        encryption = head.get("ServerSideEncryption", "")
        return "SSECustomerAlgorithm" not in head and not encryption.startswith("aws:kms")

    @override
    def find_md5(self, tag: str) -> str | None:
        """Return the ETag of an object if it was uploaded in one part, so that it is the MD5 sum."""
        return tag if len(tag) == 32 and _HEX.issuperset(tag) else None


async def call_each(
    call: Callable[[Item], Awaitable[T]], items: Sequence[Item], most: int
) -> list[T]:
    """Call for each item, and cancel all calls at the first error.

    Args:
        call: Returns the coroutine of an item.
        items: The items.
        most: Maximum number of calls at a time.

    Returns:
        The results, in the order of the items.
    """
    results: dict[int, T] = {}
    waiting = iter(enumerate(items))  # one for all

    async def work() -> None:
        for number, item in waiting:
            results[number] = await call(item)

    tasks = [asyncio.ensure_future(work()) for _ in range(min(most, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(len(items))]


def _find_class(address: Address) -> Any:  # noqa: ANN401 - fsspec has no types
    import fsspec

    scheme = address.scheme
    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError:
        known = ", ".join(f"{name}://" for name in ("s3", *WEB, "gs", "abfs", "sftp", "memory"))
        raise ConfigError(
            f"{address.key}={scheme}://...: fsspec does not know this scheme; use one such as "
            f"{known}"
        ) from None
    except ImportError as error:
        hint = "pip install s3fs" if scheme in S3 else first_line(error)
        raise ConfigError(
            f"{address.key}={scheme}://... needs a package that is not installed: {hint}"
        ) from None


def _read_configuration(file_system: Any) -> dict[str, Any]:  # noqa: ANN401 - a class of fsspec
    """Return the user's own arguments of a file system, from files of fsspec and the environment."""
    from fsspec.config import apply_config  # type: ignore[import-untyped]

    arguments: dict[str, Any] = apply_config(file_system, {})
    return arguments


def _first(info: Mapping[str, Any], keys: Sequence[str]) -> Any:  # noqa: ANN401 - of a client
    for key in keys:
        if info.get(key):
            return info[key]
    return None


def _read_seconds(time: object) -> int:
    if isinstance(time, datetime):
        return max(0, int(time.timestamp()))
    return max(0, int(time)) if isinstance(time, int | float) else 0
