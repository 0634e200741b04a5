"""The strips and tiles of a TIFF page: all listed, inside the file, and of the size that the page says."""

import math
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.images.header_raster import read_frame
from lit_data.io.images.tiff_tags import Directory

# Decoders of other compressions ask for memory by what the stream claims, before the page's size can limit them.
_NONE, _JPEG = 1, 7
_COMPRESSIONS = {_NONE: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", _JPEG: "JPEG"}
_COMPRESSIONS |= {8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "Zstandard"}

_BLOCK_PX = 16  # a JPEG stream may be rounded up to whole blocks


@dataclass(frozen=True, slots=True)
class SegmentGrid:
    """How a page of ``height_px`` x ``width_px`` is cut into tiles or strips."""

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
    height_px, width_px = tags.number(257, 0), tags.number(256, 0)
    tiled = 322 in tags
    if tiled:
        rows, columns = tags.number(323, 0), tags.number(322, 0)
    else:
        rows, columns = min(tags.number(278, height_px) if tags.count(278) == 1 else height_px, height_px), width_px
    if min(height_px, width_px, rows, columns) < 1:
        raise DataError(f"damaged TIFF: {height_px} x {width_px} pixels in segments of {rows} x {columns}")
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
    compression, predictor = tags.number(259, _NONE), tags.number(317, 1)
    if compression not in _COMPRESSIONS or predictor not in (1, 2, 3):
        names = ", ".join(dict.fromkeys(_COMPRESSIONS.values()))
        raise DataError(f"TIFF compression {compression} with predictor {predictor} is not read; read are {names}")
    offsets = tags.numbers(324 if 324 in tags else 273)[: grid.count]
    counts = tags.numbers(325 if 325 in tags else 279)[: grid.count]
    if len(counts) == 0 and grid.count == 1:
        counts = np.zeros(1, np.uint64)  # old writers leave out the length of a single strip
    if min(len(offsets), len(counts)) < grid.count:
        raise DataError(
            f"truncated TIFF: {grid.count} strips or tiles expected, {min(len(offsets), len(counts))} found"
        )
    _check_inside(size_bytes, offsets, counts)
    if compression == _NONE and counts.all():
        _check_amount(counts, grid, sample_bits)
    if compression == _JPEG:
        _check_jpeg_sizes(stream, offsets, counts, grid)
    return () if counts.all() or grid.count == 1 else ("strips or tiles without data, read as empty",)


def _check_inside(size_bytes: int, offsets: NDArray[np.uint64], counts: NDArray[np.uint64]) -> None:
    beyond = np.uint64(size_bytes + 1)  # sums of larger numbers could overflow
    worst = int(np.argmax(np.minimum(offsets, beyond) + np.minimum(counts, beyond)))
    if (end := int(offsets[worst]) + int(counts[worst])) > size_bytes:
        raise DataError(f"truncated TIFF: {end} bytes expected, {size_bytes} found")


def _check_amount(counts: NDArray[np.uint64], grid: SegmentGrid, sample_bits: int) -> None:
    rows = grid.padded_height_px if grid.tiled else grid.height_px
    tiles_across = grid.padded_width_px // grid.segment_width_px
    expected = math.ceil(grid.segment_width_px * sample_bits / 8) * tiles_across * rows * grid.planes
    if (found := int(counts.sum())) < expected:
        raise DataError(f"truncated TIFF: {expected} bytes of pixels expected, {found} found")


def _check_jpeg_sizes(
    stream: BinaryIO, offsets: NDArray[np.uint64], counts: NDArray[np.uint64], grid: SegmentGrid
) -> None:
    """The decoder makes room for what each JPEG stream claims, so the claims are read first."""
    for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
        if count == 0:
            continue
        frame = read_frame(stream, offset, offset + count)
        if (
            frame.height_px > grid.segment_height_px + _BLOCK_PX
            or frame.width_px > grid.segment_width_px + _BLOCK_PX
            or frame.components > 4
        ):
            raise DataError(
                f"damaged TIFF: a JPEG segment of {frame.height_px} x {frame.width_px} pixels in place of "
                f"{grid.segment_height_px} x {grid.segment_width_px}"
            )
