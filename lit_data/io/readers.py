"""One reader for every image file: channels as stored, pixels as stored, errors that name the file."""

import os
from pathlib import Path

from lit_data.io.header import parse_header
from lit_data.io.options import DEFAULT_READ, ReadOptions
from lit_data.io.pixels import decode
from lit_data.io.source import open_source
from lit_data.io.strict import decode_strict
from lit_data.types import Array


def read_image(path: str | os.PathLike[str], options: ReadOptions = DEFAULT_READ, *, strict: bool = False) -> Array:
    """Read an image.

    PNG, JPEG and BMP are decoded by OpenCV (palettes are read as stored and expanded here), TIFF by tifffile, ``.npy``
    by NumPy. Floats of 16 and 64 bits become float32.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file; the content decides which, never the name. A ``.npy`` array is
            [H, W], or 3-D with the channels on the shorter one of the first and the last axis (at most 16).
        options: The rules.
        strict: Check all that can be checked, as ``decode_strict`` does; otherwise read and decode once.

    Returns:
        [C, H, W], contiguous, in native byte order; channel 0 is the first stored one (R of an RGB PNG).

    Raises:
        DataError: not a regular file, not an image, damaged, larger than the options allow, or refused by them.
    """
    if strict:
        return decode_strict(path, options).array
    path = Path(path)
    with open_source(path) as stream:
        header = parse_header(stream, path.suffix, options)
        return decode(stream, header, options)
