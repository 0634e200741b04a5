"""Images that are read by slices: no more than a patch shows, and the kernel is told before."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from lit_data.grid import Ints, mirror
from lit_data.io.store.files import Mapped
from lit_data.types import Array

MOST_OPENED: Final = 4096


class SlicedImage(ABC):
    """One image, which is read by slices as an array [C, H, W] is.

    Args:
        shape: (C, H, W).
        dtype: Of its values.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: "np.dtype[Any]") -> None:
        self.shape, self.dtype = shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: ANN401 - NumPy's protocol
        return np.asarray(self.read(0, 0, *self.shape[1:]), dtype)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Array:
        """Read some rows and columns of some channels, each without steps, and no more."""
        channels, rows, columns = part
        top, bottom, _ = rows.indices(self.shape[1])
        left, right, _ = columns.indices(self.shape[2])
        return self.read(top, left, max(bottom - top, 0), max(right - left, 0))[channels]

    @abstractmethod
    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        """Read a part that lies in the image: [C, h, w]."""

    @abstractmethod
    def find_spans(
        self, top_px: int, left_px: int, size_px: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield first byte and length of each piece of a patch, without what lies past an edge."""

    def cut(self, top_px: int, left_px: int, size_px: tuple[int, int]) -> Array:
        """Read a patch, reflect-padded past an edge as by `lit_data.grid.cut_patch`: [C, h, w]."""
        (height_px, width_px), (_, rows, columns) = size_px, self.shape
        if 0 <= top_px <= rows - height_px and 0 <= left_px <= columns - width_px:
            return self.read(top_px, left_px, height_px, width_px)
        # The rows and columns that the patch shows, some of them more than once.
        y, x = mirror(top_px, height_px, rows), mirror(left_px, width_px, columns)
        top, left = int(y.min()), int(x.min())
        inside = self.read(top, left, int(y.max()) + 1 - top, int(x.max()) + 1 - left)
        patch: Array = inside[:, (y - top)[:, None], x - left]
        return patch


class ImageSizes(NamedTuple):
    """Sizes of the images of a file.

    Attributes:
        channels: Of every image.
        dtype: Of every image.
        heights_px: [n] of the images.
        widths_px: [n] of the images.
    """

    channels: int
    dtype: "np.dtype[Any]"
    heights_px: Ints
    widths_px: Ints

    def shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        return self.channels, self.heights_px.item(number), self.widths_px.item(number)

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels."""
        return self.channels * int((self.heights_px * self.widths_px).sum()) * self.dtype.itemsize


class SlicedFile(ABC):
    """The images of a file, to be read at random places: the kernel reads no more than it is told.

    Args:
        mapped: Where its values begin, in a map for this purpose alone.
    """

    def __init__(self, mapped: Mapped) -> None:
        self._data, self._begin = mapped
        self._opened: dict[int, tuple[int, SlicedImage]] = {}
        if hasattr(self._data, "madvise"):
            self._data.madvise(mmap.MADV_RANDOM)

    @abstractmethod
    def make(self, number: int) -> tuple[int, SlicedImage]:
        """Make an image; return the byte of the values that its spans count from, and it."""

    def open(self, number: int) -> tuple[int, SlicedImage]:
        """Return the same as `make`, which is asked once while the image is in use."""
        opened = self._opened.get(number)
        if opened is None:
            # Making one again is cheap, so all go at once and no lock keeps their order.
            if len(self._opened) >= MOST_OPENED:
                self._opened.clear()
            opened = self._opened[number] = self.make(number)
        return opened

    def expect(self, places: Iterable[tuple[int, int, int]], size_px: tuple[int, int]) -> None:
        """Have patches brought into memory, side by side and in the order of the file.

        Args:
            places: Number of an image, first row, first column of each patch.
            size_px: (h, w) of all patches.
        """
        if not hasattr(self._data, "madvise"):
            return
        spans: list[tuple[int, int]] = []
        for number, top, left in places:
            image_begin, image = self.open(number)
            for first, nbytes in image.find_spans(top, left, size_px):
                spans.append((self._begin + image_begin + first, nbytes))
        for begin, nbytes in sorted(spans):
            excess = begin % mmap.PAGESIZE  # advice is given for whole pages
            self._data.madvise(mmap.MADV_WILLNEED, begin - excess, nbytes + excess)
