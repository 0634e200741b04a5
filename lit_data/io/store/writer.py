"""Writing the files of a store: under new names only, with their space reserved, and down to the disk at the end."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from lit_data.errors import StoreError, StoreSpaceError, show_path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Create a file that must not exist yet, and bring it to the disk at the end.

    Args:
        path: Where; no link is followed there.

    Yields:
        A descriptor open for writing.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Write all of the data, however small the pieces are that the system takes."""
    rest = data.cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]


def reserve(fd: int, size_bytes: int) -> None:
    """Reserve the space of a file where the system can, so that a full disk shows before the work and not after it."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        # Some mounts cannot reserve; there a full disk shows at the write that meets it.
        if error.errno not in _NO_RESERVATION:
            raise


def keep_private(path: Path, sources: Iterable[str]) -> None:
    """Let nobody read a store, file or folder, who may not read all of its sources."""
    allowed = 0o777
    for source in sources:
        allowed &= os.stat(source).st_mode  # noqa: PTH116 - there may be a million
    hidden = ~allowed & 0o044
    path.chmod(path.stat().st_mode & 0o777 & ~(hidden | hidden >> 2))  # of a folder also who may enter it


@contextmanager
def explain_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of the file system into ours.

    Args:
        folder: Where a store is written.
        needed_bytes: What it takes.

    Raises:
        StoreSpaceError: The disk, the quota or the largest allowed file is too small.
        StoreError: The folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            free_bytes = shutil.disk_usage(folder).free
            raise no_space(folder, needed_bytes, free_bytes, str(error.strerror)) from error
        hint = "check the path and the disk"
        if error.errno in _NOT_ALLOWED:
            hint = "make it writable, or choose another folder with paths.cache=<folder>"
        raise StoreError(
            f"{show_path(folder)}: a decoded store cannot be written there ({error.strerror}); {hint}"
        ) from error


def no_space(folder: Path, needed_bytes: int, free_bytes: int, reason: str, hint: str = "") -> StoreSpaceError:
    """Make the error for a disk without room; the hint is one more way out."""
    return StoreSpaceError(
        f"{show_path(folder)}: no room for the decoded store ({reason}): it needs {decimal(needed_bytes)}, free are "
        f"{decimal(free_bytes)}; free some space, or choose another folder with paths.cache=<folder>{hint}"
    )
