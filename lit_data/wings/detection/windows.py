"""Windows of large images at full resolution, each an image of its own with the boxes it shows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from lit_data.annotations.labels import LabelTable, ignored_class
from lit_data.core.grid import PatchGrid
from lit_data.core.mosaic import FILL, MosaicPlan
from lit_data.core.types import Array, Doubles, FieldSpec, Floats, Ints, LookAhead, Size
from lit_data.images.bank import ImageBank
from lit_data.wings.detection.dataset import DetectionDataset
from lit_inspect.counts import counted, inflect

log = logging.getLogger(__name__)

_ROUNDING = 1e-6
"""Rounding error of a visible fraction, because boxes are float32 fractions of their image."""
_PAIRS = 2**18


class WindowBank(ImageBank):
    """Numbered windows of the images of a bank: [C, h, w], cut on demand.

    The area beyond an image that is smaller than a window is gray.

    Args:
        bank: The images.
        patch_px: (height, width) of a window.
        stride_px: (down, right) from one window to the next; the last ones are flush with the edge.
        fill: Pixel value of the gray.
    """

    def __init__(
        self,
        bank: ImageBank,
        patch_px: Size,
        stride_px: Size,
        fill: float = FILL,
    ) -> None:
        self._fill = fill
        self.bank = bank
        sizes_px = np.stack((bank.heights_px, bank.widths_px), axis=1)
        self.image_sizes_px = sizes_px.astype(np.int64)
        heights_px, widths_px = np.maximum(self.image_sizes_px, patch_px).T
        self.grid = PatchGrid(heights_px, widths_px, patch_px, stride_px)
        self.channels = bank.channels
        self.dtype = bank.dtype
        self.skipped = bank.skipped
        self.fetches = bank.fetches
        height, width = patch_px
        self.heights_px = np.full(len(self.grid), height, np.int64)
        self.widths_px = np.full(len(self.grid), width, np.int64)

    @override
    def __len__(self) -> int:
        return len(self.grid)

    @override
    def __getitem__(self, index: int) -> Array:
        image, top, left = self.grid[index]
        patch_px = self.grid.patch_px
        height, width = np.minimum(self.image_sizes_px[image], patch_px).tolist()
        part = np.empty((1, self.channels, height, width), self.dtype)
        self.bank.cut_into(
            np.array([image]),
            np.array([top]),
            np.array([left]),
            part,
        )
        window: Array = part[0]
        if (height, width) != patch_px:
            window = np.full((self.channels, *patch_px), self._fill, self.dtype)
            window[:, :height, :width] = part[0]
        return window

    @override
    def name(self, index: int) -> str:
        return self.bank.name(self.grid[index][0])

    def images_of(self, windows: Ints) -> Ints:
        """Return the number of the image of each window: [n]."""
        return self.grid.locate(windows)[0]

    def windows_of(self, images: Sequence[int]) -> Ints:
        """Return the numbers of the windows of some images, image after image."""
        parts = [np.arange(0)]
        for image in images:
            parts.append(np.array(self.grid.patches_of(image)))
        return np.concatenate(parts).astype(np.int64)

    def find_frames(self, windows: Ints) -> Ints:
        """Return the edges of windows in their images: [n, 4] (left, top, right, bottom) px."""
        _, top, left = self.grid.locate(windows)
        height, width = self.grid.patch_px
        right = left + width
        bottom = top + height
        return np.stack((left, top, right, bottom), axis=1)

    @property
    @override
    def fits(self) -> bool:
        return self.bank.fits

    @property
    @override
    def window_bytes(self) -> int | None:
        return self.bank.window_bytes

    @override
    def groups_of(self, numbers: Ints) -> Ints:
        images = self.images_of(numbers)
        return self.bank.groups_of(images)

    @override
    def count_bytes(self, numbers: Ints) -> Ints:
        images = self.images_of(numbers)
        return self.bank.count_bytes(images)

    @override
    def look_ahead(self, numbers: Ints) -> LookAhead | None:
        images = self.images_of(numbers)
        return self.bank.look_ahead(images)

    @override
    def check_size(self) -> None:
        self.bank.check_size()


class MarkedBoxes(NamedTuple):
    """Boxes of an image.

    Attributes:
        corners: [n, 4] (left, top, right, bottom) px.
        classes: [n].
    """

    corners: Doubles
    classes: Ints


class WholeImage(NamedTuple):
    """An image that windows are cut out of.

    Attributes:
        size_px: (height, width).
        frames: [w, 4] corners (left, top, right, bottom) of its windows, px.
        objects: Its boxes.
        ignored: Its regions in which objects do not count.
    """

    size_px: Size
    frames: Ints
    objects: MarkedBoxes
    ignored: MarkedBoxes


class Windows(NamedTuple):
    """Windows of all images of a dataset.

    Attributes:
        bank: Their pixels.
        labels: Their boxes.
    """

    bank: WindowBank
    labels: LabelTable

    def find_whole(self, image: int, boxes: Floats) -> WholeImage:
        """Return an image with its windows and boxes, given its boxes [n, 5] as in a `LabelTable`."""
        height, width = self.bank.image_sizes_px[image].tolist()
        numbers = self.bank.windows_of([image])
        objects, ignored = part_boxes(boxes, self.bank.image_sizes_px[image])
        return WholeImage((height, width), self.bank.find_frames(numbers), objects, ignored)


def part_boxes(boxes: Floats, size_px: Ints) -> tuple[MarkedBoxes, MarkedBoxes]:
    """Split boxes [n, 5] of an image of (height, width) into its objects and its ignored regions."""
    corners = _find_corners(boxes, size_px)
    numbers = boxes[:, 0].astype(np.int64)
    is_object = numbers >= 0
    objects = MarkedBoxes(corners[is_object], numbers[is_object])
    return objects, MarkedBoxes(corners[~is_object], ignored_class(numbers[~is_object]))


def choose_stride(labels: LabelTable, sizes_px: Ints, patch_px: Size) -> Size:
    """Choose the distance of windows so that the largest object fits into their overlap.

    The overlap is half a window at most, and half a window if no object is known.

    Args:
        labels: Boxes of the images.
        sizes_px: [I, 2] (height, width) of the images.
        patch_px: (height, width) of a window.
    """
    half = np.array(patch_px) // 2
    overlap = half
    is_object = labels.boxes[:, 0] >= 0
    if is_object.any():
        counts = np.diff(labels.ends, prepend=0)
        of_box = np.repeat(np.arange(len(labels)), counts)[is_object]
        fractions = labels.boxes[is_object][:, [4, 3]].astype(np.float64)
        sides = fractions * sizes_px[of_box]
        largest = np.ceil(sides.max(0) - 1e-3)
        overlap = np.minimum(largest.astype(np.int64), half)
    down, right = (np.array(patch_px) - overlap).tolist()
    return down, right


def cut_windows(
    labels: LabelTable,
    bank: ImageBank,
    *,
    patch_px: Size,
    stride_px: Size,
    least_visible: float,
    fill: float = FILL,
) -> Windows:
    """Cut images into windows, and clip their boxes to the windows.

    Args:
        labels: Boxes of the images.
        bank: The images.
        patch_px: (height, width) of a window.
        stride_px: (down, right) from one window to the next.
        least_visible: Smallest fraction of the area of a box that a window must show; boxes with
            less are dropped.
        fill: Pixel value beyond an image that is smaller than a window.
    """
    windows = WindowBank(bank, patch_px, stride_px, fill)
    counts = np.zeros(len(windows), np.int64)
    parts = [np.zeros((0, 5), np.float32)]
    visible = 0
    has_boxes = np.diff(labels.ends, prepend=0) > 0
    for image in np.flatnonzero(has_boxes).tolist():
        boxes = labels.of(image)
        corners = _find_corners(boxes, windows.image_sizes_px[image])
        is_visible = np.zeros(len(boxes), np.bool_)
        numbers = windows.windows_of([image])
        # In chunks, because an image may have thousands of both.
        chunk_count = 1 + len(numbers) * len(boxes) // _PAIRS
        for chunk in np.array_split(numbers, chunk_count):
            frames = windows.find_frames(chunk)
            # Any part of an ignored region is kept.
            limits = np.where(boxes[:, 0] < 0, 0, least_visible)
            row, box, cut = _cut_boxes(corners, frames, limits)
            counts[chunk] = np.bincount(row, minlength=len(chunk))
            is_visible[box] = True
            fractions = cut / np.tile(patch_px[::-1], 2)
            first = fractions[:, :2]
            second = fractions[:, 2:]
            columns = (boxes[box, :1], (first + second) / 2, second - first)
            parts.append(np.hstack(columns).astype(np.float32))
        visible += int(is_visible.sum())
    if visible < len(labels.boxes):
        skipped = len(labels.boxes) - visible
        log.warning(
            "%d of %s skipped, because each window shows less than data.min_visible=%g of %s: "
            "set a larger data.patch_px, or a lower data.min_visible",
            skipped,
            f"{counted(len(labels.boxes), 'box', 'boxes')} {inflect('[is|are]', skipped)}",
            least_visible,
            inflect("[it|them]", skipped),
        )
    ends = np.cumsum(counts, dtype=np.int64)
    return Windows(windows, LabelTable(labels.classes, np.concatenate(parts), ends))


def _find_corners(boxes: Floats, size_px: Ints) -> Doubles:
    """Return (left, top, right, bottom) px of boxes [n, 5] of an image of (height, width)."""
    exact = boxes.astype(np.float64)
    centres = exact[:, 1:3]
    halves = exact[:, 3:] / 2
    corners = np.concatenate((centres - halves, centres + halves), axis=1)
    return corners * np.tile(size_px[::-1], 2)


def _cut_boxes(
    corners: Doubles, frames: Ints, least_visible: Doubles
) -> tuple[Ints, Ints, Doubles]:
    """Return the parts of boxes that windows show.

    Args:
        corners: [n, 4] of the boxes in px of the image.
        frames: [w, 4] of the windows.
        least_visible: [n] limit of each box, see `cut_windows`.

    Returns:
        Window numbers [K], ascending, box numbers [K], and (left, top, right, bottom) px of the
        window [K, 4].
    """
    low = np.maximum(corners[:, :2], frames[:, None, :2])
    high = np.minimum(corners[:, 2:], frames[:, None, 2:])
    sides = corners[:, 2:] - corners[:, :2]
    visible_sides = (high - low).clip(0)
    fractions = visible_sides.prod(2) / sides.prod(1)
    is_visible = (fractions > 0) & (fractions >= least_visible - _ROUNDING)
    window, box = np.nonzero(is_visible)
    cut = np.concatenate((low[is_visible], high[is_visible]), axis=1)
    return window, box, cut - np.tile(frames[window, :2], 2)


class WindowDataset(DetectionDataset):
    """Windows of one split, see `DetectionDataset`; ``index`` is the number of the window.

    ``image_index`` and ``shape`` refer to its image, and ``window`` [2] int64 is the (top, left) px
    of the window there.

    Args:
        windows: Windows of all images, with their boxes.
        images: Numbers of this split's images.
        options: Options of `DetectionDataset`.
    """

    bank: WindowBank

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        image, top, left = self.bank.grid.locate(rows["index"])
        rows["image_index"][:] = image
        rows["shape"][:] = self.bank.image_sizes_px[image]
        rows["window"][:] = np.stack((top, left), axis=1)

    @override
    def find_originals(self, boxes: Doubles, images: Ints) -> Doubles:
        frames = self.bank.find_frames(images)
        in_window = super().find_originals(boxes, images)
        moved = in_window + np.tile(frames[:, :2], 2)
        numbers = self.bank.images_of(images)
        sizes_px = self.bank.image_sizes_px[numbers]
        return np.minimum(moved, np.tile(sizes_px[:, ::-1], 2))

    @override
    def _leave_grey_out(self, plan: MosaicPlan) -> MosaicPlan:
        images = self.bank.images_of(plan.image)
        filled_px = np.minimum(self.bank.image_sizes_px[images], self.bank.grid.patch_px)
        ends = np.ceil((filled_px + plan.origin) * plan.scale[:, None]).astype(np.int64)
        low, high = plan.window[:, :2], plan.window[:, 2:]
        rectangles = np.concatenate((low, np.minimum(high, ends)), axis=1)
        return replace(plan, window=rectangles)

    @override
    def _describe(self) -> dict[str, FieldSpec]:
        return super()._describe() | {"window": FieldSpec((2,), "int64")}
