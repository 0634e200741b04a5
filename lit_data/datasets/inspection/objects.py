"""Objects of masks, the connected regions of a class, from which training samples are chosen."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.inspection.occupancy import PartialMasks, is_defect
from lit_data.io.progress import track
from lit_data.io.store.kept import keep_found
from lit_data.types import Array

Ints = NDArray[np.int64]
PICKS: Final = 3
"""Random numbers that `ObjectPool.pick` takes: image, object, pixel."""
_PIXELS: Final = 16  # kept of an object: enough to see all parts of a large one, and few in memory
_OBJECTS: Final = 256
"""Objects of a class in an image: the largest, as a noisy mask has thousands of specks."""


class MaskObjects(NamedTuple):
    """Pixels of the objects of all images, up to 16 evenly spaced ones of each object.

    There is one row for each pixel. Rows are ordered by image, class and object.

    Attributes:
        image: [M] number of the image.
        kind: [M] number of the class.
        number: [M] number of the object among all of them.
        y: [M] row of the pixel, px.
        x: [M] its column, px.
    """

    image: Ints
    kind: Ints
    number: Ints
    y: Ints
    x: Ints

    def take(self, rows: NDArray[np.bool_] | Ints) -> Self:
        """Return some of the rows."""
        return type(self)(*(column[rows] for column in self))


def find_objects(masks: PartialMasks, folder: Path | None) -> MaskObjects:
    """Find the objects of all masks; each mask is read once.

    Args:
        masks: Of all images.
        folder: Where the objects are kept for the next run; None keeps nothing.

    Raises:
        StoreError: The folder cannot be written.
    """
    identity = (masks.of_image, masks.numbers, masks.heights_px, masks.widths_px)
    columns = keep_found(folder, masks.bank, identity, "objects", lambda: _read_objects(masks))
    return MaskObjects(*(columns[name] for name in MaskObjects._fields))


def _read_objects(masks: PartialMasks) -> dict[str, Ints]:
    columns: list[list[Ints]] = [[] for _ in MaskObjects._fields]
    object_count = 0
    marked_images = np.flatnonzero(masks.of_image >= 0).tolist()
    for image in track(marked_images, "finding objects", len(marked_images)):
        for kind, pixels in _list_objects(masks[image][0]):
            row = (np.full(len(pixels), number) for number in (image, kind, object_count))
            for column, values in zip(columns, (*row, pixels[:, 0], pixels[:, 1]), strict=True):
                column.append(values.astype(np.int64))
            object_count += 1
    empty = np.zeros(0, np.int64)
    joined = [np.concatenate([empty, *column]) for column in columns]
    return dict(zip(MaskObjects._fields, joined, strict=True))


def _list_objects(mask: Array) -> Iterator[tuple[int, Ints]]:
    """Yield the class and some pixels [M, 2] (y, x) of each object of a mask [H, W]."""
    import cv2

    defects = is_defect(mask)
    for kind in np.unique(mask[defects]).tolist():
        count, labels, stats, _ = cv2.connectedComponentsWithStats(
            (mask == kind).astype(np.uint8), connectivity=8
        )
        by_size = np.argsort(-stats[1:count, cv2.CC_STAT_AREA], kind="stable") + 1
        for label in np.sort(by_size[:_OBJECTS]).tolist():
            left, top, width, height, _ = stats[label].tolist()
            pixels = np.argwhere(labels[top : top + height, left : left + width] == label)
            evenly_spaced = (
                np.linspace(0, len(pixels) - 1, min(_PIXELS, len(pixels))).round().astype(np.int64)
            )
            yield kind, pixels[evenly_spaced] + (top, left)


class ObjectPool:
    """Objects of which one is picked: an image, then an object in it, then one of its pixels.

    Each image is picked alike often, and so is each object in it: an image with a hundred specks
    no more often than one with a single scratch.

    Args:
        objects: In the order of `MaskObjects`.
    """

    def __init__(self, objects: MaskObjects) -> None:
        self.objects = objects
        self._pixel_starts, self._pixel_counts = _find_runs(objects.number)
        self._object_starts, self._object_counts = _find_runs(objects.image[self._pixel_starts])

    def __len__(self) -> int:
        """Count the images that show an object of the pool."""
        return len(self._object_starts)

    def pick(self, draws: NDArray[np.float64]) -> MaskObjects:
        """Pick a pixel of an object for each sample.

        Args:
            draws: [M, 3] in [0, 1).
        """
        image = (draws[:, 0] * len(self)).astype(np.int64)
        number = self._object_starts[image] + (draws[:, 1] * self._object_counts[image]).astype(
            np.int64
        )
        pixel = self._pixel_starts[number] + (draws[:, 2] * self._pixel_counts[number]).astype(
            np.int64
        )
        return self.objects.take(pixel)


def split_by_kind(objects: MaskObjects, image_kinds: Sequence[str]) -> list[MaskObjects]:
    """Split objects by class and by the kind of their image, so that each is picked alike often.

    Args:
        objects: The objects.
        image_kinds: Kind of each image of the dataset; empty where nothing says it.
    """
    names, numbers = (
        np.unique(np.array(image_kinds), return_inverse=True)
        if image_kinds
        else ((), np.zeros(0, int))
    )
    of_image = numbers[objects.image] if len(names) else np.zeros(len(objects.image), np.int64)
    group = objects.kind * max(1, len(names)) + of_image
    return [objects.take(group == number) for number in np.unique(group).tolist()]


def _find_runs(values: Ints) -> tuple[Ints, Ints]:
    """Return the first row and the length of each run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return starts, np.diff(starts, append=len(values))
