"""A local folder with the files of a folder on a server.

A mirror rather than reads from the server while training: the decoders, their strict second
reading, CRC checks and memory maps need files; workers that are forked must hold no connection; and
a fault of the network shows before the first epoch, not in the middle of the fifth. Each file
appears under its name once it is whole and compared, with a time made from the server's version of
it, so that decoded stores notice what has changed.
"""

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from lit_data.errors import ConfigError, DataError, StoreError, StoreSpaceError, show_path
from lit_data.io.remote.address import WEB, Address
from lit_data.io.remote.connection import Connection, RemoteFile, quiet_clients
from lit_data.io.remote.connection_listed import S3, ListedConnection, S3Connection
from lit_data.io.remote.connection_web import WebConnection
from lit_data.io.remote.faults import UnreachableError
from lit_data.io.remote.fetching import BytesBar, Fetcher
from lit_data.io.remote.manifest import SUMS_NAME, Manifest
from lit_data.io.remote.options import RemoteOptions
from lit_data.io.remote.runner import run_apart
from lit_data.io.remote.scope import Scope, check_names, find_fault
from lit_data.io.temp import build_lock, sweep, temp_folder

log = logging.getLogger(__name__)


_WAIT_S: Final = 24 * 3600
"""For another process that fills the same mirror; it shows that it lives."""


class Mirror:
    """The mirror of one folder on a server.

    Args:
        address: Of the folder.
        mirrors: Where mirrors lie.
        options: How the server is read.
        scope: The wanted files; what other data sets want of the same folder stays.
    """

    def __init__(
        self, address: Address, mirrors: Path, options: RemoteOptions, scope: Scope
    ) -> None:
        self.address, self.options, self.scope = address, options, scope
        identity = f"{address.url} {options.endpoint_url or ''}"
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self.shelf = mirrors / f"{address.slug}-{digest}"
        self.folder = self.shelf / address.slug
        self._identity = identity

    def open(self, *, refresh: bool) -> Path:
        """The folder, after it was filled or brought up to date if need be.

        Args:
            refresh: Ask the server for changes; otherwise a complete mirror is taken as it is,
                without a connection.

        Raises:
            ConfigError: The files are more than allowed.
            StoreError: A folder of the mirror is a link, or somebody else's, or holds images that
                no server gave.
            DataError: The server cannot be reached, or files are missing, forbidden or damaged.
            StoreError: The mirror cannot be written.
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
            self._check_own()
            self.folder.mkdir(parents=True, exist_ok=True)
            with build_lock(self.shelf, wait_s=_WAIT_S, is_done=lambda: False):
                if refresh or not self._is_complete():
                    sweep(self.shelf)
                    with temp_folder(self.shelf) as temp, quiet_clients():
                        self._update(temp)
        except OSError as error:
            raise StoreError(
                f"{self._shown}: the mirror of {self.address} cannot be written there "
                f"({error.strerror}); make it writable, or choose another folder with "
                "paths.cache=<folder>"
            ) from error
        return self.folder

    def _update(self, temp: Path) -> None:
        try:
            run_apart(lambda: self._bring_up_to_date(temp))
        except UnreachableError as error:
            if self.options.offline == "error" or not self._is_complete():
                raise
            log.warning(
                "%s; going on with the complete mirror in %s, which may be out of date",
                error,
                self._shown,
            )

    async def _bring_up_to_date(self, temp: Path) -> None:
        async with connect(self.address, self.options) as connection:
            lists = (SUMS_NAME, self.options.file_list)  # no part of the set
            listed = [
                file for file in await connection.list_files(self.scope) if file.name not in lists
            ]
            check_names((file.name for file in listed), self.address)
            files = {file.name: file for file in listed}
            manifest = Manifest(self.shelf, self._identity)
            todo = [file for file in files.values() if not self._is_current(file, manifest)]
            gone = [
                name for name in manifest.entries if name not in files and self.scope.wants(name)
            ]
            self._check_strangers({*files, *manifest.entries})
            self._check_sizes(files, sum(file.size_bytes for file in todo), len(todo), len(gone))
            still_complete = {} if todo or gone else manifest.complete
            if todo or gone:
                # First, so that after a kill the record still knows what is left.
                self._remove(gone)
                manifest.forget(gone)
                manifest.begin()
            with BytesBar("reading", sum(file.size_bytes for file in todo)) as bar:
                await Fetcher(connection, manifest, folder=self.folder, temp=temp, bar=bar).run(
                    todo
                )
            manifest.finish(self.scope.key, len(files), kept=still_complete)

    def _is_current(self, file: RemoteFile, manifest: Manifest) -> bool:
        entry = manifest.entries.get(file.name)
        if entry is None or (entry.version, entry.size_bytes) != (file.version, file.size_bytes):
            return False
        return entry.is_at(self.folder / file.name)

    def _check_sizes(
        self, files: Mapping[str, RemoteFile], todo_bytes: int, todo: int, gone: int
    ) -> None:
        """Refuse what is too large, before anything is read or removed."""
        if not files:
            raise DataError(
                f"{self.address}: no file there is wanted; wanted are {self.scope.key}; check "
                "data.root"
            )
        total_bytes, most_bytes = (
            sum(file.size_bytes for file in files.values()),
            self.options.max_bytes,
        )
        if most_bytes is not None and total_bytes > most_bytes:
            raise ConfigError(
                f"{self.address}: {len(files)} files of {decimal(total_bytes)} ({total_bytes} "
                f"bytes) are more than data.remote.max_bytes={most_bytes} ({decimal(most_bytes)}); "
                "raise it, or narrow data.patterns"
            )
        free_bytes = shutil.disk_usage(self.shelf).free
        if todo_bytes > free_bytes:
            raise StoreSpaceError(
                f"{self._shown}: no room for the mirror of {self.address}: it needs "
                f"{decimal(todo_bytes)}, free are {decimal(free_bytes)}; free some space, or "
                "choose another folder with paths.cache=<folder>"
            )
        self._tell(files, total_bytes, f"{todo} to read ({decimal(todo_bytes)}), {gone} gone")

    def _tell(self, files: Mapping[str, RemoteFile], total_bytes: int, work: str) -> None:
        size = decimal(total_bytes)
        log.info(
            "%s: %d files, %s; %s; mirror in %s", self.address, len(files), size, work, self._shown
        )
        if unknown := sum(not file.version for file in files.values()):
            log.warning(
                "%s: of %d files the server states neither ETag nor time: changes of equal size "
                "are not noticed",
                self.address,
                unknown,
            )

    def _is_complete(self) -> bool:
        """Return True if all files of the scope are there, as the server last listed them."""
        manifest = Manifest(self.shelf, self._identity)
        entries = {
            name: entry for name, entry in manifest.entries.items() if self.scope.wants(name)
        }
        if manifest.complete.get(self.scope.key) != len(entries):
            return False
        return all(
            find_fault(name) is None and entry.is_at(self.folder / name)
            for name, entry in entries.items()
        )

    def _check_own(self) -> None:
        """Refuse links and other people's folders: what is removed or written there would be theirs."""
        for folder in (self.shelf.parent, self.shelf, self.folder):
            if not os.path.lexists(folder):
                continue
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                what = "a link" if stat.S_ISLNK(status.st_mode) else "no folder of this user"
                raise StoreError(
                    f"{show_path(folder)} is {what}, and a mirror lies in folders of its own: "
                    "remove it, or choose another folder with paths.cache=<folder>"
                )

    def _check_strangers(self, known: Set[str]) -> None:
        """Refuse links and wanted files that neither record nor server know; nothing that is not ours is removed."""
        strangers = [
            path
            for folder, folders, names in os.walk(self.folder)
            for path in (Path(folder) / name for name in (*folders, *names))
            if (path.is_symlink() and path.is_dir()) or self._is_stranger(path, known)
        ]
        if strangers:
            examples = ", ".join(map(show_path, strangers[:3])) + (
                " ..." if len(strangers) > 3 else ""
            )
            raise StoreError(
                f"{self._shown}: {len(strangers)} files of the mirror did not come from "
                f"{self.address} ({examples}): move them away, or remove the whole folder, and it "
                "is filled anew"
            )

    def _is_stranger(self, path: Path, known: Set[str]) -> bool:
        name = path.relative_to(self.folder).as_posix()
        return not path.is_dir() and name not in known and self.scope.wants(name)

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files that the record lists, and the folders that this leaves empty."""
        for name in names:
            if find_fault(name) is not None:
                continue  # a record that somebody changed may name files elsewhere
            path = self.folder / name
            path.unlink(missing_ok=True)
            with suppress(OSError):
                for folder in path.parents[: len(Path(name).parts) - 1]:
                    folder.rmdir()

    @property
    def _shown(self) -> str:
        return show_path(self.shelf)


def connect(address: Address, options: RemoteOptions) -> Connection:
    """The kind of connection that reads an address, not yet open."""
    if address.scheme in S3:
        return S3Connection(address, options)
    return (WebConnection if address.scheme in WEB else ListedConnection)(address, options)
