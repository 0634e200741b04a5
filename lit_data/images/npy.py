"""Headers of NumPy arrays, and directories of archives of them, from untrusted sources."""

import math
import re
import zipfile
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np

from lit_data.core.errors import DataError
from lit_data.images.read_options import StoredImage
from lit_inspect.npy import MAGIC, parse_header

MAX_HEADER_BYTES = 64 * 1024
MAX_CHANNELS = 16
"""Longest first or last axis of a 3-D array that can be the channels."""

_PIXEL_DTYPES = "biuf"

_NAME = re.compile(r"[A-Za-z0-9_]+\.npy")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # flag bit


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Form of a stored array, whose values directly follow the header.

    Attributes:
        shape: Lengths of its axes.
        dtype: As stored.
        is_fortran: True if the first axis runs fastest.
    """

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    is_fortran: bool

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the header of an array of pixels.

    Args:
        stream: The file, at any position.
        size_bytes: Size of the file.

    Returns:
        The image. A 2-D array is one channel. In a 3-D array, the shorter one of the first and the
        last axis is the channels (the first if they are equal), with at most 16 entries.

    Raises:
        DataError: The file is damaged, truncated, or not an array of pixels.
    """
    stream.seek(0)
    header = read_array_header(stream, size_bytes)
    if header.dtype.kind not in _PIXEL_DTYPES or header.dtype.itemsize > 8:
        raise DataError(
            f"array of dtype {header.dtype}; booleans, integers and floats of up to 64 bits are "
            "read"
        )
    shape = header.shape if len(header.shape) == 3 else (1, *header.shape)
    if len(shape) != 3 or min(shape) < 1 or shape[find_channel_axis(shape)] > MAX_CHANNELS:
        raise DataError(
            f"array of shape {header.shape}; give [H, W], [C, H, W] or [H, W, C] with at most "
            f"{MAX_CHANNELS} channels"
        )
    channel_axis = find_channel_axis(shape)
    height_px, width_px = shape[1:] if channel_axis == 0 else shape[:2]
    return StoredImage(
        kind="npy",
        height_px=height_px,
        width_px=width_px,
        colors=shape[channel_axis],
        dtype=header.dtype.newbyteorder("="),
        bits_per_pixel=8 * shape[channel_axis] * header.dtype.itemsize,
    )


def find_channel_axis(shape: tuple[int, ...]) -> int:
    """Return the channel axis of [C, H, W] or [H, W, C]: 0 or 2, the shorter one."""
    return 0 if shape[0] <= shape[2] else 2


def read_array_header(stream: IO[bytes], size_bytes: int) -> NpyHeader:
    """Read the header of an array and compare it with the stored size.

    Args:
        stream: At the first byte of the array.
        size_bytes: Bytes of header and values.

    Raises:
        DataError: The stream is not an array, or one of objects (which would need pickle), the
            header is longer than 64 KiB or than the file, or the size of the values differs from
            the header.
    """
    start = stream.read(8)
    # Number of bytes of the field with the length of the header, by version of the format.
    width = {1: 2, 2: 4, 3: 4}.get(start[6] if len(start) == 8 else 0)
    if not start.startswith(MAGIC) or width is None:
        raise DataError(f"not a NumPy array of version 1, 2 or 3, starts with {start!r}")
    field = stream.read(width)
    length = int.from_bytes(field, "little")
    if len(field) < width or length > min(size_bytes, MAX_HEADER_BYTES):
        raise DataError(
            f"array header of {length} bytes; at most {min(size_bytes, MAX_HEADER_BYTES)} are "
            "allowed"
        )
    header = _parse(stream.read(length))
    stored_bytes = size_bytes - 8 - width - length
    if stored_bytes != header.nbytes:
        raise DataError(
            f"array of shape {header.shape}, {header.dtype}: {header.nbytes} bytes expected, "
            f"{stored_bytes} found"
        )
    return header


def _parse(text: bytes) -> NpyHeader:
    try:
        shape, is_fortran, dtype = parse_header(text, MAX_HEADER_BYTES)
    except ValueError as error:
        raise DataError(str(error)) from error
    if dtype.hasobject:
        raise DataError(
            "array of Python objects; they could run code when loaded, save numbers instead"
        )
    return NpyHeader(shape, dtype, is_fortran)


def check_directory(members: list[zipfile.ZipInfo], max_total_bytes: int) -> None:
    """Refuse an archive by its directory, before any of it is unpacked.

    Raises:
        DataError: The archive is larger than allowed, or a member has a name with other characters
            than letters, digits and underscores, repeats, is encrypted, or is packed in a way that
            NumPy does not use.
    """
    total_bytes = sum(member.file_size for member in members)
    if total_bytes > max_total_bytes:
        raise DataError(
            f"{total_bytes} bytes unpacked, more than max_total_bytes={max_total_bytes}; raise "
            "that if the archive should be that large"
        )
    seen: set[str] = set()
    for member in members:
        name = member.filename
        if name in seen:
            raise DataError(f"two members are named {name!r}")
        seen.add(name)
        if not _NAME.fullmatch(name):
            raise DataError(f"member {name!r}; names are letters, digits and underscores with .npy")
        if member.compress_type not in _METHODS or member.flag_bits & _ENCRYPTED:
            raise DataError(
                f"member {name!r} is encrypted or packed by method {member.compress_type}; save "
                "with numpy"
            )
