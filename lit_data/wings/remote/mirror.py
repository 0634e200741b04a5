"""A local folder with the files of a folder on a server.

There are several reasons for a mirror instead of reads from the server while training. The
decoders, their strict second reading, CRC checks and memory maps need files. Forked workers must
not have a connection. A fault of the network shows before the first epoch, not during the fifth.
Each file gets its name once it is complete and checked. Its time is made from the server's version
of it, so that decoded stores detect changes.
"""

import logging
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from lit_data.core.addresses import Address, RemoteOptions, is_remote, parse_address
from lit_data.core.errors import ConfigError, DataError, StoreError, StoreSpaceError, show_path
from lit_data.core.files import describe_unwritable, short_digest
from lit_data.core.progress import ProgressBar
from lit_data.core.temp import build_lock, sweep, temp_folder
from lit_data.images.scope import Scope, find_fault
from lit_data.wings.remote.connection import Connection, RemoteFile
from lit_data.wings.remote.faults import UnreachableError
from lit_data.wings.remote.fetching import Fetcher, Manifest
from lit_data.wings.remote.transport import ServerTransport
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_WAIT_S = 24 * 3600
"""Time to wait for another process that fills the same mirror and shows that it is alive."""


class Root:
    """A local folder, or the mirror of a folder on a server, which is filled at first use.

    Args:
        root: A local path, or an address such as ``s3://bucket/folder`` or ``https://host/folder``.
        mirrors: Folder of the mirrors.
        options: Options for reading from a server.
        scope: The wanted files; all by default.

    Raises:
        ConfigError: The address contains credentials, or is not valid.
    """

    def __init__(
        self, root: str, mirrors: Path, options: RemoteOptions, scope: Scope | None = None
    ) -> None:
        self._local = Path(root)
        self._mirror: Mirror | None = None  # also None once it was opened
        if is_remote(root):
            self._mirror = Mirror(parse_address(root), mirrors, options, scope or Scope())

    @property
    def folder(self) -> Path:
        """Return the local folder of a root.

        For a server it is a complete copy; the server is not asked for changes.

        Raises:
            ConfigError: The files are larger than allowed.
            DataError: The server cannot be reached, or files are missing, forbidden or damaged.
            StoreError: The mirror cannot be written.
        """
        self._open(refresh=False)
        return self._local

    def refresh(self) -> None:
        """Ask a server for changes, once, because an opened mirror must not change under its readers.

        Raises:
            LitDataError: As for `folder`.
        """
        self._open(refresh=True)

    def _open(self, *, refresh: bool) -> None:
        if self._mirror is not None:
            self._local = self._mirror.open(refresh=refresh)
            self._mirror = None


class Mirror:
    """The mirror of one folder on a server.

    Args:
        address: Address of the folder.
        mirrors: Folder of the mirrors.
        options: Options for reading from the server.
        scope: The wanted files; those of the same folder that other datasets want are kept.
    """

    def __init__(
        self, address: Address, mirrors: Path, options: RemoteOptions, scope: Scope
    ) -> None:
        self.address = address
        self.options = options
        self.scope = scope
        self._identity = f"{address.url} {options.endpoint_url or ''}"
        self.shelf = mirrors / f"{address.slug}-{short_digest(self._identity)}"
        self.folder = self.shelf / address.slug

    def open(self, *, refresh: bool) -> Path:
        """Return the folder, after filling or updating it if necessary.

        Args:
            refresh: Ask the server for changes; otherwise a complete mirror is used as it is,
                without a connection.

        Raises:
            ConfigError: The files are larger than allowed.
            DataError: The server cannot be reached, or files are missing, forbidden or damaged.
            StoreError: A folder of the mirror is a link, belongs to another user, or cannot be
                written.
        """
        if self.options.offline == "always" or not refresh:
            if self._is_complete():
                return self.folder
            if self.options.offline == "always":
                raise DataError(
                    f"{self.address}: remote.offline=always, and there is no complete mirror in "
                    f"{self._shown}"
                )
        try:
            # Before anything is written.
            _check_real((self.shelf.parent, self.shelf, self.folder))
            self.folder.mkdir(parents=True, exist_ok=True)
            with build_lock(self.shelf, wait_s=_WAIT_S, is_done=lambda: False):
                # Another process may have filled it while this one waited.
                if refresh or not self._is_complete():
                    sweep(self.shelf)
                    self._update()
        except OSError as error:
            content = f"the mirror of {self.address}"
            raise StoreError(describe_unwritable(self.folder, content, error)) from error
        return self.folder

    def _update(self) -> None:
        try:
            with (
                temp_folder(self.shelf) as temp,
                ServerTransport(self.address, self.options) as server,
            ):
                server.call(partial(self._bring_up_to_date, temp))
        except UnreachableError as error:
            if self.options.offline == "error" or not self._is_complete():
                raise
            log.warning(
                "%s; continuing with the complete mirror in %s, which may be out of date",
                error,
                self._shown,
            )

    async def _bring_up_to_date(self, temp: Path, connection: Connection) -> None:
        files = {file.name: file for file in await connection.list_dataset(self.scope)}
        manifest = Manifest(self.shelf, self._identity)
        inner_folders = _list_folders(self.folder, [*files, *manifest.entries])
        _check_real(folder for folder in inner_folders if folder.is_symlink())
        todo = [file for file in files.values() if not self._is_current(file, manifest)]
        gone = [name for name in manifest.entries if name not in files and self.scope.wants(name)]
        self._check_sizes(files, todo, len(gone))
        if todo or gone:
            self._remove(gone)
            # First, so that after a kill the record still has the remaining files.
            manifest.begin(gone)
        total_bytes = sum(file.size_bytes for file in todo)
        with ProgressBar("reading", total_bytes, in_bytes=True) as bar:
            fetcher = Fetcher(connection, manifest, folder=self.folder, temp=temp, bar=bar)
            await fetcher.run(todo)
        manifest.finish(self.scope.key, len(files))

    def _is_current(self, file: RemoteFile, manifest: Manifest) -> bool:
        entry = manifest.entries.get(file.name)
        if entry is None or (entry.version, entry.size_bytes) != (file.version, file.size_bytes):
            return False
        return entry.is_at(self.folder / file.name)

    def _check_sizes(
        self, files: Mapping[str, RemoteFile], todo: Sequence[RemoteFile], gone: int
    ) -> None:
        """Refuse files that are too large, before anything is read or removed, and log the plan.

        Raises:
            ConfigError: The files are larger than the options allow.
            DataError: There are no files.
            StoreSpaceError: The files do not fit on the disk.
        """
        if not files:
            raise DataError(
                f"{self.address}: no file there matches {self.scope.key}; check data.root"
            )
        total_bytes = sum(file.size_bytes for file in files.values())
        todo_bytes = sum(file.size_bytes for file in todo)
        most_bytes = self.options.max_bytes
        if most_bytes is not None and total_bytes > most_bytes:
            raise ConfigError(
                f"{self.address}: {counted(len(files), 'file')} with {decimal(total_bytes)} in total "
                f"({total_bytes} bytes), more than data.remote.max_bytes={most_bytes} ({decimal(most_bytes)}); "
                "raise it, or narrow data.patterns"
            )
        # Old versions are replaced one by one, so their size is not counted.
        free_bytes = shutil.disk_usage(self.shelf).free
        if todo_bytes > free_bytes:
            raise StoreSpaceError(
                f"{self._shown}: no space for the mirror of {self.address}: it needs "
                f"{decimal(todo_bytes)}, and {decimal(free_bytes)} is free; free some space, or "
                "choose another folder with paths.cache=<folder>"
            )
        log.info(
            "%s: %s, %s; %d to read (%s), %d gone; mirror in %s",
            self.address,
            counted(len(files), "file"),
            decimal(total_bytes),
            len(todo),
            decimal(todo_bytes),
            gone,
            self._shown,
        )
        unversioned = sum(not file.version for file in files.values())
        if unversioned:
            log.warning(
                "%s: for %s the server gives neither ETag nor time, so changes of equal "
                "size are not noticed",
                self.address,
                counted(unversioned, "file"),
            )

    def _is_complete(self) -> bool:
        """Return True if all files of the scope exist, as the server last listed them."""
        manifest = Manifest(self.shelf, self._identity)
        names = [name for name in manifest.entries if self.scope.wants(name)]
        if manifest.complete.get(self.scope.key) != len(names):
            return False
        for name in names:
            # A record that somebody changed may contain names outside the folder.
            if find_fault(name) or not manifest.entries[name].is_at(self.folder / name):
                return False
        return True

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files that the record lists, and folders that become empty."""
        for name in names:
            if find_fault(name) is not None:
                continue  # as in `_is_complete`
            path = self.folder / name
            path.unlink(missing_ok=True)
            with suppress(OSError):
                # From the inside out, until one is not empty.
                for folder in path.parents[: name.count("/")]:
                    folder.rmdir()

    @property
    def _shown(self) -> str:
        return show_path(self.shelf)


def _list_folders(root: Path, names: Iterable[str]) -> set[Path]:
    """Return the folders in a root that contain files of these names."""
    folders: set[Path] = set()
    for name in {name.rpartition("/")[0] for name in names}:
        if name and find_fault(name) is None:
            folder = root / name
            folders.update((folder, *folder.parents[: name.count("/")]))
    return folders


def _check_real(folders: Iterable[Path]) -> None:
    """Refuse links and folders of other users, because files are removed and written there.

    Raises:
        StoreError: A folder is a link, or does not belong to this user.
    """
    for folder in folders:
        if not os.path.lexists(folder):
            continue
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode):
            what = "a link"
        elif not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            what = "not a folder of this user"
        else:
            continue
        raise StoreError(
            f"{show_path(folder)} is {what}, but a mirror needs its own folders: remove it, or "
            "choose another folder with paths.cache=<folder>"
        )
