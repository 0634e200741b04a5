"""PNG: its header without decoding, and a check of its chunks.

https://www.w3.org/TR/png-3/
"""

import struct
import zlib
from typing import BinaryIO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.header_jpeg import read_orientation
from lit_data.io.stored import StoredImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_MAX_CHUNKS = 4096  # before the pixels; real files have a dozen


def read_png_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the chunks in front of the pixels.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.

    Returns:
        The image; a transparent colour (``tRNS``) counts as an alpha channel.

    Raises:
        DataError: damaged, cut or animated.
    """
    chunks = _read_leading_chunks(stream, size_bytes)
    width_px, height_px, depth, color_type, *methods = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if depth not in _DEPTHS.get(color_type, ()) or methods[:2] != [0, 0] or methods[2] > 1:
        raise DataError(f"damaged PNG header: colour type {color_type} with {depth} bits, methods {methods}")
    if (frames := int.from_bytes(chunks.get(b"acTL", b"")[:4], "big")) > 1:
        raise DataError(f"animated PNG with {frames} frames; save the frame to use as a PNG of its own")
    stored = _CHANNELS[color_type]
    colors = 3 if stored >= 3 else 1
    return StoredImage(
        kind="png",
        height_px=height_px,
        width_px=width_px,
        colors=colors,
        dtype=np.dtype(np.uint16 if depth == 16 else np.uint8),
        bits_per_pixel=depth * stored,
        alpha=(colors,) if stored in (2, 4) or b"tRNS" in chunks else (),
        palette=color_type == 3,
        orientation=read_orientation(chunks.get(b"eXIf", b"")),
    )


def check_png(data: bytes) -> None:
    """Walk all chunks: each whole, each checksum right, the last one ``IEND``.

    Raises:
        DataError: truncated, or a checksum is wrong; says where.
    """
    offset = len(SIGNATURE)
    while offset + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, offset)
        end = offset + 12 + length
        if end > len(data):
            raise DataError(f"truncated PNG: chunk {name!r} needs {end} bytes, found {len(data)}")
        if zlib.crc32(data[offset + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise DataError(f"damaged PNG: the checksum of chunk {name!r} at byte {offset} is wrong")
        if name == b"IEND":
            return
        offset = end
    raise DataError(f"truncated PNG: no end chunk in {len(data)} bytes")


def _read_leading_chunks(stream: BinaryIO, size_bytes: int) -> dict[bytes, bytes]:
    """Chunks up to the first of the pixels, with the contents of those that matter here."""
    chunks: dict[bytes, bytes] = {}
    offset = len(SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        stream.seek(offset)
        start = stream.read(8)
        length, name = struct.unpack(">I4s", start) if len(start) == 8 else (0, b"")
        end = offset + 12 + length
        if not name or (name != b"IDAT" and end > size_bytes):
            raise DataError(
                f"truncated PNG: {max(end, offset + 12)} bytes expected before the pixels, {size_bytes} found"
            )
        if (name == b"IHDR") == bool(chunks) or (name == b"IHDR" and length != 13):
            raise DataError(f"damaged PNG header: chunk {name!r} of {length} bytes at byte {offset}")
        if name == b"IDAT":
            return chunks
        chunks[name] = stream.read(length) if name in (b"IHDR", b"acTL", b"eXIf") else b""
        if name == b"IHDR" and zlib.crc32(name + chunks[name]) != int.from_bytes(stream.read(4), "big"):
            raise DataError("damaged PNG: the checksum of its header is wrong")
        offset = end
    raise DataError(f"damaged PNG header: more than {_MAX_CHUNKS} chunks before the pixels")
