"""Volumes in NumPy's files: ``.npy`` by memory map, ``.npz`` unpacked slab by slab."""

import mmap
import os
import shutil
import tempfile
import zipfile
from typing import IO, Literal

import numpy as np

from lit_data.errors import DataError
from lit_data.io.images.npz import (
    MAX_HEADER_BYTES,
    NPY_LOCK,
    NpyHeader,
    check_directory,
    read_array_header,
)
from lit_data.io.source import check_regular, naming, open_source
from lit_data.io.volumes.hounsfield import StoredScale
from lit_data.io.volumes.volume import (
    FileVolume,
    SliceReader,
    Spacing,
    StreamSlices,
    Triple,
    check_unpacked,
)
from lit_data.types import Array

MAX_MEMBER_BYTES = 2**36
"""Of all members of an archive, unpacked; they are never in memory at once."""
SPACING_NAME = "spacing_mm"


def open_npy(path: str, nan_fill: float | None) -> FileVolume:
    """Open a ``.npy`` file by memory map as a volume (z, y, x).

    Args:
        path: The file.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: not a plain array of three axes, or damaged.
    """
    with open_source(path) as stream:
        header = read_array_header(stream, os.fstat(stream.fileno()).st_size)
        offset = stream.tell()
        slices = MappedSlices(stream.fileno(), header, offset, is_fortran=_is_fortran(stream))
        return FileVolume(path, slices, StoredScale(header.dtype), nan_fill=nan_fill)


def open_npz(path: str, key: str | None, nan_fill: float | None) -> FileVolume:
    """Open an array of an ``.npz`` archive as a volume (z, y, x).

    A member ``spacing_mm`` [3] is its spacing. An array in Fortran order is unpacked into a
    temporary file first, since its slices do not lie in one piece.

    Args:
        path: The archive.
        key: Name of the array; None takes the only one of three axes.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: damaged, no such array, or several to choose from.
    """
    check_regular(path)
    archive = zipfile.ZipFile(path)
    try:
        headers = read_directory(archive)
        member = archive.getinfo(f"{_choose(headers, key)}.npy")
        header = headers[member.filename[:-4]]
        slices = _open_member(archive, member, header)
        scale = StoredScale(header.dtype)
        return FileVolume(
            path, slices, scale, spacing_mm=_read_spacing(archive, headers), nan_fill=nan_fill
        )
    except BaseException:
        archive.close()
        raise


def read_directory(archive: zipfile.ZipFile) -> dict[str, NpyHeader]:
    """Read the headers of all arrays of an archive, and hold them against its directory.

    Returns:
        Each by its name.

    Raises:
        DataError: a member is no plain array, or not what the directory says.
    """
    members = archive.infolist()
    check_directory(members, MAX_MEMBER_BYTES)
    packed_bytes = sum(member.compress_size for member in members)
    check_unpacked(packed_bytes, sum(member.file_size for member in members))
    headers: dict[str, NpyHeader] = {}
    for member in members:
        with naming(member.filename), archive.open(member) as stream:
            headers[member.filename[:-4]] = read_array_header(stream, member.file_size)
    return headers


class MappedSlices:
    """Slices of a mapped file, of whose pages a volume of any size holds few.

    Args:
        fd: The file; may be closed afterwards.
        header: Of the array.
        offset: Where its values begin.
        is_fortran: Its first axis runs fastest.
    """

    def __init__(self, fd: int, header: NpyHeader, offset: int, *, is_fortran: bool) -> None:
        self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        order: Literal["C", "F"] = "F" if is_fortran else "C"
        self._array = np.ndarray(header.shape, header.dtype, self._map, offset, order=order)
        self._offset, self._is_fortran = offset, is_fortran
        self.shape: Triple = header.shape  # type: ignore[assignment]  # Volume checks the number of axes

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end``: [n, y, x], a view; the pages before are given back."""
        if begin and not self._is_fortran and hasattr(mmap, "MADV_DONTNEED"):
            done_bytes = self._offset + begin * self._array[0].nbytes
            self._map.madvise(mmap.MADV_DONTNEED, 0, done_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        return self._array[begin:end]

    def close(self) -> None:
        """Do nothing: the map goes with its last view."""


def _open_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: NpyHeader
) -> SliceReader:
    stream = archive.open(member)
    read_array_header(stream, member.file_size)
    offset = stream.tell()
    is_fortran = _is_fortran(stream)
    if not is_fortran:

        def close() -> None:
            stream.close()
            archive.close()

        return StreamSlices(stream, offset, header.shape, header.dtype, close)  # type: ignore[arg-type]
    stream.seek(0)
    with stream, tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, 2**20)
        unpacked.flush()
        archive.close()
        return MappedSlices(unpacked.fileno(), header, offset, is_fortran=True)


def _choose(headers: dict[str, NpyHeader], key: str | None) -> str:
    if key is not None:
        if key not in headers:
            raise DataError(f"no array {key!r}; it holds {', '.join(headers)}")
        return key
    volumes = [name for name, header in headers.items() if len(header.shape) == 3]
    if len(volumes) != 1:
        raise DataError(
            f"{len(volumes)} arrays of three axes out of {', '.join(headers)}; "
            "name one with npz_key="
        )
    return volumes[0]


def _read_spacing(archive: zipfile.ZipFile, headers: dict[str, NpyHeader]) -> Spacing:
    if SPACING_NAME not in headers:
        return 1.0, 1.0, 1.0
    if headers[SPACING_NAME].shape != (3,):
        raise DataError(
            f"{SPACING_NAME} of shape {headers[SPACING_NAME].shape}; give three numbers (z, y, x)"
        )
    with archive.open(f"{SPACING_NAME}.npy") as stream, NPY_LOCK:
        z, y, x = np.lib.format.read_array(stream, allow_pickle=False).astype(np.float64).tolist()
    return z, y, x


def _is_fortran(stream: IO[bytes]) -> bool:
    """Return True if the first axis of an array runs fastest; its header was checked before."""
    stream.seek(0)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
    else:
        read_header = np.lib.format.read_array_header_2_0
    with NPY_LOCK:
        _, is_fortran, _ = read_header(stream, max_header_size=MAX_HEADER_BYTES)
    return bool(is_fortran)
