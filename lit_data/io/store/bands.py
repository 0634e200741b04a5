"""Large images in vertical bands, so that a patch reads what it shows and not whole rows of its image.

A band is [H, C, b] in one piece: the rows of a patch lie one after another in each band that it touches. The bands of
an image come from left to right, the last one may be narrower. Small images stay planar [C, H, W].

Measured against square blocks of equal width, bands read less (a patch of 128 px at any place 1.7 times its bytes, not
2.1) and copy faster, as no row lies in two of them.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.grid import Ints, mirror
from lit_data.types import Array

MIN_ROW_BYTES: Final = 1024
"""Images whose rows are shorter stay planar: some rows share a page of memory as it is."""
_MOST_OPENED: Final = 4096
WIDTHS: Final = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How decoded images lie on the disk.

    Args:
        band_px: Width of the bands that images are cut into whose rows take 1 KiB and more; None keeps them whole.

    Raises:
        ConfigError: The width is none of 32, 64, 128 and 256.
    """

    band_px: int | None = 64

    def __post_init__(self) -> None:
        if self.band_px is not None and self.band_px not in WIDTHS:
            raise ConfigError(f"store.band_px={self.band_px!r} must be one of {', '.join(map(str, WIDTHS))}, or null")


class BandLayout(NamedTuple):
    """Which images are in bands.

    Attributes:
        band_px: Width of a band; None: no image is.
        itemsize: Bytes of a value.
    """

    band_px: int | None
    itemsize: int

    @property
    def block_px(self) -> tuple[int, int] | None:
        """As `lit_data.io.store.arrays.ArrayFacts` has it."""
        return None if self.band_px is None else (0, self.band_px)

    def find_banded(self, widths_px: Ints) -> NDArray[np.bool_]:
        """[n] whether images of these widths are in bands."""
        wide = widths_px * self.itemsize >= MIN_ROW_BYTES
        return wide if self.band_px is not None else np.zeros_like(wide)

    def split(self, image: Array) -> Iterator[Array]:
        """An image [C, H, W] in the order of the disk, band by band."""
        width = image.shape[2]
        if self.band_px is None or not self.find_banded(np.array([width]))[0]:
            yield image
            return
        for left in range(0, width, self.band_px):
            yield np.ascontiguousarray(image[:, :, left : left + self.band_px].transpose(1, 0, 2))


class BandedImage:
    """One image in bands, which is read by slices as an array [C, H, W] is.

    Args:
        values: [C * H * W], mapped from a file.
        shape: (C, H, W).
        band_px: Width of a band.
    """

    def __init__(self, values: Array, shape: tuple[int, int, int], band_px: int) -> None:
        self.shape, self.dtype, self._band_px = shape, values.dtype, band_px
        channels, height, width = shape
        wide, rest = divmod(width, band_px)
        end = wide * height * channels * band_px
        self._bands = values[:end].reshape(wide, height, channels, band_px)
        self._last = values[end:].reshape(height, channels, rest)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: ANN401 - NumPy's protocol
        return np.asarray(self.read(0, 0, *self.shape[1:]), dtype)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Array:
        """Some rows and columns of some channels, each without steps; no more is read than that."""
        (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(part[1:], self.shape[1:], strict=True))
        return self.read(top, left, max(bottom - top, 0), max(right - left, 0))[part[0]]

    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        """A part that lies in the image: [C, h, w]."""
        band, end_px = self._band_px, left_px + width_px
        first = min(left_px // band, len(self._bands))
        found = self._bands[first : -(-end_px // band), top_px : top_px + height_px]
        joined = found.transpose(1, 2, 0, 3).reshape(height_px, self.shape[0], len(found) * band)
        if end_px > len(self._bands) * band:
            joined = np.concatenate((joined, self._last[top_px : top_px + height_px]), axis=2)
        shift = left_px - first * band
        return joined[:, :, shift : shift + width_px].transpose(1, 0, 2)

    def cut(self, top_px: int, left_px: int, size_px: tuple[int, int]) -> Array:
        """A patch, mirrored where it reaches past an edge as `lit_data.grid.cut_patch` does: [C, h, w]."""
        (height, width), (_, rows, columns) = size_px, self.shape
        if 0 <= top_px <= rows - height and 0 <= left_px <= columns - width:
            return self.read(top_px, left_px, height, width)
        y, x = mirror(top_px, height, rows), mirror(left_px, width, columns)
        top, left = int(y.min()), int(x.min())
        found = self.read(top, left, int(y.max()) + 1 - top, int(x.max()) + 1 - left)
        mirrored: Array = found[:, (y - top)[:, None], x - left]
        return mirrored

    def find_spans(self, top_px: int, left_px: int, size_px: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Where the pieces of a patch begin and how long they are, in values; that past an edge left out."""
        channels, height, width = self.shape
        top, bottom = max(top_px, 0), min(top_px + size_px[0], height)
        right = min(left_px + size_px[1], width)
        if top < bottom:
            for left in range(max(left_px, 0) // self._band_px * self._band_px, right, self._band_px):
                row = channels * min(self._band_px, width - left)
                yield channels * height * left + top * row, (bottom - top) * row


class BandSizes(NamedTuple):
    """Where the images of a file lie.

    Attributes:
        channels: Of every image.
        heights_px: [n] of the images.
        widths_px: [n] of the images.
        offsets: [n] value at which each begins.
    """

    channels: int
    heights_px: Ints
    widths_px: Ints
    offsets: Ints


class BandFile:
    """The images in bands of a file, to be read at random places: the kernel reads no more than it is told.

    Args:
        data: The file, mapped for this purpose alone.
        values: All of its values.
        band_px: Width of a band.
        sizes: Of the images.
    """

    def __init__(self, data: mmap.mmap, values: Array, band_px: int, sizes: BandSizes) -> None:
        self._data, self._values, self.band_px, self._sizes = data, values, band_px, sizes
        self._begin = len(data) - values.nbytes
        self._opened: dict[int, tuple[int, BandedImage]] = {}
        if hasattr(data, "madvise"):
            data.madvise(mmap.MADV_RANDOM)

    def open(self, number: int) -> tuple[int, BandedImage]:
        """One image, which is in bands, and the byte at which it begins."""
        found = self._opened.get(number)
        if found is None:
            channels, heights_px, widths_px, offsets = self._sizes
            shape, first = (channels, heights_px.item(number), widths_px.item(number)), offsets.item(number)
            image = BandedImage(self._values[first : first + math.prod(shape)], shape, self.band_px)
            if len(self._opened) >= _MOST_OPENED:  # several threads may come here at once
                self._opened.clear()
            found = self._opened[number] = self._begin + first * self._values.itemsize, image
        return found

    def expect(self, places: Iterable[tuple[int, int, int]], size_px: tuple[int, int]) -> None:
        """Have patches brought into memory, side by side and in the order of the file.

        Args:
            places: Number of an image in bands, first row, first column of each patch.
            size_px: (h, w) of all patches.
        """
        if not hasattr(self._data, "madvise"):
            return
        spans: list[tuple[int, int]] = []
        itemsize = self._values.itemsize
        for number, top, left in places:
            begin, image = self.open(number)
            spans += [
                (begin + first * itemsize, count * itemsize) for first, count in image.find_spans(top, left, size_px)
            ]
        for begin, size in sorted(spans):
            excess = begin % mmap.PAGESIZE
            self._data.madvise(mmap.MADV_WILLNEED, begin - excess, size + excess)
