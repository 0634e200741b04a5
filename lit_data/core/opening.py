"""Safe opening of files of the user, with errors that name the file."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from lit_data.core.errors import DataError, LitDataError, MachineError, escape, show_path
from lit_data.core.files import check_kind, open_regular
from lit_data.core.types import PathText

_AGAIN = "a network disk does not respond: try again"
_PASSING = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine has reached its limit of open files: stop other programs",
    errno.ENOMEM: "memory ran out: give this process more, or fewer workers",
} | dict.fromkeys(
    (
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
    ),
    _AGAIN,
)
"""Errors that are not the fault of the file, and what to do."""

_READ_BYTES = 64

Opener = Callable[[Path], BinaryIO | None]
_openers: dict[str, Opener] = {}


@contextmanager
def naming(path: PathText) -> Iterator[None]:
    """Turn every error inside the block into one that starts with the path.

    Raises:
        MachineError: File descriptors or memory ran out, or a network disk does not answer. If the
            file counted as bad, ``on_bad=skip`` would skip it permanently.
        DataError: The block raised any other error, from lit_data or a library.
    """
    name = show_path(path)
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error.__cause__
    except LitDataError:
        raise
    except OSError as error:
        if error.errno in _PASSING:
            raise MachineError(
                f"{name}: {_describe_os_error(error)} for now; {_PASSING[error.errno]}"
            ) from error
        raise DataError(f"{name}: {_describe_os_error(error)}") from error
    except Exception as error:  # libraries raise anything at all on damaged files
        raise DataError(
            f"{name}: cannot be read ({type(error).__name__}: {escape(str(error))[:200]})"
        ) from error


@contextmanager
def open_source(path: PathText) -> Iterator[BinaryIO]:
    """Open a regular file that is not empty; errors inside the block name it as in ``naming``.

    Raises:
        DataError: The file is missing, empty, unreadable, a broken link, or not a regular file (a
            named pipe is not waited for).
    """
    with naming(path), open_filled(path) as stream:
        yield stream


@contextmanager
def opening_with(folder: Path, opener: Opener) -> Iterator[None]:
    """Let `open_source` use an opener for the files below a folder while the block runs.

    Args:
        folder: Folder of files whose content may be remote.
        opener: Opens a file; returns None if its content is local.
    """
    _openers[f"{folder}/"] = opener
    try:
        yield
    finally:
        del _openers[f"{folder}/"]


def open_filled(path: PathText) -> BinaryIO:
    """Open a regular file that is not empty, without naming it in errors.

    Raises:
        DataError: The file is missing, empty, a broken link, or not a regular file.
        OSError: The file cannot be opened.
    """
    try:
        stream = open_binary(path)
    except OSError as error:
        if _is_lost(error) or error.errno == errno.ELOOP:
            raise DataError(describe_missing(path, error)) from error
        raise
    if stream.seek(0, os.SEEK_END) == 0:
        stream.close()
        raise DataError("0 bytes")
    stream.seek(0)
    return stream


def open_binary(path: PathText) -> BinaryIO:
    """Open a regular file for reading, local or remote; errors are those of `open_regular`."""
    for folder, opener in _openers.items():
        if str(path).startswith(folder):
            stream = opener(Path(path))
            if stream is not None:
                return stream
    return open_regular(path)


class Rationed(RawIOBase):
    """File with a limit on all bytes read, for parsers that a loop or a bomb would keep busy.

    Args:
        stream: The file, from its current position.
        most_bytes: Most bytes to read; a short read counts as 64 bytes, since each takes time.
    """

    def __init__(self, stream: BinaryIO, most_bytes: int) -> None:
        self._stream = stream
        self._left_bytes = most_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """As of any file."""
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        """As of any file.

        Raises:
            DataError: The limit is reached.
        """
        size = self._left_bytes if size < 0 else size
        self._left_bytes -= max(size, _READ_BYTES)
        if self._left_bytes < 0:
            raise DataError(
                "its header never ends: parts of it form a loop, or repeat the same bytes"
            )
        return self._stream.read(size)


def read_whole(stream: BinaryIO) -> bytes:
    """Read a file from its start."""
    # Given the size, a buffered stream reads in one piece and without a second copy.
    size_bytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return stream.read(size_bytes)


def read_within(path: PathText, most_bytes: int) -> bytes:
    """Return the content of a regular file of limited size.

    Args:
        path: Path of the file.
        most_bytes: Largest size of the file.

    Raises:
        DataError: As `open_source`, or the file is larger.
    """
    with open_source(path) as stream:
        data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise DataError(f"larger than the {most_bytes} bytes that such a file may have")
        return data


def decode_text(data: bytes) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        DataError: The text is in another encoding.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad_byte = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise DataError(
            f"not UTF-8 text ({bad_byte}; is it Latin-1 or a Windows encoding?); save it as UTF-8"
        ) from error


def check_regular(path: PathText) -> None:
    """Refuse a path that is not a regular file with content, for libraries that open files by name.

    Raises:
        DataError: The message says what the path is instead, without its name.
    """
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DataError(describe_missing(path, error)) from error
    check_kind(status.st_mode)
    if status.st_size == 0:
        raise DataError("0 bytes")


def describe_missing(path: PathText, error: OSError) -> str:
    """Describe why ``stat`` failed: a broken link, a missing file, or the answer of the system."""
    is_lost = _is_lost(error)
    if (is_lost or error.errno == errno.ELOOP) and Path(path).is_symlink():
        link = "a broken link" if is_lost else "a circular link,"
        return f"{link} to {show_path(Path(path).readlink())}"
    if is_lost:
        folder = show_path(nearest_existing(path))
        return f"no such file; the nearest existing folder is {folder}"
    return _describe_os_error(error)


def _is_lost(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError)


def nearest_existing(path: PathText) -> Path:
    """Return the deepest parent of a missing path that exists, for a message about a wrong name."""
    return next(parent for parent in Path(path).absolute().parents if parent.exists())


def _describe_os_error(error: OSError) -> str:
    if error.errno is None:
        return f"cannot be read ({type(error).__name__}: {escape(str(error))[:200]})"
    return f"cannot be read, {errno.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"
