"""One reader for every image file: channels as stored, pixels as stored, errors that name the file."""

import os
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np

from lit_data.errors import DataError
from lit_data.io.images.header import parse_header
from lit_data.io.images.options import DEFAULT_READ, ReadOptions
from lit_data.io.images.pixels import decode
from lit_data.io.source import open_source, read_whole
from lit_data.types import Array

_STRAY: Final = "a JPEG with small faults that leave its pixels as they are"
_HARMLESS: Final = {
    "extraneous bytes before marker": _STRAY,
    "Invalid SOS parameters": _STRAY,
    "Adobe color transform": _STRAY,
    "JFIF revision": _STRAY,
    "determine subsampling level": "a JPEG of rare subsampling, of which only the end marker was "
    "checked",
}
"""What libjpeg and TurboJPEG say of files that many programs write and that decode to the whole image."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image, what was noticed about it, and a fingerprint of the file it came from.

    Attributes:
        array: [C, H, W], contiguous, in native byte order.
        notes: What a user should know, in texts that many files share so that they can be counted.
        source_crc32: CRC-32 of the whole file.
        source_bytes: Size of the file.
    """

    array: Array
    notes: tuple[str, ...]
    source_crc32: int
    source_bytes: int


def decode_strict(path: str | os.PathLike[str], options: ReadOptions = DEFAULT_READ) -> Decoded:
    """Read a file into memory once and hold it against everything that can be checked.

    One damage cannot be seen: a flipped bit in the pixels of a JPEG. ``source_crc32`` lets a later
    check find it.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file.
        options: The rules.

    Raises:
        DataError: as ``read_header``; also truncated, a wrong checksum, NaN or infinite pixels
            without ``nan_fill``.
    """
    path = Path(path)
    with open_source(path) as stream:
        header = parse_header(stream, path.suffix, options)
        data = read_whole(stream)
        array = decode(BytesIO(data), header, options)
        faults = _check_jpeg(data) if header.kind == "jpeg" else ()
        notes = (*header.notes, *faults, *_check_values(array))
    return Decoded(array, notes, zlib.crc32(data), len(data))


def _check_jpeg(data: bytes) -> tuple[str, ...]:
    """A second look that, unlike OpenCV, takes a stream that ends early, or does not fit its header, for an error."""
    import simplejpeg

    try:  # an eighth of the size: the whole stream is read, few pixels are made
        simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, min_factor=1, strict=True)
    except ValueError as error:
        for text, note in _HARMLESS.items():
            if text in str(error):
                return (note,)
        raise DataError(f"truncated or damaged JPEG: {error}") from error
    return ()


def _check_values(array: Array) -> tuple[str, ...]:
    if array.dtype.kind != "f":
        return ()
    finite = np.isfinite(array)
    if not finite.all():
        channel, row, column = np.unravel_index(int(finite.argmin()), array.shape)
        raise DataError(
            f"{array.size - int(finite.sum())} NaN or infinite pixels, the first in channel "
            f"{channel} at row {row}, column {column}; data.read.nan_fill=0 replaces them"
        )
    if array.min() >= 0 and 1 < array.max() <= 255:
        return (
            "float pixels between 0 and 255 instead of 0 and 1; say so with "
            "data.read.value_range=[0,255]",
        )
    return ()


def read_image(
    path: str | os.PathLike[str], options: ReadOptions = DEFAULT_READ, *, strict: bool = False
) -> Array:
    """Read an image.

    PNG, JPEG and BMP are decoded by OpenCV (palettes are read as stored and expanded here), TIFF by
    tifffile, ``.npy`` by NumPy. Floats of 16 and 64 bits become float32.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file; the content decides which, never the name. A
            ``.npy`` array is [H, W], or 3-D with the channels on the shorter one of the first and
            the last axis (at most 16).
        options: The rules.
        strict: Check all that can be checked, as ``decode_strict`` does; otherwise read and decode
            once.

    Returns:
        [C, H, W], contiguous, in native byte order; channel 0 is the first stored one (R of an RGB
        PNG).

    Raises:
        DataError: not a regular file, not an image, damaged, larger than the options allow, or
            refused by them.
    """
    if strict:
        return decode_strict(path, options).array
    path = Path(path)
    with open_source(path) as stream:
        header = parse_header(stream, path.suffix, options)
        return decode(stream, header, options)
