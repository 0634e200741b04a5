"""Headers of PNG, JPEG and BMP files by Pillow, without decoding."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.opening import Rationed
from lit_data.core.types import Bytes
from lit_data.images.read_options import StoredImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_MAX_CHUNKS = 4096  # ahead of the pixels; real files have a dozen

_MAX_JPEG_HEADER_BYTES = 2**24  # profiles of printers take megabytes
_MAX_EXIF_TAGS = 512

_UNCOMPRESSED = (0, 3)
_PACKED = {"BGR;15": (0x1F, 0x3E0, 0x7C00), "BGR;16": (0x1F, 0x7E0, 0xF800)}
"""Bits of blue, green and red in a BMP of 16 bits per pixel, by Pillow's name of the packing."""


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Turn the errors of libraries about the content of a file into a ``DataError``."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # the disk is at fault, not the file
            raise
        raise DataError(f"truncated or damaged {kind}: {error}") from error
    except (SyntaxError, ValueError, struct.error) as error:
        is_cut = isinstance(error.__cause__ or error, struct.error | IndexError)
        fault = "a part of its header is missing" if is_cut else str(error)
        fault = fault.replace("not identified by this driver", "no size of an image in its header")
        raise DataError(f"truncated or damaged {kind}: {fault}") from error


def read_png_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the chunks ahead of the pixels.

    Args:
        stream: The file, at any position.
        size_bytes: Size of the file.

    Returns:
        The image; a transparent color (``tRNS``) counts as an alpha channel.

    Raises:
        DataError: The file is damaged, truncated or animated.
    """
    with refusing("PNG"):
        chunks = _read_leading_chunks(stream, size_bytes)
        width_px, height_px, depth, color_type, *methods = struct.unpack(
            ">IIBBBBB", chunks.get(b"IHDR", b"")
        )
    if depth not in _DEPTHS.get(color_type, ()) or methods[:2] != [0, 0] or methods[2] > 1:
        raise DataError(
            f"damaged PNG header: color type {color_type} with {depth} bits, methods {methods}"
        )
    frames = int.from_bytes(chunks.get(b"acTL", b"")[:4], "big")
    if frames > 1:
        raise DataError(
            f"animated PNG with {frames} frames; save the frame you need as a separate PNG"
        )
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


def _read_leading_chunks(stream: BinaryIO, size_bytes: int) -> dict[bytes, bytes]:
    """Return the first chunk of each name ahead of the pixels."""
    # `PngImageFile` unpacks texts, and refuses good files with more than 1 MiB of them.
    from PIL.PngImagePlugin import ChunkStream

    stream.seek(len(SIGNATURE))
    chunks = ChunkStream(stream)
    bodies: dict[bytes, bytes] = {}
    for _ in range(_MAX_CHUNKS):
        name, start, length = chunks.read()
        if name == b"IDAT":
            return bodies
        if start + length > size_bytes:
            raise DataError(
                f"truncated PNG: chunk {name!r} needs {start + length} bytes, {size_bytes} found"
            )
        body = stream.read(length)
        chunks.crc(name, body)
        bodies.setdefault(name, body)
    raise DataError(f"damaged PNG header: more than {_MAX_CHUNKS} chunks before the pixels")


def check_png(data: bytes) -> None:
    """Check that all chunks are complete, that their checksums match, and that the last is ``IEND``.

    Raises:
        DataError: The file is truncated, or the checksum of the named chunk is wrong.
    """
    from PIL.PngImagePlugin import ChunkStream

    with refusing("PNG"):
        chunks = ChunkStream(BytesIO(data[len(SIGNATURE) :]))
        chunks.verify()
        chunks.crc(b"IEND", b"")


def read_jpeg_header(stream: BinaryIO) -> StoredImage:
    """Read the segments up to the pixels.

    Args:
        stream: The file, at any position.

    Raises:
        DataError: The file is damaged, truncated, or of an unsupported kind.
    """
    image = open_jpeg(stream, 0)
    is_cmyk = image.mode == "CMYK"
    return StoredImage(
        kind="jpeg",
        height_px=image.height,
        width_px=image.width,
        colors=1 if image.mode == "L" else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=8 * image.layers,
        orientation=read_orientation(image.info.get("exif", b"").removeprefix(b"Exif\x00\x00")),
        notes=("CMYK JPEG, converted to RGB without a color profile",) if is_cmyk else (),
    )


def open_jpeg(stream: BinaryIO, start: int) -> Any:  # noqa: ANN401 - an image of Pillow, which is imported late
    """Read the header of the JPEG stream at a position of a file.

    Raises:
        DataError: There is no stream, or it is of an unsupported kind.
    """
    stream.seek(start)
    with refusing("JPEG"):
        return _header_of_jpeg()(Rationed(stream, _MAX_JPEG_HEADER_BYTES))


@cache
def _header_of_jpeg() -> Any:  # noqa: ANN401 - a class of Pillow, which is imported late
    from PIL.Image import Exif
    from PIL.JpegImagePlugin import JpegImageFile

    class JpegHeader(JpegImageFile):
        def getexif(self) -> Exif:
            return Exif()  # Pillow would search it for a resolution, and warn of each bad tag

    return JpegHeader


def read_orientation(exif: bytes) -> int:
    """Return the orientation in an EXIF block, 1 to 8; 1 (upright) if it is missing or unreadable.

    Args:
        exif: The block, from its byte order mark on.
    """
    # Pillow would copy the values of all tags, and warn of each bad one.
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return 1
    (first,) = struct.unpack_from(order + "I", exif, 4)
    (count,) = struct.unpack(order + "H", exif[first : first + 2].ljust(2, b"\0"))
    orientation_tag = struct.pack(order + "HH", 274, 3)  # of type SHORT
    for number in range(min(count, _MAX_EXIF_TAGS)):
        begin = first + 2 + 12 * number
        tag = exif[begin : begin + 12]
        if len(tag) == 12 and tag.startswith(orientation_tag):
            (value,) = struct.unpack_from(order + "H", tag, 8)
            return value if 1 <= value <= 8 else 1
    return 1


def open_bmp(stream: BinaryIO) -> Any:  # noqa: ANN401 - an image of Pillow, which is imported late
    """Read the header and the palette of a BMP.

    Raises:
        DataError: The file is damaged, truncated or compressed, or Pillow does not know its color
            bits.
    """
    from PIL.BmpImagePlugin import BmpImageFile

    stream.seek(0)
    try:
        with refusing("BMP"):
            image = BmpImageFile(stream)
    except DataError as error:
        raise DataError(f"{error}; if other programs open it, save it as PNG") from error.__cause__
    if image.info["compression"] not in _UNCOMPRESSED:
        raise DataError(
            f"BMP with compression {image.info['compression']} is not read; save it as PNG"
        )
    return image


def read_bmp_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the header and the palette.

    Args:
        stream: The file, at any position.
        size_bytes: Size of the file.

    Returns:
        The image; it counts as gray if its palette has only grays.

    Raises:
        DataError: As `open_bmp`.
    """
    image = open_bmp(stream)
    row_bytes = image.tile[0].args[1]
    end = image.tile[0].offset + row_bytes * image.height
    if end > size_bytes:
        raise DataError(f"truncated BMP: {end} bytes expected, {size_bytes} found")
    is_gray = image.mode in ("1", "L")
    if image.mode == "P":
        palette = read_bmp_palette(image)
        is_gray = bool((palette == palette[:, :1]).all())
    return StoredImage(
        kind="bmp",
        height_px=image.height,
        width_px=image.width,
        colors=1 if is_gray or image.mode == "P" else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=8 * row_bytes // image.width,
        alpha=(3,) if image.mode == "RGBA" else (),
        palette=image.mode == "P" and not is_gray,
    )


def read_bmp_palette(image: Any) -> Bytes:  # noqa: ANN401 - as `open_bmp` returns it
    """Return the palette [n, 3] R, G, B of a BMP of mode P."""
    entry_bytes = len(image.palette.rawmode)  # three, or four of which the last means nothing
    entries = np.frombuffer(image.palette.palette, np.uint8).reshape(-1, entry_bytes)
    return entries[:, 2::-1]


def read_packed_bmp(stream: BinaryIO, image: Any) -> Bytes | None:  # noqa: ANN401 - as `open_bmp` returns it
    """Read a BMP of 16 bits per pixel, whose colors Pillow would round down.

    Returns:
        [H, W, 3] B, G, R, white is 255; None for other depths.
    """
    packing, row_bytes, direction = image.tile[0].args
    if packing not in _PACKED:
        return None
    stream.seek(image.tile[0].offset)
    packed = np.frombuffer(stream.read(row_bytes * image.height), "<u2")
    rows = packed.reshape(image.height, -1)[::direction, : image.width]
    colours = [(rows & mask) / mask for mask in _PACKED[packing]]
    return np.rint(255 * np.stack(colours, axis=-1)).astype(np.uint8)
