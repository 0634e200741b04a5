"""JPEG: its header without decoding, its end, and the orientation in an EXIF block.

https://www.w3.org/Graphics/JPEG/itu-t81.pdf annex B
"""

import re
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.stored import StoredImage

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # start of frame; the three are tables and reserved
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # anything but stuffing, restarts and fill bytes
_MAX_SEGMENTS = 1024  # before the frame; an ICC profile has at most 255
_MAX_EXIF_TAGS = 512


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """Size of a JPEG stream and what stands before it."""

    height_px: int
    width_px: int
    components: int
    bits: int
    exif: bytes


def read_jpeg_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the segments up to the frame header.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.

    Raises:
        DataError: damaged, cut, or of a kind that OpenCV does not read.
    """
    frame = read_frame(stream, 0, size_bytes)
    if frame.bits != 8 or frame.components not in (1, 3, 4):
        raise DataError(f"JPEG of {frame.components} components with {frame.bits} bits; 1, 3 or 4 with 8 bits are read")
    return StoredImage(
        kind="jpeg",
        height_px=frame.height_px,
        width_px=frame.width_px,
        colors=1 if frame.components == 1 else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=8 * frame.components,
        orientation=read_orientation(frame.exif),
        notes=("CMYK JPEG, converted to RGB without a colour profile",) if frame.components == 4 else (),
    )


def read_frame(stream: BinaryIO, start: int, end: int) -> JpegFrame:
    """Read the frame header of the JPEG stream between two places of a file.

    Raises:
        DataError: there is none.
    """
    offset, exif = start + 2, b""
    for _ in range(_MAX_SEGMENTS):
        stream.seek(offset)
        head = stream.read(4)
        while head[:2] == b"\xff\xff":  # fill bytes may stand before a marker
            head, offset = head[1:] + stream.read(1), offset + 1
        if len(head) < 4 or offset + 4 > end:
            raise DataError(f"truncated JPEG: no frame header in {end - start} bytes")
        code, length = head[1], int.from_bytes(head[2:], "big")
        if head[0] != 0xFF or length < 2 or code in (0xD8, 0xD9, 0xDA):
            raise DataError(f"damaged JPEG header: no frame before byte {offset}")
        if code in _FRAMES:
            return _parse_frame(stream.read(6), exif)
        if code == 0xE1 and not exif:
            block = stream.read(length - 2)
            exif = block[6:] if block.startswith(b"Exif\x00\x00") else b""
        offset += 2 + length
    raise DataError(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments before the frame")


def check_jpeg_end(data: bytes) -> None:
    """Find the end marker of the image itself, past thumbnails and in front of anything appended.

    Raises:
        DataError: there is none: the file was cut, and OpenCV may make up the missing rows.
    """
    offset = 2
    while match := _MARKER.search(data, offset):
        offset = match.end()
        code = data[offset - 1]
        if code == 0xD9:
            return
        if code not in (0x01, 0xD8):  # those two have no length
            offset += int.from_bytes(data[offset : offset + 2], "big")
    raise DataError(f"truncated JPEG: no end marker in {len(data)} bytes")


def read_orientation(exif: bytes) -> int:
    """Orientation in an EXIF block, 1 to 8; 1 (upright) when there is none or it cannot be read.

    Args:
        exif: The block from its byte order mark on.
    """
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return 1
    (first,) = struct.unpack_from(order + "I", exif, 4)
    (count,) = struct.unpack(order + "H", exif[first : first + 2].ljust(2, b"\0"))
    for place in range(first + 2, first + 2 + 12 * min(count, _MAX_EXIF_TAGS), 12):
        if place + 12 <= len(exif) and exif[place : place + 4] == struct.pack(order + "HH", 274, 3):
            (value,) = struct.unpack_from(order + "H", exif, place + 8)
            return value if 1 <= value <= 8 else 1
    return 1


def _parse_frame(body: bytes, exif: bytes) -> JpegFrame:
    if len(body) < 6:
        raise DataError("truncated JPEG: the frame header is cut")
    bits, height_px, width_px, components = struct.unpack(">BHHB", body)
    return JpegFrame(height_px, width_px, components, bits, exif)
