"""Defects of masks: their objects, and the patches with and without defects; kept beside the stores."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from typing_extensions import override

from lit_data.core.grid import PatchGrid
from lit_data.core.progress import track
from lit_data.core.types import IGNORED, Array, Bools, Doubles, Ints
from lit_data.images.bank import ImageBank, cut_some
from lit_data.images.store.store import keep_found

_NO_DEFECT = np.zeros((1, 1, 1), np.uint8)
_ALL_IGNORED = np.full((1, 1, 1), IGNORED, np.uint8)
_MOST_MARKED = 50  # % of the pixels; defects usually cover less

log = logging.getLogger(__name__)

PICKS = 3
"""Number of random numbers that `ObjectPool.pick` takes: image, object, pixel."""
_PIXELS = 16  # stored for each object: enough to show all parts of a large one, and few in memory
_OBJECTS = 256
"""Most objects of a class in an image; the largest are kept, as a noisy mask has thousands of specks."""


class PartialMasks(ImageBank):
    """Masks of images, some of which have none: they are all background, or all ignored.

    Args:
        images: All images.
        chosen: [n] numbers of the images of this bank.
        masks: The existing masks.
        of_image: Number of the mask of each image; -1 if it has none.
        numbers: Class that the mask of each image marks; None if masks have class numbers.
        unmarked: True for each image with a defect that no mask marks, whose pixels are ignored;
            None if there are no such images.

    Attributes:
        unmarked: [n] the same for the chosen images.
    """

    channels = 1
    dtype: "np.dtype[Any]" = np.dtype(np.uint8)

    def __init__(
        self,
        images: ImageBank,
        chosen: Ints,
        masks: ImageBank,
        of_image: Ints,
        numbers: Array | None = None,
        unmarked: Bools | None = None,
    ) -> None:
        self.bank, self.of_image = masks, of_image[chosen]
        self.numbers = None if numbers is None else numbers[chosen].astype(np.uint8)
        self.unmarked = np.zeros(len(chosen), np.bool_) if unmarked is None else unmarked[chosen]
        self._images, self._chosen = images, chosen
        self.heights_px, self.widths_px = images.heights_px[chosen], images.widths_px[chosen]
        has_mask = self.of_image >= 0
        mask_numbers = self.of_image[has_mask]
        # A mask may have another size than its image, which a later check refuses by name.
        self.heights_px[has_mask] = masks.heights_px[mask_numbers]
        self.widths_px[has_mask] = masks.widths_px[mask_numbers]
        self.skipped: tuple[tuple[str, str], ...] = ()

    def select(self, images: Ints) -> "PartialMasks":
        """Return the masks of the given images; this bank must have those of all images."""
        return PartialMasks(
            self._images, images, self.bank, self.of_image, self.numbers, self.unmarked
        )

    def ignore(self, unmarked: Bools) -> "PartialMasks":
        """Return the masks of all images, and ignore the pixels of unmarked ones without a mask."""
        every = np.arange(len(self))
        return PartialMasks(self._images, every, self.bank, self.of_image, self.numbers, unmarked)

    def __len__(self) -> int:
        return len(self.of_image)

    def __getitem__(self, index: int) -> Array:
        """Return one mask: [1, H, W] uint8."""
        number = int(self.of_image[index])
        if number < 0:
            shape = 1, int(self.heights_px[index]), int(self.widths_px[index])
            value = _ALL_IGNORED if self.unmarked[index] else _NO_DEFECT
            return np.broadcast_to(value, shape)
        mask = self.bank[number]
        if self.numbers is None:
            return mask
        return np.where(mask == 1, self.numbers[index], mask)

    @override
    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        mask_numbers = self.of_image[images]
        with_mask = np.flatnonzero(mask_numbers >= 0)
        if len(with_mask) < len(rows):
            rows[...] = 0
            rows[self.unmarked[images]] = IGNORED
        cut_some(self.bank, with_mask, mask_numbers, tops_px, lefts_px, rows)
        if self.numbers is not None:
            class_numbers = self.numbers[images, None, None, None]
            rows[...] = np.where(rows == 1, class_numbers, rows)

    def name(self, index: int) -> str:
        """Return the path of the mask, or of the image if it has no mask."""
        number = int(self.of_image[index])
        if number >= 0:
            return self.bank.name(number)
        return self._images.name(int(self._chosen[index]))


def find_occupancy(masks: PartialMasks, grid: PatchGrid, folder: Path | None) -> Ints:
    """Find the patches that show a defect; each mask is read once.

    Args:
        masks: Masks of all images.
        grid: Grid of all images.
        folder: Folder that keeps the result for the next run; None keeps nothing.

    Returns:
        [M] ascending numbers of patches.

    Raises:
        StoreError: The folder cannot be written.
    """
    # The result is valid only for these masks and this grid.
    identity = (masks.of_image, masks.numbers, *_describe(grid))
    columns = keep_found(
        folder, masks.bank, identity, "occupancy", lambda: _find_rows(masks, grid), version=2
    )
    return columns["patch"]


def find_blank(bank: ImageBank, grid: PatchGrid, least: float, folder: Path | None) -> Ints:
    """Find the patches of all images with a standard deviation below a limit.

    Each image is read once.

    Args:
        bank: All images.
        grid: Grid of all images.
        least: Least standard deviation of a channel of a patch that is not blank, in pixel values.
        folder: As for `find_occupancy`.

    Returns:
        [M] ascending numbers of patches.
    """
    identity = (np.array([least]), *_describe(grid))
    columns = keep_found(
        folder, bank, identity, "blank", lambda: {"patch": _find_flat(bank, grid, least)}
    )
    return columns["patch"]


def _describe(grid: PatchGrid) -> tuple[Ints, ...]:
    return (
        grid.heights_px,
        grid.widths_px,
        np.array((*astuple(grid.vertical), *astuple(grid.horizontal))),
    )


def count_classes(masks: PartialMasks, classes: int, folder: Path | None) -> Ints:
    """Count the pixels of each class in each image, [n, classes]; each mask is read once.

    Args:
        masks: Masks of all images.
        classes: Number of classes, including the background.
        folder: As for `find_occupancy`.
    """

    def count() -> dict[str, Ints]:
        counts = np.zeros((len(masks), classes), np.int64)
        counts[:, 0] = masks.heights_px * masks.widths_px  # without a mask, all is background
        with_mask = np.flatnonzero(masks.of_image >= 0).tolist()
        for image in track(with_mask, "counting pixels of classes", len(with_mask)):
            mask = masks[image][0]
            marked = mask[_find_marked(mask)]
            counts[image] = np.bincount(marked.reshape(-1), minlength=256)[:classes]
            counts[image, 0] += mask.size - marked.size
        return {"count": counts.reshape(-1)}

    sizes_px = masks.heights_px, masks.widths_px
    identity = (masks.of_image, masks.numbers, np.array([classes]), *sizes_px)
    columns = keep_found(folder, masks.bank, identity, "classes", count)
    counts = columns["count"].reshape(-1, classes)
    if classes == 2:
        _warn_of_inverted(folder, round(100 * counts[:, 1].sum() / max(1, counts.sum())))
    return counts


@lru_cache(maxsize=64)  # warn once for each dataset, as masks are counted several times
def _warn_of_inverted(folder: Path | None, percent: int) -> None:
    if percent > _MOST_MARKED:
        log.warning(
            "the masks mark %d %% of all pixels as defects: if they mark what is good, invert them "
            "with data.mask_read.invert=true",
            percent,
        )


def _find_rows(masks: PartialMasks, grid: PatchGrid) -> dict[str, Ints]:
    patches: list[int] = []
    marked = np.flatnonzero(masks.of_image >= 0).tolist()
    for image in track(marked, "finding patches with a defect", len(marked)):
        shows = is_defect(masks[image][0])
        if shows.any():
            patches += _find_rows_of(shows, image, grid)
    return {"patch": np.array(patches, np.int64)}


def _find_rows_of(shows: Bools, image: int, grid: PatchGrid) -> list[int]:
    height, width = grid.patch_px
    low_y, high_y = np.flatnonzero(shows.any(1))[[0, -1]]
    low_x, high_x = np.flatnonzero(shows.any(0))[[0, -1]]
    patches = np.array(grid.patches_of(image))
    _, y, x = grid.locate(patches)
    # Few patches overlap the box around all defects; only those are checked.
    is_near = (y <= high_y) & (y + height > low_y) & (x <= high_x) & (x + width > low_x)
    rows = []
    for number in np.flatnonzero(is_near).tolist():
        top, left = int(y[number]), int(x[number])
        if shows[top : top + height, left : left + width].any():
            rows.append(int(patches[number]))
    return rows


def _find_flat(bank: ImageBank, grid: PatchGrid, least: float) -> Ints:
    height, width = grid.patch_px
    flat_patches: list[int] = []
    for image in track(range(len(bank)), "finding blank patches", len(bank)):
        pixels = bank[image]
        patches = np.array(grid.patches_of(image))
        _, y, x = grid.locate(patches)
        for patch, top, left in zip(patches.tolist(), y.tolist(), x.tolist(), strict=True):
            part = pixels[:, top : top + height, left : left + width]
            if part.std((1, 2), dtype=np.float32).max() < least:
                flat_patches.append(patch)
    return np.array(flat_patches, np.int64)


def is_defect(mask: Array) -> Bools:
    """Return True for pixels of a defect, which are neither background nor ignored."""
    is_marked: Bools = (mask > 0) & (mask != IGNORED)
    return is_marked


class MaskObjects(NamedTuple):
    """Pixels of the objects of all images, up to 16 evenly spaced ones for each object.

    Each pixel has one row. Rows are ordered by image, class and object.

    Attributes:
        image: [M] number of the image.
        kind: [M] number of the class.
        number: [M] number of the object among all of them.
        y: [M] row of the pixel, px.
        x: [M] column of the pixel, px.
    """

    image: Ints
    kind: Ints
    number: Ints
    y: Ints
    x: Ints

    def take(self, rows: Bools | Ints) -> Self:
        """Return the given rows."""
        return type(self)(*(column[rows] for column in self))


def find_objects(masks: PartialMasks, folder: Path | None) -> MaskObjects:
    """Find the objects of all masks; each mask is read once.

    Args:
        masks: Masks of all images.
        folder: Folder that keeps the objects for the next run; None keeps nothing.

    Raises:
        StoreError: The folder cannot be written.
    """
    identity = (masks.of_image, masks.numbers, masks.heights_px, masks.widths_px)
    columns = keep_found(folder, masks.bank, identity, "objects", lambda: _read_objects(masks))
    return MaskObjects(*(columns[name] for name in MaskObjects._fields))


def _read_objects(masks: PartialMasks) -> dict[str, Ints]:
    rows = [np.zeros((0, len(MaskObjects._fields)), np.int64)]
    object_count = 0
    marked_images = np.flatnonzero(masks.of_image >= 0).tolist()
    for image in track(marked_images, "finding objects", len(marked_images)):
        for kind, pixels in _list_objects(masks[image][0]):
            object_rows = np.empty((len(pixels), len(MaskObjects._fields)), np.int64)
            object_rows[:, :3] = image, kind, object_count
            object_rows[:, 3:] = pixels
            rows.append(object_rows)
            object_count += 1
    return dict(zip(MaskObjects._fields, np.concatenate(rows).T, strict=True))


def _list_objects(mask: Array) -> Iterator[tuple[int, Ints]]:
    """Yield the class and some pixels [M, 2] (y, x) of each object of a mask [H, W]."""
    import cv2

    rows, columns = _find_marked(mask)
    marked = mask[rows, columns]
    for kind in np.unique(marked[is_defect(marked)]).tolist():
        _, labels, stats, _ = cv2.connectedComponentsWithStats(
            (marked == kind).astype(np.uint8), connectivity=8
        )
        # Label 0 is everything outside the class.
        by_size = np.argsort(-stats[1:, cv2.CC_STAT_AREA], kind="stable") + 1
        for label in np.sort(by_size[:_OBJECTS]).tolist():
            left, top, width, height, _ = stats[label].tolist()
            pixels = np.argwhere(labels[top : top + height, left : left + width] == label)
            count = min(_PIXELS, len(pixels))
            evenly_spaced = np.linspace(0, len(pixels) - 1, count).round().astype(np.int64)
            yield kind, pixels[evenly_spaced] + (rows.start + top, columns.start + left)


def _find_marked(mask: Array) -> tuple[slice, slice]:
    """Return the rows and columns of a mask [H, W] outside of which everything is background.

    They begin at even numbers: OpenCV numbers objects by blocks of 2 x 2 pixels, so that the
    numbers are those of the whole mask.
    """
    import cv2

    left, top, width, height = cv2.boundingRect(mask)
    return slice(top - top % 2, top + height), slice(left - left % 2, left + width)


class ObjectPool:
    """Pool of objects to pick from: an image, then an object in it, then one of its pixels.

    Each image is equally likely, and so is each object in it: an image with a hundred specks is
    picked no more often than one with a single scratch.

    Args:
        objects: Objects, in the order of `MaskObjects`.
    """

    def __init__(self, objects: MaskObjects) -> None:
        self.objects = objects
        self._pixel_starts, self._pixel_counts = _find_runs(objects.number)
        self._object_starts, self._object_counts = _find_runs(objects.image[self._pixel_starts])

    def __len__(self) -> int:
        """Count the images that show an object of the pool."""
        return len(self._object_starts)

    def pick(self, draws: Doubles) -> MaskObjects:
        """Pick a pixel of an object for each sample.

        Args:
            draws: [M, 3] random numbers in [0, 1).
        """
        image = (draws[:, 0] * len(self)).astype(np.int64)
        object_in_image = (draws[:, 1] * self._object_counts[image]).astype(np.int64)
        number = self._object_starts[image] + object_in_image
        pixel_of_object = (draws[:, 2] * self._pixel_counts[number]).astype(np.int64)
        return self.objects.take(self._pixel_starts[number] + pixel_of_object)


def split_by_kind(objects: MaskObjects, image_kinds: Sequence[str]) -> list[MaskObjects]:
    """Split objects by class and by the kind of their image, so that each is picked equally often.

    Args:
        objects: The objects.
        image_kinds: Kind of each image of the dataset; empty if unknown.
    """
    group = objects.kind
    if image_kinds:
        names, numbers = np.unique(np.array(image_kinds), return_inverse=True)
        # One number for each pair of a class and a kind of image.
        group = objects.kind * len(names) + numbers[objects.image]
    return [objects.take(group == number) for number in np.unique(group).tolist()]


def _find_runs(values: Ints) -> tuple[Ints, Ints]:
    """Return the first row and the length of each run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return starts, np.diff(starts, append=len(values))
