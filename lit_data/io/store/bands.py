"""Large images in vertical bands, so that a patch reads what it shows and not whole rows of its
image.

A band is [H, C, b] in one piece: the rows of a patch lie one after another in each band that it
touches. The bands of an image come from left to right, the last one may be narrower. Small images
stay planar [C, H, W].

Measured against square blocks of equal width, bands read less (a patch of 128 px at any place 1.7
times its bytes, not 2.1) and copy faster, as no row lies in two of them. Compressed images lie in
blocks all the same, see `lit_data.io.store.packed`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.errors import ConfigError
from lit_data.grid import Ints
from lit_data.io.store.files import Mapped
from lit_data.io.store.packed import ROWS_PX, Compression, pack, split_blocks
from lit_data.io.store.slices import ImageSizes, SlicedFile, SlicedImage
from lit_data.types import Array

MIN_ROW_BYTES: Final = 1024
"""Images whose rows are shorter stay planar: some rows share a page of memory as it is."""
WIDTHS: Final = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How decoded images lie on the disk.

    Args:
        band_px: Width of the bands that images are cut into whose rows take 1 KiB and more; None
            keeps them whole.
        compression: `none`, `lz4` or `zstd`, see `lit_data.io.store.packed`.

    Raises:
        ConfigError: The width is none of 32, 64, 128 and 256, or the compression is not known.
    """

    band_px: int | None = 64
    compression: Compression = "none"

    def __post_init__(self) -> None:
        if self.band_px is not None and self.band_px not in WIDTHS:
            raise ConfigError(
                f"store.band_px={self.band_px!r} must be one of {', '.join(map(str, WIDTHS))}, or null"
            )
        check_choice("store.compression", self.compression, get_args(Compression))


WHOLE: Final = StoreOptions(band_px=None)
"""Images are neither cut nor compressed."""


class BandLayout(NamedTuple):
    """How the images of a store lie.

    Attributes:
        band_px: Width of a band; None: no image is in bands.
        itemsize: Bytes of a value.
        compression: Of their blocks.
    """

    band_px: int | None
    itemsize: int
    compression: Compression = "none"

    @property
    def block_px(self) -> tuple[int, int] | None:
        """As `lit_data.io.store.arrays.ArrayFacts` has it."""
        if self.compression != "none":
            return ROWS_PX, self.band_px or 0
        return None if self.band_px is None else (0, self.band_px)

    def find_banded(self, widths_px: Ints) -> NDArray[np.bool_]:
        """[n] whether images of these widths are in bands."""
        wide = widths_px * self.itemsize >= MIN_ROW_BYTES
        return wide if self.band_px is not None else np.zeros_like(wide)

    def find_widths(self, widths_px: Ints) -> Ints:
        """[n] px of the blocks of compressed images of these widths."""
        return np.where(self.find_banded(widths_px), self.band_px or 0, widths_px)

    def split(self, image: Array) -> Iterator[Array]:
        """An image [C, H, W] in the order of the disk: whole, band by band, or block by block [n] uint8."""
        width, widths = image.shape[2], np.array([image.shape[2]])
        if self.compression != "none":
            for block in split_blocks(image, self.find_widths(widths).item()):
                yield np.frombuffer(pack(block, self.compression), np.uint8)
        elif self.band_px is None or not self.find_banded(widths)[0]:
            yield image
        else:
            for left in range(0, width, self.band_px):
                yield np.ascontiguousarray(
                    image[:, :, left : left + self.band_px].transpose(1, 0, 2)
                )


class BandedImage(SlicedImage):
    """One image in bands.

    Args:
        values: [C * H * W], mapped from a file.
        shape: (C, H, W).
        band_px: Width of a band.
    """

    def __init__(self, values: Array, shape: tuple[int, int, int], band_px: int) -> None:
        super().__init__(shape, values.dtype)
        self._band_px = band_px
        channels, height, width = shape
        wide, rest = divmod(width, band_px)
        end = wide * height * channels * band_px
        self._bands = values[:end].reshape(wide, height, channels, band_px)
        self._last = values[end:].reshape(height, channels, rest)

    @override
    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        band, end_px = self._band_px, left_px + width_px
        first = min(left_px // band, len(self._bands))
        found = self._bands[first : -(-end_px // band), top_px : top_px + height_px]
        joined = found.transpose(1, 2, 0, 3).reshape(height_px, self.shape[0], len(found) * band)
        if end_px > len(self._bands) * band:
            joined = np.concatenate((joined, self._last[top_px : top_px + height_px]), axis=2)
        shift = left_px - first * band
        return joined[:, :, shift : shift + width_px].transpose(1, 0, 2)

    @override
    def find_spans(
        self, top_px: int, left_px: int, size_px: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        channels, height, width = self.shape
        top, bottom = max(top_px, 0), min(top_px + size_px[0], height)
        right, itemsize = min(left_px + size_px[1], width), self.dtype.itemsize
        if top < bottom:
            for left in range(
                max(left_px, 0) // self._band_px * self._band_px, right, self._band_px
            ):
                row = channels * min(self._band_px, width - left)
                yield (
                    (channels * height * left + top * row) * itemsize,
                    (bottom - top) * row * itemsize,
                )


class BandFile(SlicedFile):
    """The images in bands of a file.

    Args:
        mapped: As `SlicedFile` has it.
        values: All of its values.
        band_px: Width of a band.
        sizes: Of the images.
        offsets: [n] value at which each begins.
    """

    def __init__(
        self, mapped: Mapped, values: Array, band_px: int, sizes: ImageSizes, offsets: Ints
    ) -> None:
        super().__init__(mapped)
        self._values, self.band_px, self._sizes, self._offsets = values, band_px, sizes, offsets

    @override
    def make(self, number: int) -> tuple[int, SlicedImage]:
        shape, first = self._sizes.shape(number), self._offsets.item(number)
        image = BandedImage(self._values[first : first + math.prod(shape)], shape, self.band_px)
        return first * self._values.itemsize, image
