"""Write arrays as image files that read back to the same values."""

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lit_data.core.files import explaining, replacing
from lit_data.core.types import Array, Bytes, Size

_COLOUR_TYPES = {1: 0, 3: 2}
_UP = 2  # PNG filter: each byte less the one above it


def write_image(path: Path, pixels: Array) -> str:
    """Write one image without loss: PNG for uint8 and uint16 of one or three channels, else TIFF.

    Args:
        path: Without a suffix.
        pixels: [C, H, W].

    Returns:
        The name of the file, with its suffix.
    """
    last = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if pixels.dtype in (np.uint8, np.uint16) and len(pixels) in (1, 3):
        target = path.with_name(path.name + ".png")
        write_png(target, last)
        return target.name
    return _write_tiff(path.with_name(path.name + ".tif"), last)


def _write_tiff(path: Path, pixels: Array) -> str:
    import tifffile

    photometric = "rgb" if pixels.shape[-1] == 3 else "minisblack"
    squeezed = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    tifffile.imwrite(
        path,
        squeezed,
        photometric=photometric,
        compression="zlib",
        metadata=None,
        software="lit_data",
    )
    return path.name


def write_png(path: Path, pixels: Array) -> None:
    """Write a PNG, quickly rather than small.

    [H, W], [H, W, 1] or [H, W, 3] (R, G, B), uint8 or uint16.

    Raises:
        StoreError: It cannot be written.
    """
    write_png_parts(path, (pixels.shape[0], pixels.shape[1]), [pixels])


def write_png_parts(path: Path, shape: Size, parts: Iterable[Array]) -> None:
    """Write a PNG part by part, whole or not at all.

    Args:
        path: The file; its folder is made.
        shape: (height, width) px.
        parts: Its rows from the top, [h, W], [h, W, 1] or [h, W, 3] (R, G, B), uint8 or uint16.

    Raises:
        StoreError: It cannot be written.
    """
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:
            _write_parts(file, shape, parts)


def _write_parts(file: BinaryIO, shape: Size, parts: Iterable[Array]) -> None:
    packer = zlib.compressobj(1)
    above = np.zeros((1, 0), np.uint8)
    for number, part in enumerate(parts):
        if number == 0:
            file.write(b"\x89PNG\r\n\x1a\n")
            colour = _COLOUR_TYPES[1 if part.ndim == 2 else part.shape[2]]
            header = shape[1], shape[0], 8 * part.itemsize, colour, 0, 0, 0
            _write_chunk(file, b"IHDR", struct.pack(">IIBBBBB", *header))
        big_endian = np.ascontiguousarray(part, part.dtype.newbyteorder(">"))
        rows = big_endian.view(np.uint8).reshape(len(part), -1)
        _write_chunk(file, b"IDAT", packer.compress(_filter(rows, above).data))
        above = rows[-1:]  # what the first row of the next part is compared with
    _write_chunk(file, b"IDAT", packer.flush())
    _write_chunk(file, b"IEND", b"")


def _filter(rows: Bytes, above: Bytes) -> Bytes:
    filtered = np.full((len(rows), rows.shape[1] + 1), _UP, np.uint8)
    filtered[:, 1:] = rows
    filtered[1:, 1:] -= rows[:-1]
    if above.size:
        filtered[:1, 1:] -= above
    return filtered


def _write_chunk(file: BinaryIO, kind: bytes, data: bytes) -> None:
    if data or kind == b"IEND":  # the packer may hold all back for now
        crc32 = struct.pack(">I", zlib.crc32(kind + data))
        file.write(struct.pack(">I", len(data)) + kind + data + crc32)
