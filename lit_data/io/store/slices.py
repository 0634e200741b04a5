"""Images of a file that are read by slices: of a patch no more is read than it shows, and the kernel is told before."""

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
        """Some rows and columns of some channels, each without steps; no more is read than that."""
        (top, bottom, _), (left, right, _) = (
            s.indices(n) for s, n in zip(part[1:], self.shape[1:], strict=True)
        )
        return self.read(top, left, max(bottom - top, 0), max(right - left, 0))[part[0]]

    @abstractmethod
    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        """A part that lies in the image: [C, h, w]."""

    @abstractmethod
    def find_spans(
        self, top_px: int, left_px: int, size_px: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Where the pieces of a patch begin and how long they are, in bytes; that past an edge left out."""

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


class ImageSizes(NamedTuple):
    """What the images of a file are.

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
        """Of all pixels."""
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
        """The byte of the values that the spans of an image count from, and the image."""

    def open(self, number: int) -> tuple[int, SlicedImage]:
        """As `make`, which is asked once while the image is in use."""
        found = self._opened.get(number)
        if found is None:
            if len(self._opened) >= MOST_OPENED:  # several threads may come here at once
                self._opened.clear()
            found = self._opened[number] = self.make(number)
        return found

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
            begin, image = self.open(number)
            spans += [
                (self._begin + begin + first, count)
                for first, count in image.find_spans(top, left, size_px)
            ]
        for begin, size in sorted(spans):
            excess = begin % mmap.PAGESIZE
            self._data.madvise(mmap.MADV_WILLNEED, begin - excess, size + excess)
