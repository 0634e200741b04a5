"""Layout of the pixels of a store, and patches that are gathered from them.

Small images are planar [C, H, W]. Large ones are stored in vertical bands, so that a patch reads
only what it shows and not whole rows. A band is one contiguous piece [H, C, b]: the rows of a patch
are adjacent in each band that it touches. The bands of an image are ordered from left to right, and
the last one may be narrower.

Compared with square blocks of equal width, bands read less (a patch of 128 px at any position reads
1.7 times its bytes instead of 2.1) and copy faster.
"""

import math
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.grid import SlicedImage, cut_patch
from lit_data.core.types import Array, Bools, Ints, Size
from lit_data.images.store.files import Mapped, read_ahead

if TYPE_CHECKING:
    import torch

MIN_ROW_BYTES = 1024
"""Images whose rows are shorter stay planar, since a page of memory already has several rows."""
WIDTHS = (32, 64, 128, 256)
MOST_OPENED = 4096
_SCRATCH_BYTES = 2**22


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Layout of decoded images on the disk.

    Args:
        band_px: Width of the bands that images with rows of 1 KiB or more are cut into; None keeps
            them whole.

    Raises:
        ConfigError: The width is not 32, 64, 128 or 256.
    """

    band_px: int | None = 64

    def __post_init__(self) -> None:
        if self.band_px is not None and self.band_px not in WIDTHS:
            allowed = ", ".join(map(str, WIDTHS))
            raise ConfigError(f"store.band_px={self.band_px!r} must be one of {allowed}, or null")


WHOLE = StoreOptions(band_px=None)
"""Layout without bands."""


class BandLayout(NamedTuple):
    """Layout of the images of a store.

    Attributes:
        band_px: Width of a band; None if no image is in bands.
        itemsize: Number of bytes of a value.
    """

    band_px: int | None
    itemsize: int

    def find_banded(self, widths_px: Ints) -> Bools:
        """Return [n] bool, True for images of these widths that are in bands."""
        if self.band_px is None:
            return np.zeros(len(widths_px), np.bool_)
        return widths_px * self.itemsize >= MIN_ROW_BYTES

    def split(self, image: Array) -> Iterator[Array]:
        """Yield the parts of an image [C, H, W] as stored on the disk: the whole, or its bands [H, C, b]."""
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
        begins: [n] index of the first value of each image.
    """

    channels: int
    heights_px: Ints
    widths_px: Ints
    begins: Ints

    def shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        return self.channels, self.heights_px.item(number), self.widths_px.item(number)

    def cut_out(self, values: Array, number: int) -> Array:
        """Return a view of the values of one image: [C * H * W]."""
        begin = self.begins.item(number)
        return values[begin : begin + math.prod(self.shape(number))]


class BandedImage:
    """Image in bands, which is read by slices like an array [C, H, W].

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
        """Read only the given rows and columns of the given channels; slices have no steps."""
        channels, rows, columns = part
        top, bottom, _ = rows.indices(self.shape[1])
        left, right, _ = columns.indices(self.shape[2])
        return self.read(top, left, max(bottom - top, 0), max(right - left, 0))[channels]

    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        """Read a part inside the image: [C, h, w]."""
        band_px = self._band_px
        channels = self.shape[0]
        right_px = left_px + width_px
        bottom_px = top_px + height_px
        first = min(left_px // band_px, len(self._bands))
        bands = self._bands[first : -(-right_px // band_px), top_px:bottom_px]
        # [bands, h, C, b] becomes [h, C, bands * b], with rows of neighbouring bands side by side.
        rows = bands.transpose(1, 2, 0, 3).reshape(height_px, channels, len(bands) * band_px)
        if right_px > len(self._bands) * band_px:
            rows = np.concatenate((rows, self._last[top_px:bottom_px]), axis=2)
        shift_px = left_px - first * band_px
        return rows[:, :, shift_px : shift_px + width_px].transpose(1, 0, 2)


class StoredPixels(ABC):
    """Pixels of images that are adjacent in memory, from which patches are cut.

    Many patches are copied by a few calls of `torch.index_select`, which picks rows of a view in
    which a row begins at every value. These calls release the interpreter for other threads.

    Args:
        values: [N] values of all images, mapped from a file.
        extents: Extents of the images.

    Attributes:
        least_gathered: Least number of patches to gather; fewer patches are copied one by one.
    """

    least_gathered: ClassVar = 1

    def __init__(self, values: Array, extents: ImageExtents) -> None:
        self._values = np.asarray(_Writable(values))
        self._extents = extents

    @abstractmethod
    def open(self, number: int) -> SlicedImage:
        """Return one image, which can be read by slices."""

    @abstractmethod
    def find_simple(self, images: Ints, tops_px: Ints, lefts_px: Ints, size_px: Size) -> Bools:
        """Return [M] bool, True for patches that `gather` can copy."""

    @abstractmethod
    def gather(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """Copy patches to contiguous rows [M, C, h, w]."""

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """Cut patches, see `lit_data.images.bank.ImageBank.cut_into`."""
        size_px = rows.shape[2], rows.shape[3]
        is_simple = self.find_simple(images, tops_px, lefts_px, size_px)
        is_worthwhile = len(rows) >= self.least_gathered
        is_simple &= is_worthwhile and rows.flags.c_contiguous  # not the corners of larger rows
        if is_simple.any():
            # The first one stands in for the others, which are overwritten below.
            copied = np.where(is_simple, np.arange(len(rows)), is_simple.argmax())
            self.gather(images[copied], tops_px[copied], lefts_px[copied], rows)
        for number in np.flatnonzero(~is_simple).tolist():
            image = self.open(images.item(number))
            rows[number] = cut_patch(image, tops_px.item(number), lefts_px.item(number), size_px)


class PlanarPixels(StoredPixels):
    """Pixels of images stored as [C, H, W]."""

    def __init__(self, values: Array, extents: ImageExtents) -> None:
        super().__init__(values, extents)
        heights_px, widths_px = extents.heights_px, extents.widths_px
        has_one_height = (heights_px == heights_px[0]).all()
        self._has_one_size = bool(has_one_height and (widths_px == widths_px[0]).all())

    @override
    def open(self, number: int) -> Array:
        return self._extents.cut_out(self._values, number).reshape(self._extents.shape(number))

    @override
    def find_simple(self, images: Ints, tops_px: Ints, lefts_px: Ints, size_px: Size) -> Bools:
        extents = self._extents
        fits_above = (tops_px >= 0) & (tops_px <= extents.heights_px[images] - size_px[0])
        fits_beside = (lefts_px >= 0) & (lefts_px <= extents.widths_px[images] - size_px[1])
        return fits_above & fits_beside

    @override
    def gather(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        _, channels, height_px, width_px = rows.shape
        row_strides = self._extents.widths_px[images]
        channel_strides = row_strides * self._extents.heights_px[images]
        starts = self._extents.begins[images] + tops_px * row_strides + lefts_px
        if self._has_one_size:
            # The values of all patches have the same distances to their first ones.
            strides = channel_strides.item(0), row_strides.item(0), 1
            _gather(self._values, starts, strides, rows)
            return
        channel_starts = starts[:, None] + channel_strides[:, None] * np.arange(channels)
        row_offsets = row_strides[:, None, None] * np.arange(height_px)
        row_starts = channel_starts[:, :, None] + row_offsets
        _gather(self._values, row_starts.reshape(-1), (1,), rows.reshape(-1, width_px))


class BandedPixels(StoredPixels):
    """Pixels of images in bands, read at random positions: the kernel reads only the requested pages.

    Args:
        mapped: Offset of the values, in a map that serves only this purpose.
        values: [N] values of all images in that map.
        band_px: Width of a band.
        extents: Extents of the images.
    """

    least_gathered: ClassVar = 64  # gathered patches are copied twice, which pays off for many

    def __init__(self, mapped: Mapped, values: Array, band_px: int, extents: ImageExtents) -> None:
        super().__init__(values, extents)
        self._data, self._begin = mapped
        self._address = self._values.ctypes.data - self._begin
        self._band_px = band_px
        # Not a method of this object, or the map would stay until garbage collection.
        self._open = lru_cache(MOST_OPENED)(partial(_open_banded, self._values, extents, band_px))
        self._scratch = threading.local()
        if hasattr(self._data, "madvise"):
            self._data.madvise(mmap.MADV_RANDOM)

    @override
    def open(self, number: int) -> BandedImage:
        """Return an image, from a cache of the last used ones if possible."""
        return self._open(number)

    @override
    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """Cut patches; the kernel is told about all of them before the first one is read."""
        size_px = rows.shape[2], rows.shape[3]
        self._expect(*self._find_spans(images, tops_px, lefts_px, size_px))
        super().cut_into(images, tops_px, lefts_px, rows)

    @override
    def find_simple(self, images: Ints, tops_px: Ints, lefts_px: Ints, size_px: Size) -> Bools:
        # The last band may be narrower than the others, so that a patch would read past the end.
        full_bands = self._extents.widths_px[images] // self._band_px
        fits_above = (tops_px >= 0) & (tops_px <= self._extents.heights_px[images] - size_px[0])
        fits_beside = (lefts_px >= 0) & (lefts_px + size_px[1] <= full_bands * self._band_px)
        fits = fits_above & fits_beside
        # If all patches consist of whole bands, they are copied once instead of twice.
        is_whole = fits & self._hold_whole_bands(lefts_px, size_px[1])
        return is_whole if 8 * is_whole.sum() > 7 * fits.sum() else fits

    @override
    def gather(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        channels, height_px, width_px = rows.shape[1:]
        band_px = self._band_px
        are_whole = self._hold_whole_bands(lefts_px, width_px).all()
        bands = width_px // band_px if are_whole else self._count_bands(width_px)
        first_bands = lefts_px // band_px
        # A patch that touches fewer bands repeats its last one: the next one was not requested, and
        # each of its pages would cause a wait.
        last_bands = (lefts_px + width_px - 1) // band_px
        read_bands = np.minimum(first_bands + np.arange(bands)[:, None], last_bands)

        # The rows of a patch are contiguous in each band.
        band_values = self._extents.heights_px[images] * channels * band_px
        tops = self._extents.begins[images] + tops_px * channels * band_px
        starts = tops + band_values * read_bands
        if not are_whole:
            self._gather_cropped(starts, lefts_px - first_bands * band_px, rows)
            return
        strides = band_px, channels * band_px, 1
        beside = rows.reshape(-1, channels, height_px, bands, band_px)
        for band, band_starts in enumerate(starts):
            _gather(self._values, band_starts, strides, beside[:, :, :, band])

    def _gather_cropped(self, starts: Ints, shifts_px: Ints, rows: Array) -> None:
        """Copy the bands of patches side by side into memory of this thread, and crop them.

        Args:
            starts: [bands, M] first value of the patch in each band.
            shifts_px: [M] number of columns of the first band to the left of the patch.
            rows: [M, C, h, w], destination of the patches.
        """
        channels, height_px, _ = rows.shape[1:]
        bands, band_px = len(starts), self._band_px
        patch_values = height_px * channels * bands * band_px
        # Few enough at a time to fit into the cache of the processor.
        step = min(max(1, _SCRATCH_BYTES // (patch_values * rows.itemsize)), len(rows))
        scratch = self._take_scratch(step * patch_values * rows.itemsize).view(rows.dtype)
        beside = scratch.reshape(step, height_px * channels, bands, band_px)
        scratch_starts = np.arange(step) * patch_values
        strides = bands * band_px, channels * bands * band_px, 1
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            patches = rows[part]
            count = len(patches)
            for band, band_starts in enumerate(starts):
                _gather(self._values, band_starts[part], (band_px, 1), beside[:count, :, band])
            _gather(scratch, scratch_starts[:count] + shifts_px[part], strides, patches)

    def _hold_whole_bands(self, lefts_px: Ints, width_px: int) -> Bools:
        """Return [M] bool, True for patches that begin and end at the border of a band."""
        if width_px % self._band_px:
            return np.zeros(len(lefts_px), np.bool_)
        is_whole: Bools = lefts_px % self._band_px == 0
        return is_whole

    def _take_scratch(self, nbytes: int) -> Array:
        """Return memory [nbytes] uint8 of this thread, which later calls reuse."""
        memory: Array | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < nbytes:
            memory = self._scratch.memory = np.empty(nbytes, np.uint8)
        return memory[:nbytes]

    def _count_bands(self, width_px: int) -> int:
        """Return the largest number of bands that a patch touches."""
        return (width_px + self._band_px - 2) // self._band_px + 1

    def _find_spans(
        self, images: Ints, tops_px: Ints, lefts_px: Ints, size_px: Size
    ) -> tuple[Ints, Ints]:
        """Return first value and length of each piece of the patches, without parts beyond an edge."""
        channels = self._extents.channels
        heights_px = self._extents.heights_px[images]
        widths_px = self._extents.widths_px[images, None]
        first_rows = np.maximum(tops_px, 0)
        row_counts = np.minimum(tops_px + size_px[0], heights_px) - first_rows
        first_bands = np.maximum(lefts_px, 0) // self._band_px
        band_lefts_px = (
            first_bands[:, None] + np.arange(self._count_bands(size_px[1]))
        ) * self._band_px
        is_shown = band_lefts_px < np.minimum(lefts_px[:, None] + size_px[1], widths_px)
        is_shown &= (row_counts > 0)[:, None]
        # All previous bands, then the rows above the patch in this one.
        row_values = channels * np.minimum(self._band_px, widths_px - band_lefts_px)
        begins = self._extents.begins[images, None] + first_rows[:, None] * row_values
        begins += channels * heights_px[:, None] * band_lefts_px
        return begins[is_shown], (row_counts[:, None] * row_values)[is_shown]

    def _expect(self, begins: Ints, counts: Ints) -> None:
        """Start to read values into memory, in parallel and in the order of the file."""
        order = np.argsort(begins)
        begins_bytes = self._begin + begins[order] * self._values.itemsize
        excess_bytes = begins_bytes % mmap.PAGESIZE  # advice is given for whole pages
        lengths_bytes = counts[order] * self._values.itemsize + excess_bytes
        read_ahead(self._data, self._address, begins_bytes - excess_bytes, lengths_bytes)


def _open_banded(values: Array, extents: ImageExtents, band_px: int, number: int) -> BandedImage:
    return BandedImage(extents.cut_out(values, number), extents.shape(number), band_px)


def _gather(values: Array, starts: Ints, strides: Sequence[int], rows: Array) -> None:
    """Copy values from each start, with the same strides, to rows [M, ...]."""
    import torch

    shape = rows.shape[1:]
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    view = _wrap(values).as_strided((values.size - last, *shape), (1, *strides))
    with _one_thread():
        torch.index_select(view, 0, torch.from_numpy(starts), out=_wrap(rows))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to this thread, since a team of threads waits for each other on busy cores."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:  # as in workers; setting it would affect later threads
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Writable:
    """Wrapper that marks values as writable, since torch warns of others; torch only reads them."""

    def __init__(self, values: Array) -> None:
        self._values = values  # keeps the map open
        self.__array_interface__ = values.__array_interface__ | {
            "data": (values.ctypes.data, False)
        }


def _wrap(values: Array) -> "torch.Tensor":
    """Return a tensor of the same memory, with signed numbers for dtypes that torch cannot copy."""
    import torch

    return torch.from_numpy(values.view(np.int16) if values.dtype == np.uint16 else values)
