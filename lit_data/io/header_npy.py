"""The header of a NumPy array, in a ``.npy`` file or in a member of an ``.npz`` archive."""

import math
import struct
import threading
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any, BinaryIO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.stored import StoredImage

MAGIC = b"\x93NUMPY"

MAX_HEADER_BYTES = 64 * 1024
MAX_CHANNELS = 16
"""A first or last axis of at most this length can be the channels of a 3-D array."""

NPY_LOCK = threading.Lock()
"""NumPy reads a header by `ast`, whose depth Python 3.11 counts for all threads together: two at once may fail."""

_PIXEL_DTYPES = "biuf"


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Shape and dtype of a stored array; its values follow the header without a gap."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the header of an array of pixels.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.

    Returns:
        The image. A 2-D array is one channel; of a 3-D array the shorter one of the first and the last axis is the
        channels (the first if they are equal) and has at most 16 entries.

    Raises:
        DataError: damaged, cut, or not an array of pixels.
    """
    stream.seek(0)
    header = read_array_header(stream, size_bytes)
    if header.dtype.kind not in _PIXEL_DTYPES or header.dtype.itemsize > 8:
        raise DataError(f"array of dtype {header.dtype}; booleans, integers and floats of up to 64 bits are read")
    shape = header.shape if len(header.shape) == 3 else (1, *header.shape)
    if len(shape) != 3 or min(shape) < 1 or shape[find_channel_axis(shape)] > MAX_CHANNELS:
        raise DataError(
            f"array of shape {header.shape}; give [H, W], [C, H, W] or [H, W, C] with at most {MAX_CHANNELS} channels"
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
    """Which axis of [C, H, W] or [H, W, C] is the channels: 0 or 2, the shorter one."""
    return 0 if shape[0] <= shape[2] else 2


def read_array_header(stream: IO[bytes], size_bytes: int) -> NpyHeader:
    """Read an array's header from its first byte on, and hold it against the size of what was stored.

    Args:
        stream: At the first byte of the array.
        size_bytes: Bytes of header and values.

    Raises:
        DataError: not an array, objects (which would need pickle), a header above 64 KiB or above the file, or values
            of another size than the header says.
    """
    start = stream.read(8)
    width = {1: 2, 2: 4, 3: 4}.get(start[6] if len(start) == 8 else 0)
    if not start.startswith(MAGIC) or width is None:
        raise DataError(f"not a NumPy array of version 1, 2 or 3, starts with {start!r}")
    length = int.from_bytes(field := stream.read(width), "little")
    if len(field) < width or length > min(size_bytes, MAX_HEADER_BYTES):
        raise DataError(f"array header of {length} bytes; at most {min(size_bytes, MAX_HEADER_BYTES)} are allowed")
    header = _parse(stream.read(length), version=start[6])
    if (found := size_bytes - 8 - width - length) != header.nbytes:
        raise DataError(f"array of shape {header.shape}, {header.dtype}: {header.nbytes} bytes expected, {found} found")
    return header


def _parse(text: bytes, *, version: int) -> NpyHeader:
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    read = np.lib.format.read_array_header_1_0 if version == 1 else np.lib.format.read_array_header_2_0
    try:
        with NPY_LOCK:
            shape, _, dtype = read(BytesIO(length + text), max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # NumPy hands on what its parsers raise
        raise DataError(f"damaged array header ({type(error).__name__})") from error
    if dtype.hasobject:
        raise DataError("array of Python objects; they could run code when loaded, save numbers instead")
    if any(length < 0 for length in shape):
        raise DataError(f"damaged array header: shape {shape}")
    return NpyHeader(tuple(int(length) for length in shape), dtype)
