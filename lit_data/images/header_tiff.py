"""Headers of TIFF files by tifffile: describe one page without decoding it, and refuse bad ones first."""

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from lit_data.core.errors import DataError
from lit_data.core.opening import Rationed
from lit_data.images.header_raster import open_jpeg, refusing
from lit_data.images.read_options import StoredImage

_MAX_PAGES = 65_536
_MAX_HEADER_BYTES = 64 * 2**20  # of all tags together, as for tables of 4 million tiles

# Decoders of other compressions allocate memory by the claims of the stream, before the size of the
# page can limit them.
_NONE = 1
_JPEG = 7
_COMPRESSIONS = {_NONE: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", _JPEG: "JPEG"}
_COMPRESSIONS |= {8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "Zstandard"}
_FAX = (2, 3, 4)  # compressions whose pages are white by default

_BLOCK_PX = 16  # a JPEG stream may be rounded up to whole blocks

_WHITE_IS_ZERO = 0
_BLACK_IS_ZERO = 1
_RGB = 2
_PALETTE = 3
_CMYK = 5
_YCBCR = 6  # which the decoder of JPEG turns into RGB
_CMYK_NOTE = "CMYK TIFF; its ink channels are kept as stored"
_COLOUR_MODELS = {
    4: "a transparency mask",
    _YCBCR: "YCbCr without JPEG",
    8: "CIE L*a*b*",
    9: "ICC L*a*b*",
    10: "ITU L*a*b*",
    32803: "the raw mosaic of a camera",
    32844: "LogL",
    32845: "LogLuv",
    34892: "raw data of a camera",
}
"""Photometric interpretations other than gray, and red, green and blue."""

_ALPHA = (1, 2)  # kinds of extra samples: associated and unassociated alpha
_CHUNKY = 1
_PLANAR = 2
_NUMBERS = (
    "imagewidth", "imagelength", "samplesperpixel", "bitspersample", "planarconfig", "compression",
    "predictor", "rowsperstrip", "tilewidth", "tilelength",
)  # fmt: skip
_PIXEL_TAGS = {256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 317, 320, *range(322, 326)}
_PIXEL_TAGS |= {338, 339, 347, 32997}
"""Tags that change the pixels."""


def open_tiff(stream: BinaryIO | Rationed) -> Any:  # noqa: ANN401 - tifffile ships no types here
    """Open a TIFF with its directories in order as pages, whichever instrument wrote it."""
    import tifffile

    stream.seek(0)  # offsets are counted from here
    return tifffile.TiffFile(stream, is_lsm=False, is_ndpi=False, is_scanimage=False)


def read_tiff_header(stream: BinaryIO, size_bytes: int, page: int | None, key: str) -> StoredImage:
    """Read the tags of a page.

    Args:
        stream: The file, at any position.
        size_bytes: Size of the file.
        page: Number of the page, from 0; None refuses files of several pages.
        key: Key of the options in a configuration, for messages.

    Returns:
        The image; samples marked as alpha are its alpha channels.

    Raises:
        DataError: The file is damaged, truncated, of several pages, or of an unsupported kind.
    """
    rationed = Rationed(stream, min(2 * size_bytes, _MAX_HEADER_BYTES) + 2**16)
    with refusing("TIFF"), open_tiff(rationed) as tiff:
        pages = len(tiff.pages)
        _check_chain(stream, tiff)
        number = page or 0
        if number >= pages:
            raise DataError(
                f"{key}.page={number} does not exist; the file has the pages 0 to {pages - 1}"
            )
        # tifffile parses the first directory whatever the page, so a bad one is an error here too.
        tiff_page = tiff.pages[number]
        _check_tags(stream, tiff_page)
    _check_page_count(tiff_page, pages, page, key)
    return _describe(stream, size_bytes, tiff_page, number, pages)


def _check_chain(stream: BinaryIO, tiff: Any) -> None:  # noqa: ANN401 - as `open_tiff` returns it
    """Refuse a chain of directories that tifffile stops following before its end."""
    stream.seek(tiff.pages.next_page_offset)
    following = stream.read(tiff.tiff.offsetsize)
    if len(following) < tiff.tiff.offsetsize or any(following):
        raise DataError(
            "truncated or damaged TIFF: a directory is outside the file, or they form a loop"
        )
    if not 0 < len(tiff.pages) <= _MAX_PAGES:
        raise DataError(f"damaged TIFF: {len(tiff.pages)} directories; 1 to {_MAX_PAGES} are read")


def _check_tags(stream: BinaryIO, page: Any) -> None:  # noqa: ANN401 - a page of tifffile
    """Refuse a page if tifffile left out or confused tags that matter."""
    layout = page.parent.tiff
    stream.seek(page.offset)
    (count,) = struct.unpack(layout.tagnoformat, stream.read(layout.tagnosize))
    table = struct.iter_unpack(layout.tagheaderformat, stream.read(count * layout.tagsize))
    lost = {code for code, *_ in table} & _PIXEL_TAGS - set(page.tags.keys())
    if lost:
        raise DataError(
            f"truncated or damaged TIFF: the values of tags {sorted(lost)} are outside the file, "
            "or of an unknown type"
        )
    for name in _NUMBERS:
        value = getattr(page, name)
        if not isinstance(value, int) and name != "bitspersample":
            raise DataError(f"damaged TIFF: {name} is {value!r:.50} instead of a whole number")
    if page.planarconfig not in (_CHUNKY, _PLANAR):
        raise DataError(f"damaged TIFF: its planar configuration is {page.planarconfig}")


def _describe(
    stream: BinaryIO,
    size_bytes: int,
    page: Any,  # noqa: ANN401 - a page of tifffile
    number: int,
    pages: int,
) -> StoredImage:
    photometric = _read_colour_model(page)
    samples = page.samplesperpixel
    planes = samples if page.planarconfig == _PLANAR else 1  # else samples are interleaved
    grid = _read_grid(page, planes)
    bits = _read_depth(page)
    notes = _check_segments(stream, size_bytes, page, grid, bits * samples // planes)
    alpha = _find_alpha(page, samples)
    colors = samples - len(alpha)
    if photometric == _PALETTE and colors > 1:
        raise DataError(
            f"a palette image with {colors - 1} unnamed channels besides its numbers; save it as "
            "RGB: magick IN.tif -alpha off -type TrueColor OUT.png"
        )
    orientation = page.tags.valueof(274, 1)
    return StoredImage(
        kind="tiff",
        height_px=grid.height_px,
        width_px=grid.width_px,
        colors=colors,
        dtype=page.dtype,
        bits_per_pixel=bits * samples,
        depth_bits=bits,
        white_is_zero=photometric == _WHITE_IS_ZERO,
        alpha=alpha,
        palette=photometric == _PALETTE,
        pages=pages,
        page=number,
        orientation=int(orientation) if orientation in range(1, 9) else 1,
        padded_pixels=grid.padded_height_px * grid.padded_width_px if grid.tiled else 0,
        notes=(_CMYK_NOTE, *notes) if photometric == _CMYK else notes,
    )


@dataclass(frozen=True, slots=True)
class SegmentGrid:
    """Tiles or strips of a page of ``height_px`` x ``width_px`` pixels."""

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
        """Number of segments of all planes."""
        area = self.segment_height_px * self.segment_width_px
        return self.padded_height_px * self.padded_width_px // area * self.planes


def _read_grid(page: Any, planes: int) -> SegmentGrid:  # noqa: ANN401 - a page of tifffile
    """Read the sizes of a page and of its segments.

    Args:
        page: The page.
        planes: Number of grids: one, or one for each sample of a planar page.

    Raises:
        DataError: A size is 0.
    """
    height_px, width_px = page.imagelength, page.imagewidth
    tiled = 322 in page.tags
    rows, columns = (page.tilelength, page.tilewidth) if tiled else (page.rowsperstrip, width_px)
    if min(height_px, width_px, rows, columns) < 1:
        raise DataError(
            f"damaged TIFF: {height_px} x {width_px} pixels in segments of {rows} x {columns}"
        )
    return SegmentGrid(height_px, width_px, rows, columns, tiled, planes)


def _check_segments(
    stream: BinaryIO,
    size_bytes: int,
    page: Any,  # noqa: ANN401 - a page of tifffile
    grid: SegmentGrid,
    sample_bits: int,
) -> tuple[str, ...]:
    """Refuse a page whose segments are missing, outside the file, too short or of another size.

    Args:
        stream: The file.
        size_bytes: Size of the file.
        page: The page.
        grid: Segments of the page.
        sample_bits: Bits of one pixel in one plane.

    Returns:
        Notes for the user.

    Raises:
        DataError: Segments are bad; the error states what was expected and what was found.
    """
    if page.compression not in _COMPRESSIONS or page.predictor not in (1, 2, 3):
        names = ", ".join(dict.fromkeys(_COMPRESSIONS.values()))
        raise DataError(
            f"TIFF compression {int(page.compression)} with predictor {int(page.predictor)} is not "
            f"read; read are {names}"
        )
    segments = list(zip(page.dataoffsets, page.databytecounts, strict=False))[: grid.count]
    if len(segments) < grid.count:
        raise DataError(
            f"truncated TIFF: {grid.count} strips or tiles expected, {len(segments)} found"
        )
    end = max(start + count for start, count in segments)
    if end > size_bytes:
        raise DataError(f"truncated TIFF: {end} bytes expected, {size_bytes} found")
    is_whole = all(count for _, count in segments)
    if page.compression == _NONE and is_whole:
        _check_amount(sum(count for _, count in segments), grid, sample_bits)
    if page.compression == _JPEG:
        _check_jpeg_sizes(stream, segments, grid)
    return () if is_whole or grid.count == 1 else ("strips or tiles without data, read as empty",)


def _check_amount(stored_bytes: int, grid: SegmentGrid, sample_bits: int) -> None:
    rows = grid.padded_height_px if grid.tiled else grid.height_px
    tiles_across = grid.padded_width_px // grid.segment_width_px
    row_bytes = math.ceil(grid.segment_width_px * sample_bits / 8)  # each begins at a whole byte
    expected = row_bytes * tiles_across * rows * grid.planes
    if stored_bytes < expected:
        raise DataError(
            f"truncated TIFF: {expected} bytes of pixels expected, {stored_bytes} found"
        )


def _check_jpeg_sizes(
    stream: BinaryIO, segments: Sequence[tuple[int, int]], grid: SegmentGrid
) -> None:
    """Refuse JPEG streams that claim to be larger than their segments."""
    # The decoder allocates memory by the claims of each stream, so these are read first.
    for start, count in segments:
        if count == 0:
            continue
        frame = open_jpeg(stream, start)
        is_higher = frame.height > grid.segment_height_px + _BLOCK_PX
        if is_higher or frame.width > grid.segment_width_px + _BLOCK_PX:
            raise DataError(
                f"damaged TIFF: a JPEG segment of {frame.height} x {frame.width} pixels instead "
                f"of {grid.segment_height_px} x {grid.segment_width_px}"
            )


def _read_colour_model(page: Any) -> int:  # noqa: ANN401 - a page of tifffile
    """Return the photometric interpretation of a page of gray levels, inks, or red, green and blue.

    Raises:
        DataError: The page has another interpretation.
    """
    usual = _WHITE_IS_ZERO if page.compression in _FAX else _BLACK_IS_ZERO
    photometric = int(page.tags.valueof(262, usual))
    is_decoded = photometric == _YCBCR and page.compression == _JPEG
    is_plain = photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK)
    if is_decoded or is_plain or page.compression not in _COMPRESSIONS:  # which is refused as such
        return photometric
    model = _COLOUR_MODELS.get(photometric, "an unknown color model")
    raise DataError(
        f"TIFF of {model} (photometric interpretation {photometric}), which is neither gray nor "
        "RGB; convert it: magick IN.tif -colorspace sRGB OUT.png"
    )


def _find_alpha(page: Any, samples: int) -> tuple[int, ...]:  # noqa: ANN401 - a page of tifffile
    """Find the alpha channels, which are among the extra samples after the colors."""
    extra_kinds = page.extrasamples[:samples]
    first = samples - len(extra_kinds)
    alpha = tuple(number for number, kind in enumerate(extra_kinds, first) if kind in _ALPHA)
    depth = page.imagedepth
    if depth != 1 or len(alpha) >= samples:
        raise DataError(f"TIFF with {samples} samples and depth {depth} is not a flat image")
    return alpha


def _read_depth(page: Any) -> int:  # noqa: ANN401 - a page of tifffile
    """Return the number of bits of a sample.

    Raises:
        DataError: The samples differ in bits, or no dtype fits them.
    """
    bits: object = page.bitspersample
    if page.dtype is None or not isinstance(bits, int) or page.dtype.kind not in "buif":
        raise DataError(
            f"TIFF with bits {bits} in sample format {page.sampleformat!r:.50} is not read; save "
            "it with 8 or 16 bits or as float32"
        )
    return bits


def _check_page_count(page: Any, pages: int, wanted: int | None, key: str) -> None:  # noqa: ANN401 - a page of tifffile
    if wanted is None and pages > 1:
        raise DataError(f"{pages} pages; choose one with {key}.page=0 to {key}.page={pages - 1}")
    hidden = _count_hidden_images(page)
    if pages == 1 and hidden > 1:
        raise DataError(f"{hidden} images inside one page; save each as a separate page or file")


def _count_hidden_images(page: Any) -> int:  # noqa: ANN401 - a page of tifffile
    """Count the images of a page; large stacks of ImageJ, tifffile and MetaMorph have one directory."""
    text = page.description  # where writers keep facts of their own
    images = re.search(r"^images=(\d{1,18})\s*$", text, re.MULTILINE)
    if text.startswith("ImageJ=") and images:
        return int(images[1])
    if text.startswith('{"shape": ['):
        try:
            total = math.prod(int(length) for length in json.loads(text)["shape"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return 1  # a text of another program
        values: int = page.imagewidth * page.imagelength * page.samplesperpixel
        return total // max(1, values)
    planes = page.tags.get(33629)  # of MetaMorph
    return 1 if planes is None else int(planes.count)
