"""Untrusted files and folders: only regular files are read, and links are not followed when writing."""

import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import BoardError
from lit_inspect.replacement import replacing_by_path

_MOST_NAME_BYTES = 255
_UP = 2  # PNG filter: each byte minus the byte above it
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; a pipe or a device is refused before anything is read.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is not a regular file.
    """
    descriptor = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Replace an error of the file system by one line.

    Raises:
        BoardError: The file system raised an error.
    """
    try:
        yield
    except OSError as error:
        raise BoardError(f"cannot write {path}: {error.strerror}") from error


def make_folders(folder: Path, name: str) -> Path:
    """Create the folders of a file below a folder, and return the path of the file.

    Args:
        folder: Folder of the results; it may be a link itself.
        name: Name of the file below it, with forward slashes.

    Raises:
        BoardError: The folders cannot be created, or one of them is a link.
    """
    path = folder
    with writing(folder / name):
        for part in Path(name).parent.parts:
            path /= part
            path.mkdir(exist_ok=True)
            if path.is_symlink():
                raise BoardError(
                    f"{path} is a link, and nothing is written through links: remove it, or "
                    "choose another --out"
                )
    return path / Path(name).name


def fit_name(name: str, ending: str) -> str:
    """Return a name with an ending, shortened if its last part is too long for file systems.

    Args:
        name: Name with forward slashes; a last part that is too long is cut and ends with a digest.
        ending: Ending with the dot.
    """
    folder, slash, last = name.rpartition("/")
    most_bytes = _MOST_NAME_BYTES - len(ending)
    if len(os.fsencode(last)) > most_bytes:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        start = os.fsencode(last)[: most_bytes - len(digest) - 1].decode(errors="ignore")
        last = f"{start}-{digest}"
    return f"{folder}{slash}{last}{ending}"


@contextmanager
def replacing(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Open a new file that replaces a file below a folder at the end; after an error it is removed.

    Args:
        folder: Folder of the results.
        name: See `make_folders`, also for errors. A link with that name is replaced.
    """
    path = make_folders(folder, name)
    with writing(path), replacing_by_path(path) as part, part.open("xb") as file:
        yield file


def write_png(
    folder: Path, name: str, shape: tuple[int, int], parts: Iterable[NDArray[Any]]
) -> None:
    """Write a PNG part by part; after an error there is no file.

    Args:
        folder: Folder of the results.
        name: Name of the file, see `replacing`.
        shape: (height, width) px.
        parts: See `encode_png`.
    """
    with replacing(folder, name) as file:
        encode_png(file, shape, parts)


def encode_png(file: BinaryIO, shape: tuple[int, int], parts: Iterable[NDArray[Any]]) -> None:
    """Write a PNG part by part; speed is more important than size.

    Args:
        file: File to write to.
        shape: (height, width) px.
        parts: Rows from the top, [h, W] or [h, W, 1] uint8 or uint16, or [h, W, 3] in R, G, B.
    """
    packer = zlib.compressobj(1)
    above = np.zeros((1, 0), np.uint8)
    for number, part in enumerate(parts):
        if number == 0:
            file.write(b"\x89PNG\r\n\x1a\n")
            colours, bits = 2 if part.shape[2:] == (3,) else 0, 8 * part.itemsize
            header = struct.pack(">IIBBBBB", shape[1], shape[0], bits, colours, 0, 0, 0)
            _write_chunk(file, b"IHDR", header)
        big_endian = np.ascontiguousarray(part, part.dtype.newbyteorder(">"))
        rows = big_endian.view(np.uint8).reshape(len(part), -1)
        filtered = np.full((len(rows), rows.shape[1] + 1), _UP, np.uint8)
        filtered[:, 1:] = rows
        filtered[1:, 1:] -= rows[:-1]
        if above.size:
            filtered[:1, 1:] -= above
        _write_chunk(file, b"IDAT", packer.compress(filtered.data))
        above = rows[-1:]  # the row above the first row of the next part
    _write_chunk(file, b"IDAT", packer.flush())
    _write_chunk(file, b"IEND", b"")


def _write_chunk(file: BinaryIO, kind: bytes, data: bytes) -> None:
    if data or kind == b"IEND":  # the compressor may return nothing yet
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        file.write(struct.pack(">I", len(data)) + kind + data + checksum)
