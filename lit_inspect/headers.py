"""Headers of PNG, JPEG, BMP and TIFF files: check the stated size before anything is decoded."""

import os
import struct
import zlib
from typing import BinaryIO

from lit_inspect.errors import ImageError

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_TIFF = {b"II*\x00": "<", b"MM\x00*": ">"}
_PIECE_BYTES = 2**20
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # these are tables
_MOST_SEGMENTS = 10_000  # and stray bytes before the frame of a JPEG file
_BMP_MASKS = 3  # masks define the red, green and blue bits of a pixel
_BMP_BYTES = (0xFF0000, 0xFF00, 0xFF)


def check_file(stream: BinaryIO, start: bytes, size_bytes: int) -> tuple[int, int]:
    """Refuse a file that is truncated, damaged or of another type; return its (height, width) px.

    Args:
        stream: The file.
        start: First bytes of the file.
        size_bytes: Length of the file.

    Raises:
        ImageError: The file is refused.
        struct.error: Its header ends too early.
    """
    if start == _PNG:
        return _check_png(stream)
    if start.startswith(_JPEG):
        return _check_jpeg(stream, size_bytes)
    if start[:4] in _TIFF:
        return _check_tiff(stream, _TIFF[start[:4]])
    if start.startswith(b"BM"):
        return _read_bmp(stream)
    raise ImageError(f"not a PNG, JPEG, BMP, TIFF or .npy image, starts with {start!r}")


def _check_png(stream: BinaryIO) -> tuple[int, int]:
    """Check that ``IHDR`` is the first chunk and ``IEND`` the last, and that all chunks are complete and correct."""
    stream.seek(len(_PNG))
    size_px = None
    is_grey = False
    while len(start := stream.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        body = stream.read(min(length, _PIECE_BYTES))
        if size_px is None:
            if name != b"IHDR" or length != 13:
                raise ImageError("damaged PNG: it does not begin with its size")
            size_px = struct.unpack_from(">II", body)[::-1]
            is_grey = body[9] == 0
        checksum = zlib.crc32(body, zlib.crc32(name))
        missing = length - len(body)
        while missing > 0 and (body := stream.read(min(missing, _PIECE_BYTES))):
            checksum = zlib.crc32(body, checksum)
            missing -= len(body)
        if missing or stream.read(4) != checksum.to_bytes(4):
            raise ImageError(f"truncated or damaged PNG: chunk {name!r}")
        if name == b"tRNS" and is_grey:
            raise ImageError("a PNG with a transparent gray level, which lit_inspect does not read")
        if name == b"acTL" and int.from_bytes(body[:4]) > 1:
            raise ImageError("an animated PNG: save the frame you need as a separate PNG")
        if name == b"IEND":
            return size_px
    raise ImageError("truncated PNG: no end chunk")


def is_grey_png(stream: BinaryIO, start: bytes) -> bool:
    """Return True if a file with these first bytes is a grayscale PNG, with alpha or without."""
    stream.seek(len(_PNG) + 17)  # its color type
    return start == _PNG and stream.read(1) in (b"\0", b"\4")


def _check_jpeg(stream: BinaryIO, size_bytes: int) -> tuple[int, int]:
    stream.seek(max(0, size_bytes - 4096))
    if b"\xff\xd9" not in stream.read(4096):  # some programs add a few bytes after it
        raise ImageError("truncated JPEG: no end marker")
    stream.seek(2)
    for _ in range(_MOST_SEGMENTS):
        lead, marker = struct.unpack("BB", stream.read(2))
        if lead != 0xFF or marker in (0, 0xFF):  # a fill byte or a stray byte
            stream.seek(-1, os.SEEK_CUR)
            continue
        (length,) = struct.unpack(">H", stream.read(2))
        if length < 2:
            break
        if marker in _JPEG_FRAMES:
            _, height, width = struct.unpack(">BHH", stream.read(5))
            return height, width
        stream.seek(length - 2, os.SEEK_CUR)
    raise ImageError("damaged JPEG: it does not state its size")


def _read_bmp(stream: BinaryIO) -> tuple[int, int]:
    """Refuse BMP files whose colors OpenCV reads differently from `predict`."""
    stream.seek(14)
    is_old = stream.read(4) == b"\x0c\x00\x00\x00"  # the header of OS/2, not of Windows
    form = "<HHHH" if is_old else "<iiHHI"
    width, height, _, bits, *compression = struct.unpack(form, stream.read(struct.calcsize(form)))
    stream.seek(54)
    is_masked = compression == [_BMP_MASKS] and bits == 32
    has_bytes = is_masked and struct.unpack("<3I", stream.read(12)) == _BMP_BYTES
    # OpenCV reads palettes of OS/2 as gray levels.
    is_plain = bits > 16 if is_old else compression == [0] and bits != 16
    if not (is_plain or has_bytes):
        raise ImageError(
            "a BMP with packed or compressed colors, or of OS/2, which lit_inspect does not read: "
            "save it as PNG"
        )
    return abs(height), width  # the height is negative if the first row is the top one


def _check_tiff(stream: BinaryIO, order: str) -> tuple[int, int]:
    """Refuse TIFF files that OpenCV reads differently from `predict`."""
    tags: dict[int, int] = {}
    depths = 0
    stream.seek(4)
    stream.seek(struct.unpack(f"{order}I", stream.read(4))[0])
    for _ in range(struct.unpack(f"{order}H", stream.read(2))[0]):
        tag, kind, count, value = struct.unpack(f"{order}HHI4s", stream.read(12))
        form = f"{order}H" if kind == 3 and count <= 2 else f"{order}I"  # the value, or its offset
        tags[tag] = struct.unpack_from(form, value)[0]
        depths = count if tag == 258 else depths
    if struct.unpack(f"{order}I", stream.read(4))[0]:
        raise ImageError("a TIFF of several pages, which lit_inspect does not read")
    if depths > 2:
        stream.seek(tags[258])
        (tags[258],) = struct.unpack(f"{order}H", stream.read(2))
    # 262: black is 0, or R, G, B. 259: none, LZW, deflate or PackBits. 266: normal order of bits.
    bits, samples = tags.get(258, 1), tags.get(277, 1)
    has_bits = bits in (8, 16, 32) or (bits == 64 and samples == 3)
    is_known = (samples, tags.get(262)) in ((1, 1), (3, 2))
    is_packed = tags.get(259, 1) not in (1, 5, 8, 32773, 32946)
    if not (has_bits and is_known) or is_packed or tags.get(266, 1) != 1:
        raise ImageError("a TIFF of a rare kind, which lit_inspect does not read")
    if tags.get(274, 1) != 1:  # OpenCV would rotate the image
        raise ImageError("a TIFF with an orientation tag, which lit_inspect does not read")
    if tags.get(284, 1) != 1 and samples > 1 and bits > 8:  # OpenCV would mix the bytes
        raise ImageError("a TIFF of separate channels, which lit_inspect does not read")
    if not {256, 257} <= tags.keys():
        raise ImageError("damaged TIFF: it does not state its size")
    return tags[257], tags[256]
