"""Headers of JPEG, BMP and PNG files without decoding, and checks of their parts.

Not those of Pillow: it unpacks text when it opens a PNG, refuses good files with more than 1 MiB of
it (processing histories are), and checks neither sizes nor chunks behind the header.

https://www.w3.org/TR/png-3/, https://www.w3.org/Graphics/JPEG/itu-t81.pdf
"""

import re
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.images.options import StoredImage
from lit_data.types import Bytes

# Start of frame; the three are tables and reserved.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # anything but stuffing, restarts and fill bytes
_STRAY_BYTES = 2**16  # that are passed over in search of a marker, as libjpeg does
_MAX_SEGMENTS = 1024  # before the frame; an ICC profile has at most 255
_MAX_EXIF_TAGS = 512

_RGB = 0
_BITFIELDS = (3, 6)  # masks of colours, and of alpha beside them
_MASKS_AT = 54  # bytes from the start of the file, whether they belong to the header or follow it
_MASKS_16 = (0x7C00, 0x3E0, 0x1F, 0)
_MASKS_32 = (0xFF0000, 0xFF00, 0xFF, 0)
_ALPHA_MASK = 0xFF000000

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_MAX_CHUNKS = 4096  # before the pixels; real files have a dozen


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
        raise DataError(
            f"JPEG of {frame.components} components with {frame.bits} bits; 1, 3 or 4 with 8 bits "
            "are read"
        )
    notes: tuple[str, ...] = ()
    if frame.components == 4:
        notes = ("CMYK JPEG, converted to RGB without a colour profile",)
    return StoredImage(
        kind="jpeg",
        height_px=frame.height_px,
        width_px=frame.width_px,
        colors=1 if frame.components == 1 else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=8 * frame.components,
        orientation=read_orientation(frame.exif),
        notes=notes,
    )


def read_frame(stream: BinaryIO, start: int, end: int) -> JpegFrame:
    """Read the frame header of the JPEG stream between two places of a file.

    Raises:
        DataError: there is none.
    """
    offset = start + 2
    exif = b""
    for _ in range(_MAX_SEGMENTS):
        stream.seek(offset)
        head = stream.read(4)
        if not _MARKER.match(head):  # fill or stray bytes stand before it
            offset += _count_stray(stream, offset)
            stream.seek(offset)
            head = stream.read(4)
        if len(head) < 4 or offset + 4 > end:
            raise DataError(f"truncated JPEG: no frame header in {end - start} bytes")
        code = head[1]
        length = int.from_bytes(head[2:], "big")
        if length < 2 or code in (0xD8, 0xD9, 0xDA):
            raise DataError(f"damaged JPEG header: no frame before byte {offset}")
        if code in _FRAMES:
            return _parse_frame(stream.read(6), exif)
        if code == 0xE1 and not exif:
            block = stream.read(length - 2)
            exif = block[6:] if block.startswith(b"Exif\x00\x00") else b""
        offset += 2 + length
    raise DataError(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments before the frame")


def _count_stray(stream: BinaryIO, offset: int) -> int:
    """Count the bytes before the next marker; those that are looked at if there is none."""
    stream.seek(offset)
    data = stream.read(_STRAY_BYTES)
    marker = _MARKER.search(data)
    return len(data) if marker is None else marker.start()


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
    orientation_tag = struct.pack(order + "HH", 274, 3)  # of type SHORT
    for number in range(min(count, _MAX_EXIF_TAGS)):
        begin = first + 2 + 12 * number
        tag = exif[begin : begin + 12]
        if len(tag) == 12 and tag.startswith(orientation_tag):
            (value,) = struct.unpack_from(order + "H", tag, 8)
            return value if 1 <= value <= 8 else 1
    return 1


def _parse_frame(body: bytes, exif: bytes) -> JpegFrame:
    if len(body) < 6:
        raise DataError("truncated JPEG: the frame header is cut")
    bits, height_px, width_px, components = struct.unpack(">BHHB", body)
    return JpegFrame(height_px, width_px, components, bits, exif)


@dataclass(frozen=True, slots=True)
class BmpLayout:
    """Place and packing of the pixels of a BMP."""

    height_px: int
    width_px: int
    bits: int
    bottom_up: bool
    pixels_at: int
    masks: tuple[int, ...]
    """Bits of red, green, blue and alpha in a pixel of 16 or 32 bits; none for other depths."""
    palette: Bytes
    """[n, 3] R, G, B; no rows if there is none."""

    @property
    def has_alpha(self) -> bool:
        """True if a pixel has bits of opacity."""
        return bool(self.masks) and self.masks[3] > 0

    @property
    def is_common(self) -> bool:
        """True if colours are whole bytes, which OpenCV takes for granted."""
        is_bytes = self.masks[:3] == _MASKS_32[:3] and self.masks[3] in (0, _ALPHA_MASK)
        return not self.masks or (self.bits == 32 and is_bytes)

    @property
    def row_bytes(self) -> int:
        """Rows fill whole groups of 4 bytes."""
        return (self.width_px * self.bits + 31) // 32 * 4


def read_bmp_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the header and the palette.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.

    Returns:
        The image; one whose palette holds only greys counts as grey.

    Raises:
        DataError: damaged, cut or compressed.
    """
    layout = read_bmp_layout(stream)
    end = layout.pixels_at + layout.row_bytes * layout.height_px
    if end > size_bytes:
        raise DataError(f"truncated BMP: {end} bytes expected, {size_bytes} found")
    indexed = layout.bits <= 8
    gray = indexed and bool((layout.palette == layout.palette[:, :1]).all())
    return StoredImage(
        kind="bmp",
        height_px=layout.height_px,
        width_px=layout.width_px,
        colors=1 if indexed else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=layout.bits,
        alpha=(3,) if layout.has_alpha else (),
        palette=indexed and not gray,
    )


def read_bmp_layout(stream: BinaryIO) -> BmpLayout:
    """Read where the pixels are.

    Raises:
        DataError: damaged or compressed.
    """
    stream.seek(10)
    pixels_at, info_bytes = struct.unpack("<II", stream.read(8).ljust(8, b"\0"))
    if info_bytes not in (12, *range(40, 125)):
        raise DataError(f"not a BMP, though it starts so: information header of {info_bytes} bytes")
    info = stream.read(info_bytes - 4)
    if len(info) < info_bytes - 4:
        raise DataError("truncated BMP: its header is cut")
    if info_bytes == 12:
        width_px, height_px, _, bits = struct.unpack("<HHHH", info)
        compression = used = 0
    else:
        width_px, height_px, _, bits, compression, _, _, _, used = struct.unpack_from(
            "<iiHHIIiiI", info
        )
    allowed = (_RGB, *_BITFIELDS) if bits in (16, 32) else (_RGB,)
    if bits not in (1, 4, 8, 16, 24, 32) or compression not in allowed:
        raise DataError(
            f"BMP with {bits} bits and compression {compression} is not read; save it as PNG"
        )
    # Three bytes a colour in the oldest header, a fourth that means nothing in the others.
    entry_bytes = 3 if info_bytes == 12 else 4
    colours = min(used or 2**bits, 2**bits)
    return BmpLayout(
        height_px=abs(height_px),
        width_px=width_px,
        bits=bits,
        bottom_up=height_px > 0,
        pixels_at=pixels_at,
        masks=_read_masks(
            stream, bits, compression, has_alpha=info_bytes >= 56 or compression == 6
        ),
        palette=_read_palette(stream, colours, entry_bytes, bits),
    )


def _read_masks(
    stream: BinaryIO, bits: int, compression: int, *, has_alpha: bool
) -> tuple[int, ...]:
    if bits not in (16, 32):
        return ()
    if compression == _RGB:
        return _MASKS_16 if bits == 16 else _MASKS_32
    stream.seek(_MASKS_AT)
    *colours, alpha = struct.unpack("<4I", stream.read(16).ljust(16, b"\0"))
    masks = (*colours, alpha if has_alpha else 0)
    for mask in (*colours, alpha) if masks[3] else colours:
        largest = mask // max(1, mask & -mask)  # without the zeros below it
        if mask == 0 or mask >= 2**bits or largest & (largest + 1):
            raise DataError(f"damaged BMP: {bits} bits a pixel with the colour mask {mask:#x}")
    return masks


def read_bmp_pixels(stream: BinaryIO, layout: BmpLayout) -> Bytes:
    """Read an image of 16 or 32 bits a pixel by its masks of colours.

    Returns:
        [H, W, 3 or 4] B, G, R and alpha; white of any number of bits is 255.
    """
    stream.seek(layout.pixels_at)
    packed = np.frombuffer(
        stream.read(layout.row_bytes * layout.height_px), f"<u{layout.bits // 8}"
    )
    rows = packed.reshape(layout.height_px, -1)[:, : layout.width_px]
    red, green, blue, alpha = layout.masks
    masks = (blue, green, red, alpha) if alpha else (blue, green, red)
    pixels = np.empty((*rows.shape, len(masks)), np.uint8)
    for channel, mask in enumerate(masks):
        lowest_bit = mask & -mask
        np.rint(
            (rows & mask) // lowest_bit * (255 / (mask // lowest_bit)),
            out=pixels[..., channel],
            casting="unsafe",
        )
    return pixels[::-1] if layout.bottom_up else pixels


def read_bmp_indices(stream: BinaryIO) -> tuple[Bytes, Bytes]:
    """Read a palette image.

    Returns:
        indices [H, W] and palette [n, 3] R, G, B.
    """
    layout = read_bmp_layout(stream)
    stream.seek(layout.pixels_at)
    packed = np.frombuffer(stream.read(layout.row_bytes * layout.height_px), np.uint8)
    rows = packed.reshape(layout.height_px, layout.row_bytes)
    # Indices of 1, 4 or 8 bits: bit by bit, then packed again to a byte each.
    bits = np.unpackbits(rows, axis=1).reshape(layout.height_px, -1, layout.bits)
    indices = np.packbits(bits, axis=2)[:, : layout.width_px, 0] >> np.uint8(8 - layout.bits)
    return indices[::-1] if layout.bottom_up else indices, layout.palette


def _read_palette(stream: BinaryIO, count: int, entry_bytes: int, bits: int) -> Bytes:
    if bits > 8:
        return np.empty((0, 3), np.uint8)
    table = stream.read(count * entry_bytes)
    if len(table) < count * entry_bytes:
        raise DataError("truncated BMP: its palette is cut")
    return np.frombuffer(table, np.uint8).reshape(count, entry_bytes)[:, 2::-1]


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
        raise DataError(
            f"damaged PNG header: colour type {color_type} with {depth} bits, methods {methods}"
        )
    frames = int.from_bytes(chunks.get(b"acTL", b"")[:4], "big")
    if frames > 1:
        raise DataError(
            f"animated PNG with {frames} frames; save the frame to use as a PNG of its own"
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
        crc32 = int.from_bytes(data[end - 4 : end], "big")  # of the name and what follows it
        if zlib.crc32(data[offset + 4 : end - 4]) != crc32:
            raise DataError(
                f"damaged PNG: the checksum of chunk {name!r} at byte {offset} is wrong"
            )
        if name == b"IEND":
            return
        offset = end
    raise DataError(f"truncated PNG: no end chunk in {len(data)} bytes")


def _read_leading_chunks(stream: BinaryIO, size_bytes: int) -> dict[bytes, bytes]:
    """Return the chunks before the first of pixels, with the contents of those that matter here."""
    chunks: dict[bytes, bytes] = {}
    offset = len(SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        stream.seek(offset)
        start = stream.read(8)
        length, name = struct.unpack(">I4s", start) if len(start) == 8 else (0, b"")
        end = offset + 12 + length
        if not name or (name != b"IDAT" and end > size_bytes):
            raise DataError(
                f"truncated PNG: {max(end, offset + 12)} bytes expected before the pixels, "
                f"{size_bytes} found"
            )
        # The header comes first, and once.
        is_header = name == b"IHDR"
        if is_header == bool(chunks) or (is_header and length != 13):
            raise DataError(
                f"damaged PNG header: chunk {name!r} of {length} bytes at byte {offset}"
            )
        if name == b"IDAT":
            return chunks
        chunks[name] = stream.read(length) if name in (b"IHDR", b"acTL", b"eXIf") else b""
        if is_header:
            crc32 = int.from_bytes(stream.read(4), "big")
            if zlib.crc32(name + chunks[name]) != crc32:
                raise DataError("damaged PNG: the checksum of its header is wrong")
        offset = end
    raise DataError(f"damaged PNG header: more than {_MAX_CHUNKS} chunks before the pixels")
