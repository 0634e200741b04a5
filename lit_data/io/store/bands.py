"""Large images in vertical bands, so that a patch reads what it shows and not whole rows.

A band is [H, C, b] in one piece: the rows of a patch lie one after another in each band that it
touches. The bands of an image come from left to right, the last one may be narrower. Small images
stay planar [C, H, W].

Measured against square blocks of equal width, bands read less (a patch of 128 px at any place 1.7
times its bytes, not 2.1) and copy faster, as no row lies in two of them.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.grid import Ints
from lit_data.io.store.files import Mapped
from lit_data.types import Array

MIN_ROW_BYTES: Final = 1024
"""Images whose rows are shorter stay planar: some rows share a page of memory as it is."""
WIDTHS: Final = (32, 64, 128, 256)
MOST_OPENED: Final = 4096


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Layout of decoded images on the disk.

    Args:
        band_px: Width of the bands that images are cut into whose rows take 1 KiB and more; None
            keeps them whole.

    Raises:
        ConfigError: The width is none of 32, 64, 128 and 256.
    """

    band_px: int | None = 64

    def __post_init__(self) -> None:
        if self.band_px is not None and self.band_px not in WIDTHS:
            allowed = ", ".join(map(str, WIDTHS))
            raise ConfigError(f"store.band_px={self.band_px!r} must be one of {allowed}, or null")


WHOLE: Final = StoreOptions(band_px=None)
"""No image is cut into bands."""


class BandLayout(NamedTuple):
    """Layout of the images of a store.

    Attributes:
        band_px: Width of a band; None: no image is in bands.
        itemsize: Bytes of a value.
    """

    band_px: int | None
    itemsize: int

    def find_banded(self, widths_px: Ints) -> NDArray[np.bool_]:
        """Return [n] bool, True for images of these widths that are in bands."""
        if self.band_px is None:
            return np.zeros(len(widths_px), np.bool_)
        return widths_px * self.itemsize >= MIN_ROW_BYTES

    def split(self, image: Array) -> Iterator[Array]:
        """Yield an image [C, H, W] in the order of the disk: whole, or its bands [H, C, b]."""
        width_px = image.shape[2]
        if self.band_px is None or width_px * self.itemsize < MIN_ROW_BYTES:
            yield image
            return
        for left_px in range(0, width_px, self.band_px):
            band = image[:, :, left_px : left_px + self.band_px]
            yield np.ascontiguousarray(band.transpose(1, 0, 2))


class ImageExtents(NamedTuple):
    """Extent of each image among the values of a store.

    Attributes:
        channels: Channels of every image.
        heights_px: [n] rows of each image.
        widths_px: [n] columns of each image.
        begins: [n] value at which each image begins.
    """

    channels: int
    heights_px: Ints
    widths_px: Ints
    begins: Ints

    def shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        return self.channels, self.heights_px.item(number), self.widths_px.item(number)

    def cut_out(self, values: Array, number: int) -> Array:
        """Return the values of one image: [C * H * W], a view."""
        begin = self.begins.item(number)
        return values[begin : begin + math.prod(self.shape(number))]


class BandedImage:
    """One image in bands, which is read by slices as an array [C, H, W] is.

    Args:
        values: [C * H * W], mapped from a file.
        shape: (C, H, W).
        band_px: Width of a band.
    """

    def __init__(self, values: Array, shape: tuple[int, int, int], band_px: int) -> None:
        self.shape = shape
        self.dtype = values.dtype
        self._band_px = band_px
        channels, height, width = shape
        full_bands, last_px = divmod(width, band_px)
        end = full_bands * height * channels * band_px
        self._bands = values[:end].reshape(full_bands, height, channels, band_px)
        self._last = values[end:].reshape(height, channels, last_px)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: ANN401 - NumPy's protocol
        return np.asarray(self.read(0, 0, *self.shape[1:]), dtype)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Array:
        """Read some rows and columns of some channels, each without steps, and no more."""
        channels, rows, columns = part
        top, bottom, _ = rows.indices(self.shape[1])
        left, right, _ = columns.indices(self.shape[2])
        return self.read(top, left, max(bottom - top, 0), max(right - left, 0))[channels]

    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        """Read a part that lies in the image: [C, h, w]."""
        band_px = self._band_px
        channels = self.shape[0]
        right_px = left_px + width_px
        bottom_px = top_px + height_px
        first = min(left_px // band_px, len(self._bands))
        bands = self._bands[first : -(-right_px // band_px), top_px:bottom_px]
        # [bands, h, C, b] becomes [h, C, bands * b]: rows of neighbouring bands side by side.
        rows = bands.transpose(1, 2, 0, 3).reshape(height_px, channels, len(bands) * band_px)
        if right_px > len(self._bands) * band_px:
            rows = np.concatenate((rows, self._last[top_px:bottom_px]), axis=2)
        shift_px = left_px - first * band_px
        return rows[:, :, shift_px : shift_px + width_px].transpose(1, 0, 2)

    def find_spans(
        self, top_px: int, left_px: int, size_px: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield first value and length of each piece of a patch, without what lies past an edge."""
        channels, height_px, width_px = self.shape
        top_px, bottom_px = max(top_px, 0), min(top_px + size_px[0], height_px)
        right_px = min(left_px + size_px[1], width_px)
        if top_px >= bottom_px:
            return
        first_px = max(left_px, 0) // self._band_px * self._band_px
        for band_left_px in range(first_px, right_px, self._band_px):
            # All bands before this one, then the rows above the patch in this one.
            row_values = channels * min(self._band_px, width_px - band_left_px)
            begin = channels * height_px * band_left_px + top_px * row_values
            yield begin, (bottom_px - top_px) * row_values


class BandFile:
    """The images in bands of a store, read at random places: the kernel reads no more than it is told.

    Args:
        mapped: Where its values begin, in a map for this purpose alone.
        values: All of its values.
        band_px: Width of a band.
        extents: Of the images.

    Attributes:
        open: Returns an image by its number; the one made before while it is among the last used.
    """

    def __init__(self, mapped: Mapped, values: Array, band_px: int, extents: ImageExtents) -> None:
        self._data, self._begin = mapped
        self._itemsize = values.itemsize
        self._extents = extents

        def make(number: int) -> BandedImage:
            return BandedImage(extents.cut_out(values, number), extents.shape(number), band_px)

        self.open = lru_cache(MOST_OPENED)(make)
        if hasattr(self._data, "madvise"):
            self._data.madvise(mmap.MADV_RANDOM)

    def expect(self, patches: Iterable[tuple[int, int, int]], size_px: tuple[int, int]) -> None:
        """Have patches brought into memory, side by side and in the order of the file.

        Args:
            patches: Number of an image, first row, first column of each.
            size_px: (h, w) of all patches.
        """
        if not hasattr(self._data, "madvise"):
            return
        spans: list[tuple[int, int]] = []
        for number, top, left in patches:
            image_begin = self._extents.begins.item(number)
            for first, count in self.open(number).find_spans(top, left, size_px):
                begin = self._begin + (image_begin + first) * self._itemsize
                spans.append((begin, count * self._itemsize))
        for begin, nbytes in sorted(spans):
            excess = begin % mmap.PAGESIZE  # advice is given for whole pages
            self._data.madvise(mmap.MADV_WILLNEED, begin - excess, nbytes + excess)
