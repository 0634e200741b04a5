"""Atomic writes of files, and reads that accept only regular files."""

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lit_data.core.errors import ConfigError, DataError, StoreError, show_path
from lit_inspect.cells import plain_cell
from lit_inspect.replacement import replacing_by_path

PART = re.compile(r"\.lit_data-[0-9a-f]{16}\.part")
"""Pattern of the names of unfinished files, which an interrupted run leaves over."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


def describe_unwritable(folder: Path, content: str, error: OSError) -> str:
    """Describe why something cannot be written into a folder of the cache, and what to do."""
    return (
        f"{show_path(folder)}: {content} cannot be written there ({error.strerror}); "
        f"{_find_cure(error)}, or choose another folder with paths.cache=<folder>"
    )


def _find_cure(error: OSError) -> str:
    if error.errno in NO_SPACE:
        return "free some space"
    if error.errno in _NOT_ALLOWED:
        return "make it writable"
    if error.errno in _IN_THE_WAY:
        return "remove what is in its place"
    return "check the path and the disk"


def find_crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of bytes, by libdeflate at ten times the speed of zlib.

    Args:
        data: The bytes; those of an array of any shape are contiguous.
        before: CRC-32 of the bytes in front of them.
    """
    import imagecodecs  # not at the top: `--help` needs none

    checksum: Any = imagecodecs.deflate_crc32
    return int(checksum(data, before))


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> io.BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or a device in its place.

    Args:
        path: Path of the file.
        links: Allow the path itself to be a link.

    Raises:
        OSError: The file cannot be opened.
        DataError: The path is not a regular file; the message says what it is, without its name.
    """
    flags = _NO_WAIT if links else _NO_WAIT | _NO_LINK
    return open(path, "rb", opener=partial(_open_regular, flags))


def _open_regular(more_flags: int, path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | more_flags)
    except OSError:
        with suppress(OSError):  # a socket cannot be opened, nor a folder on Windows
            check_kind(Path(path).stat().st_mode)
        raise
    try:
        check_kind(os.fstat(descriptor).st_mode)
    except DataError:
        os.close(descriptor)
        raise
    return descriptor


def check_kind(mode: int) -> None:
    """Refuse anything other than a regular file.

    Args:
        mode: Mode from `os.stat`.

    Raises:
        DataError: The path is not a regular file; the message says what it is, without its name.
    """
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        raise DataError(f"not a regular file ({_KINDS.get(kind, 'of unknown kind')})")


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return True if anything has this name, even a broken link, which its reader will report."""
    return os.path.lexists(path)


def refuse_links(folder: Path, key: str) -> None:
    """Refuse a folder with links, through which files elsewhere would be overwritten.

    Links named ``*.ckpt`` are allowed, since checkpoints are never overwritten.

    Args:
        folder: The folder, which may not be trusted.
        key: Key of the option with the folder.

    Raises:
        ConfigError: There is a link; the error names the first.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not name.endswith(".ckpt"):
                raise ConfigError(
                    f"{key}={show_path(folder)} holds a link, "
                    f"{show_path(path.relative_to(folder))} to {show_path(path.readlink())}: "
                    f"nothing is written through links; remove it, or give another {key}"
                )


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` at the end, and is removed after an error.

    Args:
        path: Path of the file, whose folder exists; a link there is not followed.
        sync: Flush the file and its name to the disk, so that it survives a crash of the machine.
            Without it, the file is still safe if the program is killed, and thousands of small
            files are written faster.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing_by_path(path) as part, open(part, "xb", opener=_create) as file:
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
    if sync:
        sync_folder(path.parent)


def _create(path: str, flags: int) -> int:
    """Create a file that only its owner and group may write, whatever the umask is."""
    return os.open(path, flags, 0o664)


def try_writing(folder: Path) -> None:
    """Create a file in a folder and remove it, to check that the folder can be written.

    Raises:
        OSError: The folder is read-only or full.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def explaining(
    path: Path, cure: str = "set paths.runs, or predict.folder for predictions"
) -> Iterator[None]:
    """Turn an error of the file system into one that names the result that could not be written.

    Args:
        path: Path of the result.
        cure: Option that writes it elsewhere.

    Raises:
        StoreError: The file system raised an error.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {show_path(path)}: {error.strerror}; {_find_cure(error)}, or {cure}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file; names that are not UTF-8 keep their bytes.

    Raises:
        StoreError: The file cannot be written.
    """
    with explaining(path), replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the mount supports it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def short_digest(text: str) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a text, whose paths may have any bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def find_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file.

    Raises:
        OSError: The file cannot be read.
        DataError: The path is not a regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically.

    Raises:
        StoreError: The file cannot be written.
    """
    write_text(path, _encode_json(content))


def write_json_once(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically, unless it exists, so that the first process wins.

    Raises:
        StoreError: The file cannot be written.
    """
    part = path.with_name(f".lit_data-{secrets.token_hex(8)}.part")
    with explaining(path):
        try:
            part.write_text(_encode_json(content), encoding="utf-8")
            with suppress(FileExistsError):
                _link(part, path)
        finally:
            part.unlink(missing_ok=True)


def _link(part: Path, path: Path) -> None:
    """Give a file its name if the name is free; without hard links, replace whatever has it.

    Raises:
        FileExistsError: The name is taken.
    """
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise
    except OSError:
        part.replace(path)


def _encode_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def remove_parts(folder: Path) -> None:
    """Remove the partial files that killed processes left below a folder.

    They have names that nothing else has; no link is followed or removed.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            if PART.fullmatch(name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink(missing_ok=True)


def flatten(tree: Any, above: str = "") -> dict[str, Any]:  # noqa: ANN401 - what JSON and YAML hold
    """Return the leaves of nested mappings by dotted keys; a list is a leaf."""
    if not isinstance(tree, Mapping):
        return {above: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{above}.{key}" if above else str(key))
    return leaves


def natural_key(name: str) -> list[tuple[str, int, str]]:
    """Return a sort key that orders numbers in names by value: 2 comes before 10."""
    return [(text, int(digits or -1), digits) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV atomically, with only the given columns of each row.

    Raises:
        StoreError: The file cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows({key: plain_cell(value) for key, value in row.items()} for row in rows)
    write_text(path, text.getvalue())
