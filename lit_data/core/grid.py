"""Grids of patches by arithmetic instead of lists, so that memory does not grow with their number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from lit_data.core.checks import check_choice, is_count
from lit_data.core.errors import ConfigError, list_problems
from lit_data.core.types import Array, Bools, Ints, Size
from lit_inspect.counts import counted_of

Edges = Literal["cover", "drop", "pad"]


def count_positions(lengths_px: ArrayLike, patch_px: int, stride_px: int, edges: Edges) -> Ints:
    """Return the number of patches along one axis.

    The positions are 0, stride, 2 * stride, ... up to the last one <= length - patch. If a tail
    stays uncovered, `cover` adds the position length - patch, `pad` adds the next multiple of the
    stride (the patch then extends beyond the edge and is reflected), and `drop` adds nothing.

    Args:
        lengths_px: Image lengths along the axis.
        patch_px: Patch length along the axis.
        stride_px: Distance between two positions.
        edges: Rule for the tail.

    Returns:
        One count for each length; 0 if the image is smaller than the patch and the rule does not
        pad.
    """
    slack = np.asarray(lengths_px, dtype=np.int64) - patch_px
    inner = np.where(slack >= 0, slack // stride_px + 1, 0)
    if edges == "drop":
        return inner
    uncovered = (slack >= 0) & (slack % stride_px > 0)
    return np.where((slack < 0) & (edges == "pad"), 1, inner + uncovered)


@dataclass(frozen=True, slots=True)
class Axis:
    """Patch length and stride along one axis, in px."""

    patch_px: int
    stride_px: int


class PatchGrid:
    """Map from flat patch indices to (image, y, x), for images of any sizes.

    Patches are numbered image by image, row by row. An image costs 40 bytes, a patch nothing.

    Args:
        heights_px: [n] image heights.
        widths_px: [n] image widths.
        patch_px: Patch size, one number or (height, width).
        stride_px: Distance between patches, one number or (vertical, horizontal).
        edges: Rule for the tail of an axis: `cover` (a last patch flush with the edge), `drop`, or
            `pad` (reflected beyond the edge). See `count_positions`.
        name: Returns the name of an image for a message.

    Raises:
        ConfigError: A size is not positive, or the rule is unknown.
        DataError: An image is smaller than the patch and the rule does not pad, or too small to
            reflect.
    """

    def __init__(
        self,
        heights_px: ArrayLike,
        widths_px: ArrayLike,
        patch_px: int | Size,
        stride_px: int | tuple[int, int],
        edges: Edges = "cover",
        *,
        name: Callable[[int], str] = "image {}".format,
    ) -> None:
        check_choice("edges", edges, get_args(Edges))
        self.heights_px = np.ascontiguousarray(heights_px, dtype=np.int64)
        self.widths_px = np.ascontiguousarray(widths_px, dtype=np.int64)
        patch_height, patch_width = pair_px("patch_px", patch_px)
        vertical_stride, horizontal_stride = pair_px("stride_px", stride_px)
        self.vertical = Axis(patch_height, vertical_stride)
        self.horizontal = Axis(patch_width, horizontal_stride)
        self.edges: Edges = edges
        self._check_sizes(name)
        self.rows = count_positions(self.heights_px, patch_height, vertical_stride, edges)
        self.columns = count_positions(self.widths_px, patch_width, horizontal_stride, edges)
        self._ends = np.cumsum(self.rows * self.columns)

    @property
    def patch_px(self) -> tuple[int, int]:
        """Patch (height, width)."""
        return self.vertical.patch_px, self.horizontal.patch_px

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"patch {index} of {len(self)}")
        image, y, x = self.locate([index % len(self)])
        return int(image[0]), int(y[0]), int(x[0])

    def locate(self, indices: ArrayLike) -> tuple[Ints, Ints, Ints]:
        """Return image number, y and x (top left corner, px) of many patches at once.

        Args:
            indices: [N] patch indices, 0 <= index < len(grid).

        Returns:
            Three [N] int64 arrays.
        """
        # A binary search over the ends of the images needs no table of patches.
        flat = np.asarray(indices, dtype=np.int64)
        image = np.searchsorted(self._ends, flat, side="right")
        within = flat - (self._ends[image] - self.rows[image] * self.columns[image])
        row, column = np.divmod(within, self.columns[image])
        return (
            image,
            self._start(row, self.vertical, self.heights_px[image]),
            self._start(column, self.horizontal, self.widths_px[image]),
        )

    def patches_of(self, image: int) -> range:
        """Return the patch indices of one image."""
        end = int(self._ends[image])
        return range(end - int(self.rows[image] * self.columns[image]), end)

    def nearest(self, image: Ints, y: Ints, x: Ints) -> Ints:
        """Return [N] indices of the patches that are nearest to corners in images.

        Args:
            image: [N] image numbers.
            y: [N] top edges, px.
            x: [N] left edges, px.
        """
        # The last row may be closer than a stride; rounding beyond it falls back to it.
        row = np.rint(y / self.vertical.stride_px).astype(np.int64)
        row = np.minimum(row, self.rows[image] - 1)
        column = np.rint(x / self.horizontal.stride_px).astype(np.int64)
        column = np.minimum(column, self.columns[image] - 1)
        index: Ints = self._ends[image] - (self.rows[image] - row) * self.columns[image] + column
        return index

    def find_owned(self, image: Ints, y: Ints, x: Ints) -> tuple[Bools, Bools]:
        """Return the rows and columns of patches that count, so that each pixel counts once.

        Overlapping neighbors meet in the middle of their overlap.

        Args:
            image: [N] image numbers.
            y: [N] top edges, px.
            x: [N] left edges, px.

        Returns:
            [N, height] and [N, width], True for rows and columns that count.
        """
        rows = self._own(y, self.vertical, self.heights_px[image], self.rows[image])
        columns = self._own(x, self.horizontal, self.widths_px[image], self.columns[image])
        return rows, columns

    def _own(self, start: Ints, axis: Axis, length_px: Ints, count: Ints) -> Bools:
        step = -(-start // axis.stride_px)  # rounded up, since the last one may be closer
        shared_before = self._start(step - 1, axis, length_px) + axis.patch_px - start
        shared_behind = start + axis.patch_px - self._start(step + 1, axis, length_px)
        first = np.where(step > 0, (shared_before + 1) // 2, 0)
        cut = np.where(step + 1 < count, shared_behind // 2, 0)
        offset = np.arange(axis.patch_px)
        owned: Bools = offset >= first[:, None]
        owned &= offset < axis.patch_px - cut[:, None]
        return owned

    def _start(self, step: Ints, axis: Axis, length_px: Ints) -> Ints:
        start = step * axis.stride_px
        if self.edges == "cover":
            start = np.minimum(start, length_px - axis.patch_px)
        return start

    def _check_sizes(self, name: Callable[[int], str]) -> None:
        height, width = self.patch_px
        least_height, least_width = height, width
        if self.edges == "pad":
            # A reflection cannot be longer than the image without its edge row.
            least_height, least_width = (height + 1) // 2 + 1, (width + 1) // 2 + 1
        is_small = (self.heights_px < least_height) | (self.widths_px < least_width)
        problems = []
        for image in np.flatnonzero(is_small).tolist():
            size = f"{self.heights_px[image]} x {self.widths_px[image]} px"
            problems.append((name(image), size))
        if problems:
            raise list_problems(problems).make_error(
                counted_of(len(problems), self.heights_px.size, "image", "is", "are")
                + f" too small for patches of {height} x {width} px",
                "choose a smaller data.patch_px, or data.edges=pad, which reflects up to half a patch",
            )


def pair_px(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """Return a positive size as (height, width); one number stands for both.

    Raises:
        ConfigError: The size is not one or two positive integers.
    """
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(is_count(side, 1) for side in pair):
        raise ConfigError(
            f"{name}={value!r} is not usable: give one positive number of pixels or (height, width)"
        )
    return pair[0], pair[1]


class SlicedImage(Protocol):
    """Array [C, H, W], or an image that is read by slices like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)."""

    def __getitem__(self, part: tuple[slice, slice, slice], /) -> Array:
        """Read the given rows and columns of the given channels."""


def cut_patch(image: SlicedImage, top_px: int, left_px: int, size_px: Size) -> Array:
    """Cut one patch from an image.

    Beyond an edge, the image is reflected without its edge row, as often as necessary.

    Args:
        image: [C, H, W].
        top_px: First row.
        left_px: First column.
        size_px: (h, w).

    Returns:
        [C, h, w], a view if it is inside the image.
    """
    (height, width), (_, rows, columns) = size_px, image.shape
    if 0 <= top_px <= rows - height and 0 <= left_px <= columns - width:
        return image[:, top_px : top_px + height, left_px : left_px + width]
    # The rows and columns that the patch shows, some of them more than once.
    y, x = mirror(top_px, height, rows), mirror(left_px, width, columns)
    top, left = int(y.min()), int(x.min())
    inside = image[:, top : int(y.max()) + 1, left : int(x.max()) + 1]
    # One axis after the other, since both at once take four times as long.
    patch: Array = inside[:, y - top][:, :, x - left]
    return patch


def mirror(start: int, length: int, limit: int) -> Ints:
    """Return the numbers of `length` rows from `start` on, reflected into `limit` rows.

    The edge row is not repeated.
    """
    if limit <= 1:
        return np.zeros(length, np.int64)
    # Down and up again without repeating the two edge rows: 0 1 2 3 2 1 for four rows.
    period = 2 * (limit - 1)
    row = np.arange(start, start + length) % period
    return np.minimum(row, period - row)
