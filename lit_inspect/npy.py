"""Headers of untrusted ``.npy`` arrays."""

import math
import struct
import threading
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x93NUMPY"

_MOST_HEADER_BYTES = 10_000  # the same limit as in NumPy
NPY_LOCK = threading.Lock()
"""NumPy parses a header with `ast`, whose depth Python 3.11 counts for all threads together."""


class Header(NamedTuple):
    """Shape and dtype of an array of numbers.

    Attributes:
        shape: Length of each axis, not negative.
        is_fortran: True if the first axis changes fastest.
        dtype: Stored dtype.
        offset: Position of the first number, in bytes.
    """

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: "np.dtype[Any]"
    offset: int


def read_header(stream: BinaryIO, size_bytes: int) -> Header:
    """Read the header of an array, and check it against the size of its file.

    Raises:
        ValueError: The array is damaged, does not contain numbers, or is longer than the file.
    """
    stream.seek(0)
    shape, is_fortran, dtype = parse_header(_read_text(stream))
    header = Header(shape, is_fortran, dtype, stream.tell())
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"an array of {str(dtype)[:40]}, not one of numbers of up to 64 bits")
    if size_bytes < header.offset + math.prod(shape) * dtype.itemsize:
        raise ValueError("truncated array")
    return header


def parse_header(
    text: bytes, most_bytes: int = _MOST_HEADER_BYTES
) -> tuple[tuple[int, ...], bool, "np.dtype[Any]"]:
    """Return shape, `Header.is_fortran` and dtype from the text of a header of any version.

    Raises:
        ValueError: It is damaged, or longer than allowed.
    """
    # Texts of all versions are read alike; only their length is stored differently.
    stream = BytesIO(struct.pack("<I", len(text)) + text)
    try:
        with NPY_LOCK:
            header = np.lib.format.read_array_header_2_0(stream, max_header_size=most_bytes)
        shape = tuple(map(int, header[0]))
    except Exception as error:  # NumPy hands on what its parsers raise, also MemoryError
        raise ValueError(f"damaged array header, {type(error).__name__}") from error
    if any(length < 0 for length in shape):
        raise ValueError(f"damaged array header, shape {str(shape)[:80]}")
    return shape, bool(header[1]), header[2]


def _read_text(stream: BinaryIO) -> bytes:
    """Return the text of a header, without its length."""
    start = stream.read(8)
    width = {1: 2, 2: 4, 3: 4}.get(start[6] if len(start) == 8 else 0)
    if not start.startswith(MAGIC) or width is None:
        raise ValueError("not an array of version 1, 2 or 3 of the format")
    length = int.from_bytes(stream.read(width), "little")
    if length > _MOST_HEADER_BYTES:  # checked before it is read
        raise ValueError(
            f"an array header of {length} bytes, more than the maximum of {_MOST_HEADER_BYTES}"
        )
    text = stream.read(length)
    if len(text) < length:
        raise ValueError("truncated array header")
    return text


def read_array(stream: BinaryIO, size_bytes: int) -> NDArray[Any]:
    """Read an array.

    Raises:
        ValueError: See `read_header`.
    """
    header = read_header(stream, size_bytes)
    values = np.empty(math.prod(header.shape), header.dtype)
    read_into(stream, values)
    return values.reshape(header.shape, order="F" if header.is_fortran else "C")


def read_into(stream: BinaryIO, values: NDArray[Any]) -> int:
    """Fill an array [n] with the next bytes; return the number of bytes read."""
    count: int = stream.readinto(values.view(np.uint8).data)  # type: ignore[attr-defined]
    return count
