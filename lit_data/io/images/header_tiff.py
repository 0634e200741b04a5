"""Headers of TIFF files: what one page holds, without decoding, by the rules tifffile reads it with.

Directories, tags, strips and tiles are each checked to lie inside the file before they are read.

https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf,
https://www.awaresystems.be/imaging/tiff/bigtiff.html
"""

import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.images.header_raster import read_frame
from lit_data.io.images.options import StoredImage

MAX_TAGS = 512
"""More tags than this in one directory are junk (cgohlke/tifffile#102: 3 126 of them took 64 GB)."""

_MAX_PAGES = 65_536
_TYPE_BYTES = {**dict.fromkeys((1, 2, 6, 7), 1), 3: 2, 8: 2, **dict.fromkeys((4, 9, 11, 13), 4)}
_TYPE_BYTES |= dict.fromkeys((5, 10, 12, 16, 17, 18), 8)
_NUMBERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}

# Decoders of other compressions ask for memory by what the stream claims, before the page's size
# can limit them.
_NONE = 1
_JPEG = 7
_COMPRESSIONS = {_NONE: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", _JPEG: "JPEG"}
_COMPRESSIONS |= {8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "Zstandard"}

_BLOCK_PX = 16  # a JPEG stream may be rounded up to whole blocks

_WHITE_IS_ZERO = 0
_BLACK_IS_ZERO = 1
_RGB = 2
_PALETTE = 3
_CMYK = 5
_YCBCR = 6  # which the decoder of JPEG turns into RGB
_COLOUR_MODELS = {4: "a transparency mask", 8: "CIE L*a*b*", 9: "ICC L*a*b*", 10: "ITU L*a*b*"}

_ALPHA = (1, 2)  # kinds of extra samples: associated and unassociated alpha
_PLANAR = 2
_UNSIGNED = {1: "?", **dict.fromkeys(range(2, 9), "u1"), **dict.fromkeys(range(9, 17), "u2")}

_SIGNED = {8: "i1", 16: "i2", 32: "i4", 64: "i8"}
_FLOAT = {16: "f2", 24: "f4", 32: "f4", 64: "f8"}
_FAX = (2, 3, 4)  # compressions whose pages are white where nothing is said
_CMYK_NOTE = "CMYK TIFF; its ink channels are kept as stored"


@dataclass(frozen=True, slots=True)
class TiffLayout:
    """Byte order and sizes of the numbers of a file (``order`` as for ``struct``), and its first directory."""

    order: str
    big: bool
    first: int

    @property
    def count_format(self) -> str:
        """Number of tags, at the start of a directory."""
        return self.order + ("Q" if self.big else "H")

    @property
    def offset_format(self) -> str:
        """Place of the next directory, at the end of a directory."""
        return self.order + ("Q" if self.big else "I")

    @property
    def tag_format(self) -> str:
        """Code, type, number of values, the values or their place."""
        return self.order + ("HHQ8s" if self.big else "HHI4s")


def read_layout(stream: BinaryIO) -> TiffLayout:
    """Read the first bytes of a TIFF or BigTIFF.

    Raises:
        DataError: damaged.
    """
    stream.seek(0)
    start = stream.read(16)
    order = "<" if start[:2] == b"II" else ">"
    big = start[2:4] in (b"+\x00", b"\x00+")
    if len(start) < 8 or (big and start[4:8] != struct.pack(order + "HH", 8, 0)):
        raise DataError(f"damaged TIFF header {start!r}")
    # BigTIFF says how long its numbers are, which is 8 bytes, before the place of the directory.
    (first,) = _unpack(order + "Q", start[8:]) if big else _unpack(order + "I", start[4:8])
    return TiffLayout(order, big, first)


def find_pages(stream: BinaryIO, size_bytes: int, layout: TiffLayout) -> list[int]:
    """Follow the chain of directories.

    Returns:
        Where each is, in order.

    Raises:
        DataError: the chain leaves the file, loops, or has more than 65 536 pages.
    """
    offsets: dict[int, None] = {}
    offset = layout.first
    while offset:
        if offset in offsets or len(offsets) >= _MAX_PAGES:
            raise DataError(f"damaged TIFF: its directories loop, or are more than {_MAX_PAGES}")
        offsets[offset] = None
        table_bytes = _measure_table(stream, size_bytes, layout, offset)
        stream.seek(offset + struct.calcsize(layout.count_format) + table_bytes)
        next_offset = stream.read(struct.calcsize(layout.offset_format))
        (offset,) = _unpack(layout.offset_format, next_offset)
    if not offsets:
        raise DataError("damaged TIFF: no directory")
    return list(offsets)


class Directory:
    """The tags of one page; values are read when asked for.

    Args:
        stream: The file.
        size_bytes: Its size.
        layout: How its numbers are written.
        place: Where the directory is.

    Raises:
        DataError: more than 512 tags, values outside the file, or more bytes of values than the
            file has.
    """

    def __init__(self, stream: BinaryIO, size_bytes: int, layout: TiffLayout, offset: int) -> None:
        self._stream = stream
        self._layout = layout
        self._tags: dict[int, tuple[int, int, bytes]] = {}
        table_bytes = _measure_table(stream, size_bytes, layout, offset)
        stream.seek(offset + struct.calcsize(layout.count_format))
        table = stream.read(table_bytes)
        total_bytes = 0
        for code, kind, count, field in struct.iter_unpack(layout.tag_format, table):
            self._tags.setdefault(code, (kind, count, field))
            value_bytes = count * _TYPE_BYTES.get(kind, 0)
            if value_bytes <= len(field):  # they stand in the table itself
                continue
            # Many tags may point to the same large values, which a reader would copy for each.
            total_bytes += value_bytes
            end = self._place(field) + value_bytes
            if max(end, total_bytes) > size_bytes:
                raise DataError(
                    f"truncated or damaged TIFF: tag {code} needs {end} bytes, {size_bytes} found"
                )

    def __contains__(self, code: int) -> bool:
        return code in self._tags

    def count(self, code: int) -> int:
        """Count the values of a tag; 0 if there is none."""
        return self._tags[code][1] if code in self._tags else 0

    def read(self, code: int) -> bytes:
        """The values of a tag as they stand in the file; nothing if there is none."""
        if code not in self._tags:
            return b""
        kind, count, field = self._tags[code]
        value_bytes = count * _TYPE_BYTES.get(kind, 0)
        if value_bytes <= len(field):
            return field[:value_bytes]
        self._stream.seek(self._place(field))
        return self._stream.read(value_bytes)

    def numbers(self, code: int) -> NDArray[np.uint64]:
        """The values of a tag of whole numbers, none if there is no such tag.

        Raises:
            DataError: the tag holds something else.
        """
        kind = self._tags[code][0] if code in self._tags else 1
        if kind not in _NUMBERS:
            raise DataError(f"damaged TIFF: tag {code} has type {kind} where whole numbers belong")
        return np.frombuffer(self.read(code), self._layout.order + _NUMBERS[kind]).astype(np.uint64)

    def number(self, code: int, default: int) -> int:
        """The first value of a tag of whole numbers, or the default."""
        numbers = self.numbers(code)
        return int(numbers[0]) if len(numbers) else default

    def _place(self, field: bytes) -> int:
        offset: int = struct.unpack(self._layout.offset_format, field)[0]
        return offset


def _measure_table(stream: BinaryIO, size_bytes: int, layout: TiffLayout, offset: int) -> int:
    """Return the bytes of a directory's table of tags, which is checked to lie inside the file."""
    count_bytes = struct.calcsize(layout.count_format)
    stream.seek(min(offset, size_bytes))  # numbers of 64 bits are no places to seek to
    (count,) = _unpack(layout.count_format, stream.read(count_bytes))
    if count > MAX_TAGS:
        raise DataError(
            f"damaged TIFF: {count} tags at byte {offset}; at most {MAX_TAGS} are allowed"
        )
    table_bytes = count * struct.calcsize(layout.tag_format)
    end = offset + count_bytes + table_bytes + struct.calcsize(layout.offset_format)
    if end > size_bytes:
        raise DataError(f"truncated TIFF: a directory needs {end} bytes, {size_bytes} found")
    return table_bytes


def _unpack(form: str, data: bytes) -> tuple[int, ...]:
    if len(data) < struct.calcsize(form):
        raise DataError("truncated TIFF: a directory lies outside the file")
    return struct.unpack(form, data)


@dataclass(frozen=True, slots=True)
class SegmentGrid:
    """Tiles or strips of a page of ``height_px`` x ``width_px``."""

    height_px: int
    width_px: int
    segment_height_px: int
    segment_width_px: int
    tiled: bool
    planes: int

    @property
    def padded_height_px(self) -> int:
        """Rows of whole segments."""
        return math.ceil(self.height_px / self.segment_height_px) * self.segment_height_px

    @property
    def padded_width_px(self) -> int:
        """Columns of whole segments."""
        return math.ceil(self.width_px / self.segment_width_px) * self.segment_width_px

    @property
    def count(self) -> int:
        """Segments of all planes."""
        area = self.segment_height_px * self.segment_width_px
        return self.padded_height_px * self.padded_width_px // area * self.planes


def read_grid(tags: Directory, planes: int) -> SegmentGrid:
    """Read the sizes of a page and of its segments.

    Args:
        tags: Of the page.
        planes: How often the grid is stored: once, or once for each sample of a planar page.

    Raises:
        DataError: one of the sizes is 0.
    """
    height_px = tags.number(257, 0)
    width_px = tags.number(256, 0)
    tiled = 322 in tags
    if tiled:
        rows = tags.number(323, 0)
        columns = tags.number(322, 0)
    else:
        # Without a number of rows, or with several, all rows are one strip.
        strip_px = tags.number(278, height_px) if tags.count(278) == 1 else height_px
        rows = min(strip_px, height_px)
        columns = width_px
    if min(height_px, width_px, rows, columns) < 1:
        raise DataError(
            f"damaged TIFF: {height_px} x {width_px} pixels in segments of {rows} x {columns}"
        )
    return SegmentGrid(height_px, width_px, rows, columns, tiled, planes)


def check_segments(
    stream: BinaryIO, size_bytes: int, tags: Directory, grid: SegmentGrid, sample_bits: int
) -> tuple[str, ...]:
    """Refuse a page whose segments are missing, outside the file, too short or of another size.

    Args:
        stream: The file.
        size_bytes: Its size.
        tags: Of the page.
        grid: Of the page.
        sample_bits: Bits of one pixel in one plane.

    Returns:
        What a user should know.

    Raises:
        DataError: says what was expected and found.
    """
    compression = tags.number(259, _NONE)
    predictor = tags.number(317, 1)
    if compression not in _COMPRESSIONS or predictor not in (1, 2, 3):
        names = ", ".join(dict.fromkeys(_COMPRESSIONS.values()))
        raise DataError(
            f"TIFF compression {compression} with predictor {predictor} is not read; read are "
            f"{names}"
        )
    offsets = tags.numbers(324 if 324 in tags else 273)[: grid.count]
    counts = tags.numbers(325 if 325 in tags else 279)[: grid.count]
    if len(counts) == 0 and grid.count == 1:
        counts = np.zeros(1, np.uint64)  # old writers leave out the length of a single strip
    segments = min(len(offsets), len(counts))
    if segments < grid.count:
        raise DataError(f"truncated TIFF: {grid.count} strips or tiles expected, {segments} found")
    _check_inside(size_bytes, offsets, counts)
    if compression == _NONE and counts.all():
        _check_amount(counts, grid, sample_bits)
    if compression == _JPEG:
        _check_jpeg_sizes(stream, offsets, counts, grid)
    if counts.all() or grid.count == 1:
        return ()
    return ("strips or tiles without data, read as empty",)


def _check_inside(size_bytes: int, offsets: NDArray[np.uint64], counts: NDArray[np.uint64]) -> None:
    beyond = np.uint64(size_bytes + 1)  # sums of larger numbers could overflow
    last = int(np.argmax(np.minimum(offsets, beyond) + np.minimum(counts, beyond)))
    end = int(offsets[last]) + int(counts[last])
    if end > size_bytes:
        raise DataError(f"truncated TIFF: {end} bytes expected, {size_bytes} found")


def _check_amount(counts: NDArray[np.uint64], grid: SegmentGrid, sample_bits: int) -> None:
    rows = grid.padded_height_px if grid.tiled else grid.height_px
    tiles_across = grid.padded_width_px // grid.segment_width_px
    row_bytes = math.ceil(grid.segment_width_px * sample_bits / 8)  # each begins at a whole byte
    expected = row_bytes * tiles_across * rows * grid.planes
    stored_bytes = int(counts.sum())
    if stored_bytes < expected:
        raise DataError(
            f"truncated TIFF: {expected} bytes of pixels expected, {stored_bytes} found"
        )


def _check_jpeg_sizes(
    stream: BinaryIO, offsets: NDArray[np.uint64], counts: NDArray[np.uint64], grid: SegmentGrid
) -> None:
    """Refuse JPEG streams that claim to be larger than their segments."""
    # The decoder makes room for what each stream claims, so the claims are read first.
    for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
        if count == 0:
            continue
        frame = read_frame(stream, offset, offset + count)
        is_higher = frame.height_px > grid.segment_height_px + _BLOCK_PX
        is_wider = frame.width_px > grid.segment_width_px + _BLOCK_PX
        if is_higher or is_wider or frame.components > 4:
            raise DataError(
                f"damaged TIFF: a JPEG segment of {frame.height_px} x {frame.width_px} pixels in "
                f"place of {grid.segment_height_px} x {grid.segment_width_px}"
            )


_COLOUR_MODELS |= {_YCBCR: "YCbCr without JPEG", 32844: "LogL", 32845: "LogLuv"}
_COLOUR_MODELS |= {32803: "the raw mosaic of a camera", 34892: "raw data of a camera"}
"""Photometric interpretations whose numbers are neither grey nor red, green and blue."""
_UNSIGNED |= {**dict.fromkeys(range(17, 33), "u4"), 64: "u8"}


def read_tiff_header(stream: BinaryIO, size_bytes: int, page: int | None, key: str) -> StoredImage:
    """Read the directories up to the page and that page's tags.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.
        page: From 0; None refuses files of several pages.
        key: Of the options in a configuration, for messages.

    Returns:
        The image; samples marked as alpha are its alpha channels.

    Raises:
        DataError: damaged, cut, of several pages, or of a kind that is not read.
    """
    layout = read_layout(stream)
    places = find_pages(stream, size_bytes, layout)
    number = page or 0
    if number >= len(places):
        raise DataError(
            f"{key}.page={number} is not there; the file has the pages 0 to {len(places) - 1}"
        )
    # tifffile parses the first directory whatever the page, so a bad one is an error here too.
    tags = Directory(stream, size_bytes, layout, places[0])
    if number:
        tags = Directory(stream, size_bytes, layout, places[number])
    _check_page_count(tags, len(places), page, key)
    photometric = _read_colour_model(tags)
    samples = tags.number(277, 1)
    planes = samples if tags.number(284, 1) == _PLANAR else 1  # else the samples of a pixel are one
    grid = read_grid(tags, planes)
    bits, dtype = _find_dtype(tags, samples)
    notes = check_segments(stream, size_bytes, tags, grid, bits * samples // planes)
    alpha = _find_alpha(tags, samples)
    colors = samples - len(alpha)
    if photometric == _PALETTE:
        _check_palette(colors)
    return StoredImage(
        kind="tiff",
        height_px=grid.height_px,
        width_px=grid.width_px,
        colors=colors,
        dtype=dtype,
        bits_per_pixel=bits * samples,
        depth_bits=bits,
        white_is_zero=photometric == _WHITE_IS_ZERO,
        alpha=alpha,
        palette=photometric == _PALETTE,
        pages=len(places),
        page=number,
        orientation=tags.number(274, 1) if tags.number(274, 1) in range(1, 9) else 1,
        padded_pixels=grid.padded_height_px * grid.padded_width_px if grid.tiled else 0,
        notes=(_CMYK_NOTE, *notes) if photometric == _CMYK else notes,
    )


def _read_colour_model(tags: Directory) -> int:
    """Return the photometric interpretation of a page of grey levels, inks, or red, green and blue.

    Raises:
        DataError: It is another.
    """
    compression = tags.number(259, _NONE)
    photometric = tags.number(262, _WHITE_IS_ZERO if compression in _FAX else _BLACK_IS_ZERO)
    is_decoded = photometric == _YCBCR and compression == _JPEG
    is_plain = photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK)
    if is_decoded or is_plain or compression not in _COMPRESSIONS:  # which is refused as such
        return photometric
    model = _COLOUR_MODELS.get(photometric, "an unknown colour model")
    raise DataError(
        f"TIFF of {model} (photometric interpretation {photometric}), which is neither grey nor "
        "RGB; convert it: magick IN.tif -colorspace sRGB OUT.png"
    )


def _check_palette(colors: int) -> None:
    if colors > 1:
        raise DataError(
            f"a palette image with {colors - 1} unnamed channels beside its numbers; save it as "
            "RGB: magick IN.tif -alpha off -type TrueColor OUT.png"
        )


def _find_alpha(tags: Directory, samples: int) -> tuple[int, ...]:
    """Find the alpha channels, which are among the extra samples behind the colours."""
    extra_kinds = tags.numbers(338)[:samples].tolist()
    first = samples - len(extra_kinds)
    alpha = tuple(number for number, kind in enumerate(extra_kinds, first) if kind in _ALPHA)
    depth = tags.number(32997, 1)
    if depth != 1 or len(alpha) >= samples:
        raise DataError(f"TIFF with {samples} samples and depth {depth} is not a flat image")
    return alpha


def _find_dtype(tags: Directory, samples: int) -> tuple[int, "np.dtype[Any]"]:
    depths = tags.numbers(258)[:samples]
    kinds = tags.numbers(339)[:samples]
    bits = tags.number(258, 1)
    kind = tags.number(339, 1)
    name = None
    if (depths == bits).all() and (kinds == kind).all():
        name = {1: _UNSIGNED, 2: _SIGNED, 3: _FLOAT, 4: _UNSIGNED}.get(kind, {}).get(bits)
    if name is None:
        raise DataError(
            f"TIFF with bits {depths.tolist()} in sample formats {kinds.tolist()} is not read; "
            "save it with 8 or 16 bits or as float32"
        )
    return bits, np.dtype(name)


def _check_page_count(tags: Directory, pages: int, page: int | None, key: str) -> None:
    if page is None and pages > 1:
        raise DataError(f"{pages} pages; choose one with {key}.page=0 to {key}.page={pages - 1}")
    hidden = _count_hidden_images(tags)
    if pages == 1 and hidden > 1:
        raise DataError(
            f"{hidden} images behind one page; save each as a page or a file of its own"
        )


def _count_hidden_images(tags: Directory) -> int:
    """Images that follow the first one without a directory, as ImageJ, tifffile and MetaMorph write large stacks."""
    text = tags.read(270)  # the description, in which writers keep their own facts
    images = re.search(rb"^images=(\d{1,18})\s*$", text, re.MULTILINE)
    if text.startswith(b"ImageJ=") and images:
        return int(images[1])
    if text.startswith(b'{"shape": ['):
        return _count_shaped(text, tags)
    return tags.count(33629)


def _count_shaped(text: bytes, tags: Directory) -> int:
    try:
        shape = json.loads(text.rstrip(b"\0"))["shape"]
        total = math.prod(int(length) for length in shape)
    except (ValueError, TypeError, KeyError, RecursionError):
        return 1  # somebody's own text
    return total // max(1, tags.number(256, 1) * tags.number(257, 1) * tags.number(277, 1))
