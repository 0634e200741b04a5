"""Files of stores: flushed to the disk, mapped, and joined into an uncompressed tar."""

import ctypes
import errno
import mmap
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from rich.filesize import decimal

from lit_data.core.errors import (
    DataError,
    StoreCorruptError,
    StoreError,
    StoreSpaceError,
    show_path,
)
from lit_data.core.files import NO_SPACE, describe_unwritable, open_regular
from lit_data.core.types import Ints

_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

TAR_SUFFIX = ".tar"
_NO_TAR = (
    tarfile.TarError,
    ValueError,
    OverflowError,
    OSError,
    RecursionError,
    MemoryError,  # nested headers, and some that claim to be very long
)

_MOST_RANGES = 1024
"""Most ranges that the kernel takes at once (UIO_MAXIOV)."""


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Create a file that must not exist yet, and flush it to the disk at the end.

    Args:
        path: Path of the file; a link there is not followed.

    Yields:
        A descriptor that is open for writing.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Write all of the data, however small the pieces are that the system accepts."""
    rest = data.cast("B")
    while rest:  # after a signal, or on a nearly full disk, the system writes only a part
        rest = rest[os.write(fd, rest) :]


def reserve(fd: int, size_bytes: int) -> None:
    """Reserve the space of a file if the system can, so that a full disk is detected early."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        # Some mounts cannot reserve space; there, a full disk fails a later write.
        if error.errno not in _NO_RESERVATION:
            raise


def keep_private(path: Path, sources: Iterable[str]) -> None:
    """Restrict the permissions of a file or folder of a store to those of all its sources."""
    allowed = 0o777
    for source in sources:
        allowed &= os.stat(source).st_mode  # noqa: PTH116 - there may be a million
    # Group and others lose read permission, and for a folder also permission to enter it.
    hidden = ~allowed & 0o044
    path.chmod(path.stat().st_mode & 0o777 & ~(hidden | hidden >> 2))


@contextmanager
def explain_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of the file system into errors of stores.

    Args:
        folder: Folder that a store is written to.
        needed_bytes: Number of bytes that it takes.

    Raises:
        StoreSpaceError: The disk, the quota or the largest allowed file is too small.
        StoreError: The folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            free_bytes = shutil.disk_usage(folder).free
            raise no_space(folder, needed_bytes, free_bytes, str(error.strerror)) from error
        raise StoreError(describe_unwritable(folder, "a decoded store", error)) from error


def no_space(folder: Path, needed_bytes: int, free_bytes: int, reason: str) -> StoreSpaceError:
    """Make the error for a disk without enough space."""
    return StoreSpaceError(
        f"{show_path(folder)}: no space for the decoded store ({reason}): it needs "
        f"{decimal(needed_bytes)}, and {decimal(free_bytes)} is free; free some space, or choose "
        "another folder with paths.cache=<folder>"
    )


class Mapped(NamedTuple):
    """Map of a file, and an offset in it."""

    data: mmap.mmap
    begin: int


def read_ahead(data: mmap.mmap, address: int, begins: Ints, lengths: Ints) -> None:
    """Start to read ranges of a map into memory in parallel, without waiting for them.

    Args:
        data: The map.
        address: Address of its first byte.
        begins: [N] offset of each range in bytes, a multiple of the page size.
        lengths: [N] length of each range in bytes.
    """
    if not hasattr(data, "madvise") or _advise_at_once(address + begins, lengths):
        return
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        data.madvise(mmap.MADV_WILLNEED, begin, length)


def _advise_at_once(addresses: Ints, lengths: Ints) -> bool:
    """Start to read ranges ahead by one call, which releases the interpreter.

    Returns:
        False if the system has no such call, or does not allow it.
    """
    if advise_ranges is None or not hasattr(os, "pidfd_open"):
        return False
    ranges = np.stack((addresses, lengths), axis=1).astype(np.uintp)  # struct iovec
    try:
        process = _open_process(os.getpid())
    except OSError:
        return False
    for first in range(0, len(ranges), _MOST_RANGES):
        some = ranges[first : first + _MOST_RANGES]
        if advise_ranges(process, some.ctypes.data, len(some), mmap.MADV_WILLNEED, 0) < 0:
            return False
    return True


def _find_process_madvise() -> Callable[..., int] | None:
    """Return ``process_madvise`` of the C library (Linux 5.10, glibc 2.36), or None if it is missing."""
    signature = ctypes.CFUNCTYPE(
        ctypes.c_ssize_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_uint,
    )
    try:
        return signature(("process_madvise", ctypes.CDLL(None)))
    except (AttributeError, OSError):
        return None


advise_ranges = _find_process_madvise()


@lru_cache(maxsize=1)
def _open_process(pid: int) -> int:
    """Return a descriptor of a process by its number, so that a forked process gets its own."""
    return os.pidfd_open(pid)


def is_there(folder: Path) -> bool:
    """Return True if a store has been published, and False if that cannot be determined."""
    # Path.is_dir raises an error if a name is too long or a parent folder is not accessible.
    return os.path.isdir(folder)  # noqa: PTH112


def open_part(path: Path) -> BinaryIO:
    """Open a file of a store for reading.

    Raises:
        StoreError: The file cannot be opened.
        StoreCorruptError: The file is missing or not a regular file.
    """
    try:
        return open_regular(path)
    except DataError as error:
        raise corrupt(path, str(error)) from error
    except FileNotFoundError as error:
        raise corrupt(path, "expected a file, found nothing") from error
    except OSError as error:
        raise StoreError(
            f"{show_path(path)} cannot be read: {error.strerror}; check its permissions"
        ) from error


def map_file(path: Path, expected_bytes: int) -> mmap.mmap:
    """Map a file of a store for reading.

    Raises:
        StoreError: The file cannot be opened.
        StoreCorruptError: Its length differs from `meta.json`.
    """
    with open_part(path) as file:
        check_length(path, expected_bytes, os.fstat(file.fileno()).st_size)
        return mmap.mmap(file.fileno(), expected_bytes, access=mmap.ACCESS_READ)


def check_length(path: Path, expected_bytes: int, nbytes: int) -> None:
    """Refuse a file of a store whose length differs from `meta.json`.

    Raises:
        StoreCorruptError: The file is longer or shorter.
    """
    if nbytes != expected_bytes:
        raise corrupt(path, f"expected {expected_bytes} bytes, found {nbytes}")


def write_tar(files: Mapping[str, Path], target: Path) -> None:
    """Join several files into one tar, with the same bytes for the same files.

    Args:
        files: Files by their names in the tar.
        target: A new file, whose name ends with `TAR_SUFFIX`.
    """
    with (
        new_file(target) as fd,
        os.fdopen(os.dup(fd), "wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as content:
                tar.addfile(member, content)


@dataclass(frozen=True, slots=True)
class Tar:
    """Folder of files in one uncompressed tar.

    Attributes:
        path: Path of the tar.
        nbytes: Size of the tar in bytes.
        members: Offset and size of each file in the tar.
    """

    path: Path
    nbytes: int
    members: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, path: Path, most_files: int | None = None) -> Self:
        """Find the files in a tar.

        Args:
            path: Path of the tar.
            most_files: Largest number of files to find, since more take long; None for no limit.

        Raises:
            StoreError: The file cannot be opened.
            StoreCorruptError: The file is not a tar.
        """
        with open_part(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            files = []
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for number, member in enumerate(tar):
                        if number == most_files:
                            raise ValueError(f"more than {most_files} files")
                        if member.isreg():
                            files.append(member)
            except _NO_TAR as error:
                raise corrupt(path, f"no tar of a store ({error!s:.200})") from error
        members: dict[str, tuple[int, int]] = {}
        for member in files:
            # The tar is not trusted: members that reach past its end count as missing.
            begin = member.offset_data
            end = member.offset_data + member.size
            if 0 <= begin <= end <= nbytes:
                members[member.name] = begin, member.size
        return cls(path, nbytes, members)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read the beginning of a file, or nothing if it is missing."""
        begin, nbytes = self.members.get(name, (0, 0))
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(min(nbytes, most_bytes))


def corrupt(path: Path, problem: str) -> StoreCorruptError:
    """Make the error for a file of a store with wrong content."""
    folder = show_path(path.parent)
    return StoreCorruptError(
        f"{show_path(path)}: {problem}; delete the folder {folder} and run `lit-data prepare` again"
    )
