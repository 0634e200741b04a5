"""Patches that show a defect, and blank ones; found once and kept beside the stores."""

from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.progress import track
from lit_data.io.store.kept import keep_found
from lit_data.types import IGNORED, Array

Ints = NDArray[np.int64]
_NO_DEFECT: Final = np.zeros((1, 1, 1), np.uint8)


class PartialMasks:
    """Masks of images of which some have none: nothing is marked there.

    Args:
        images: All images.
        chosen: [n] numbers of those whose masks these are.
        masks: Those that there are.
        of_image: For each image the number of its mask; -1 where it has none.
        numbers: For each image the class of what its mask marks; None: the masks hold the numbers
            of classes.
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
    ) -> None:
        self.bank, self.of_image = masks, of_image[chosen]
        self.numbers = None if numbers is None else numbers[chosen].astype(np.uint8)
        self._images, self._chosen = images, chosen
        self.heights_px, self.widths_px = images.heights_px[chosen], images.widths_px[chosen]
        has = self.of_image >= 0
        own = self.of_image[has]
        self.heights_px[has], self.widths_px[has] = masks.heights_px[own], masks.widths_px[own]
        self.skipped: tuple[tuple[str, str], ...] = ()

    def select(self, images: Ints) -> "PartialMasks":
        """The masks of some images, where these are those of all."""
        return PartialMasks(self._images, images, self.bank, self.of_image, self.numbers)

    def __len__(self) -> int:
        return len(self.of_image)

    def __getitem__(self, index: int) -> Array:
        """[1, H, W] uint8."""
        number = int(self.of_image[index])
        if number >= 0:
            mask = self.bank[number]
            return mask if self.numbers is None else np.where(mask == 1, self.numbers[index], mask)
        return np.broadcast_to(
            _NO_DEFECT, (1, int(self.heights_px[index]), int(self.widths_px[index]))
        )

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """See `lit_data.io.images.image_source.cut_patches`."""
        numbers = self.of_image[images]
        has = np.flatnonzero(numbers >= 0)
        own = rows if len(has) == len(rows) else np.empty((len(has), *rows.shape[1:]), rows.dtype)
        if len(has):
            cut_patches(self.bank, numbers[has], tops_px[has], lefts_px[has], own)
        if self.numbers is not None:
            own[...] = np.where(own == 1, self.numbers[images[has], None, None, None], own)
        if own is not rows:
            rows[...] = 0
            rows[has] = own

    def name(self, index: int) -> str:
        """Path of the mask, or of the image that has none."""
        number = int(self.of_image[index])
        return (
            self.bank.name(number) if number >= 0 else self._images.name(int(self._chosen[index]))
        )


def find_occupancy(masks: PartialMasks, grid: PatchGrid, folder: Path | None) -> Ints:
    """Find the patches that show a defect; each mask is read once.

    Args:
        masks: Of all images.
        grid: Of all images.
        folder: Where what was found is kept for the next run; None keeps nothing.

    Returns:
        [M] ascending numbers of patches.

    Raises:
        StoreError: The folder cannot be written.
    """
    about = (masks.of_image, masks.numbers, *_describe(grid))
    kept = keep_found(
        folder, masks.bank, about, "occupancy", lambda: _find_rows(masks, grid), version=2
    )
    patches: Ints = kept["patch"]
    return patches


def find_blank(bank: ImageBank, grid: PatchGrid, least: float, folder: Path | None) -> Ints:
    """The patches of all images whose pixels differ by less than a standard deviation; each image
    is read once.

    Args:
        bank: All images.
        grid: Of all images.
        least: Standard deviation of a channel from which on a patch is not blank, in pixel values.
        folder: As for `find_occupancy`.

    Returns:
        [M] ascending numbers of patches.
    """
    about = (np.array([least]), *_describe(grid))
    found: Ints = keep_found(
        folder, bank, about, "blank", lambda: {"patch": _find_flat(bank, grid, least)}
    )["patch"]
    return found


def _describe(grid: PatchGrid) -> tuple[Ints, ...]:
    return (
        grid.heights_px,
        grid.widths_px,
        np.array((*astuple(grid.vertical), *astuple(grid.horizontal))),
    )


def count_classes(masks: PartialMasks, classes: int, folder: Path | None) -> Ints:
    """[n, classes] pixels of each class in each image; each mask is read once.

    Args:
        masks: Of all images.
        classes: Number of classes, background included.
        folder: As for `find_occupancy`.
    """

    def make() -> dict[str, Ints]:
        found = np.zeros((len(masks), classes), np.int64)
        found[:, 0] = masks.heights_px * masks.widths_px
        marked = np.flatnonzero(masks.of_image >= 0).tolist()
        for image in track(marked, "counting pixels of classes", len(marked)):
            found[image] = np.bincount(masks[image].reshape(-1), minlength=256)[:classes]
        return {"count": found.reshape(-1)}

    about = (masks.of_image, masks.numbers, np.array([classes]), masks.heights_px, masks.widths_px)
    counts: Ints = keep_found(folder, masks.bank, about, "classes", make)["count"].reshape(
        -1, classes
    )
    return counts


def _find_rows(masks: PartialMasks, grid: PatchGrid) -> dict[str, Ints]:
    patches: list[int] = []
    marked = np.flatnonzero(masks.of_image >= 0).tolist()
    for image in track(marked, "finding patches with a defect", len(marked)):
        shows = is_defect(masks[image][0])
        if shows.any():
            patches += _find_rows_of(shows, image, grid)
    return {"patch": np.array(patches, np.int64)}


def _find_rows_of(shows: NDArray[np.bool_], image: int, grid: PatchGrid) -> list[int]:
    height, width = grid.patch_px
    low_y, high_y = np.flatnonzero(shows.any(1))[[0, -1]]
    low_x, high_x = np.flatnonzero(shows.any(0))[[0, -1]]
    patches = np.array(grid.patches_of(image))
    _, y, x = grid.locate(patches)
    near = (y <= high_y) & (y + height > low_y) & (x <= high_x) & (x + width > low_x)
    places = zip(patches[near].tolist(), y[near].tolist(), x[near].tolist(), strict=True)
    return [
        patch for patch, top, left in places if shows[top : top + height, left : left + width].any()
    ]


def _find_flat(bank: ImageBank, grid: PatchGrid, least: float) -> Ints:
    height, width = grid.patch_px
    found: list[int] = []
    for image in track(range(len(bank)), "finding blank patches", len(bank)):
        pixels, patches = bank[image], np.array(grid.patches_of(image))
        _, y, x = grid.locate(patches)
        for patch, top, left in zip(patches.tolist(), y.tolist(), x.tolist(), strict=True):
            part = pixels[:, top : top + height, left : left + width]
            if part.std((1, 2), dtype=np.float32).max() < least:
                found.append(patch)
    return np.array(found, np.int64)


def is_defect(mask: Array) -> NDArray[np.bool_]:
    """Return True for pixels that show a defect: neither background nor ignored."""
    found: NDArray[np.bool_] = (mask > 0) & (mask != IGNORED)
    return found
