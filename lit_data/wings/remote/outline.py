"""`Outline`: a folder on a server whose image contents are fetched only while they are needed.

Lists of files, and the keys made from their names, sizes and times, equal those of a mirror, but
only a few files at a time take space. If a stand-in is opened nevertheless, for example to read a
header, parts of the file are read from the server.
"""

import io
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self

from typing_extensions import Buffer, override

from lit_data.core.addresses import Address, RemoteOptions
from lit_data.core.errors import MachineError
from lit_data.core.opening import opening_with
from lit_data.core.progress import ProgressBar
from lit_data.core.temp import temp_folder
from lit_data.images.scope import Scope
from lit_data.wings.remote.connection import Connection, RemoteFile
from lit_data.wings.remote.faults import UnreachableError
from lit_data.wings.remote.fetching import Fetcher, Manifest, choose_mtime_ns
from lit_data.wings.remote.transport import ServerTransport
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_STAND_IN = 0o200  # mode of a file without its content, which nobody may read
_BLOCK_BYTES = 2**16  # read ahead of a header


class Outline:
    """A local folder with the files of a folder on a server, most of them without their content.

    Args:
        folder: Folder of the files, inside `scratch`.
        scratch: Folder for incomplete files.
        files: All files, by their paths relative to the folder.
        server: Transport to read from.
    """

    def __init__(
        self, folder: Path, scratch: Path, files: Sequence[RemoteFile], server: ServerTransport
    ) -> None:
        self.folder = folder
        self._scratch = scratch
        self._files = {file.name: file for file in files}
        self._server = server
        self._manifest = Manifest(scratch, str(server))
        self._manifest.begin()
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def open(
        cls,
        address: Address,
        options: RemoteOptions,
        *,
        scope: Scope,
        late_suffixes: tuple[str, ...],
        scratch: Path,
    ) -> Iterator[Self | None]:
        """List a folder and outline it in a local one, until the block ends.

        Args:
            address: Address of the folder.
            options: Options for reading from the server.
            scope: The files.
            late_suffixes: Suffixes of files whose content may be fetched later, as for names
                without a suffix; others, such as lists and annotations, are fetched immediately.
            scratch: A local folder.

        Yields:
            The outline; None if most of it would have to be fetched immediately.

        Raises:
            DataError: The server cannot be reached, or the folder does not exist.
        """
        with temp_folder(scratch) as temp, ServerTransport(address, options) as server:
            files = server.call(lambda connection: connection.list_dataset(scope))
            early = [file for file in files if not _is_late(file.name, late_suffixes)]
            early_bytes = _count_bytes(early)
            is_small = options.max_bytes is None or early_bytes <= options.max_bytes
            if not is_small or 2 * early_bytes > _count_bytes(files):
                yield None
                return
            folder = temp / address.slug
            for parent in {(folder / file.name).parent for file in files}:
                parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                _put_stand_in(folder / file.name, file)
            outline = cls(folder, temp, files, server)
            log.info("%s: %s, read when needed", address, counted(len(files), "file"))
            beside = [str(folder / file.name) for file in early]
            with opening_with(folder, outline.open_file), outline.holding(beside):
                yield outline

    @contextmanager
    def holding(self, paths: Iterable[str]) -> Iterator[None]:
        """Have the content of files here while the block runs; files outside the folder are left alone.

        Raises:
            UnreachableError: The server does not answer any more.
            DataError: Files cannot be read, or differ from what the server states; all are listed.
        """
        prefix = f"{self.folder}/"
        names = {path.removeprefix(prefix) for path in paths if path.startswith(prefix)}
        names &= self._files.keys()
        with self._lock:
            new_names = [name for name in sorted(names) if not self._users[name]]
            self._users.update(names)
        try:
            # A file that two need at a time is not waited for, because images share no files.
            self._fetch(new_names)
            yield
        finally:
            with self._lock:
                self._users.subtract(names)
                unused = [name for name in names if not self._users[name]]
            for name in unused:
                _put_stand_in(self.folder / name, self._files[name])

    def open_file(self, path: Path) -> BinaryIO | None:
        """Open a file whose content is not here, reading from the server as needed; None if the content is here."""
        if not _is_stand_in(path):
            return None
        file = self._files[path.relative_to(self.folder).as_posix()]
        return io.BufferedReader(_RemoteReader(self._server, file), _BLOCK_BYTES)

    def _fetch(self, names: Sequence[str]) -> None:
        if not names:
            return
        files = [self._files[name] for name in names]

        async def run(temp: Path, connection: Connection) -> None:
            bar = ProgressBar("reading", 0, enabled=False)
            fetcher = Fetcher(connection, self._manifest, folder=self.folder, temp=temp, bar=bar)
            await fetcher.run(files)

        with temp_folder(self._scratch) as temp:
            self._server.call(partial(run, temp))


class _RemoteReader(io.RawIOBase):
    """A file on a server that is read in parts.

    Args:
        server: Transport to read from.
        file: The file.
    """

    def __init__(self, server: ServerTransport, file: RemoteFile) -> None:
        self.name = file.name
        self._server = server
        self._file = file
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        starts = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._file.size_bytes,
        }
        self._position = starts[whence] + offset
        return self._position

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        """Read as much as the buffer has room for.

        Raises:
            MachineError: The server does not answer.
            DataError: The file cannot be read there.
        """
        room = memoryview(buffer)
        begin, name = self._position, self._file.name
        end = min(begin + len(room), self._file.size_bytes)
        if end <= begin:
            return 0
        try:
            content = self._server.call(lambda connection: connection.read_range(name, begin, end))
        except UnreachableError as error:
            # If the file were called bad, it could be skipped permanently.
            raise MachineError(str(error)) from None
        room[: len(content)] = content
        self._position = end
        return len(content)


def _is_late(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return True for files with these suffixes, and for those without one, such as DICOM slices."""
    return name.lower().endswith(suffixes) or "." not in name.rpartition("/")[2]


def _count_bytes(files: Iterable[RemoteFile]) -> int:
    return sum(file.size_bytes for file in files)


def _is_stand_in(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == _STAND_IN


def _put_stand_in(path: Path, file: RemoteFile) -> None:
    """Replace a file by one that has the size and time of that on the server, but takes no space."""
    with path.open("wb") as stream:
        stream.truncate(file.size_bytes)
    path.chmod(_STAND_IN)
    mtime_ns = choose_mtime_ns(file)
    os.utime(path, ns=(mtime_ns, mtime_ns))
