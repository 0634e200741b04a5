"""Which patch of which image a sample shows: cut at random, or one of a grid."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank
from lit_data.synthesis.watermarks.plan import sample_crops


@dataclass(frozen=True, slots=True)
class ProgressiveSize:
    """The side of training patches as a pure function of the epoch.

    So nothing is started anew when it changes, and a run that is resumed goes on with the size it
    would have had.

    Args:
        sizes: (first epoch, side in px) of each stage; the first begins with epoch 0.

    Raises:
        ConfigError: There is no stage, the epochs do not ascend from 0, or a size is not positive.
    """

    sizes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Accept plain lists, as a configuration file gives them, and check them."""
        rows = [tuple(row) if isinstance(row, Sequence) else () for row in self.sizes]
        object.__setattr__(self, "sizes", tuple(rows))
        whole = all(
            len(row) == 2
            and all(isinstance(n, int) and not isinstance(n, bool) for n in row)
            and row[1] > 0
            for row in rows
        )
        if not rows or not whole:
            raise ConfigError(f"sizes={self.sizes!r} must be a list of [first epoch, side in px]")
        epochs = [row[0] for row in rows]
        if epochs[0] != 0 or any(late <= early for early, late in pairwise(epochs)):
            raise ConfigError(
                f"sizes={self.sizes!r}: the epochs must ascend, and the first must be 0"
            )

    @property
    def largest_px(self) -> int:
        """The largest side of all, for which there must be room."""
        return max(size for _, size in self.sizes)

    def size_at(self, epoch: int) -> int:
        """The side of the patches of an epoch in px."""
        return self.sizes[bisect_right(self.sizes, epoch, key=lambda row: row[0]) - 1][1]


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Places:
    """Where M samples are cut.

    Attributes:
        split_image: [M] number of the image in the split.
        image: [M] number of the image in the bank.
        index: [M] number of the sample among those of all images, of which its random stream is
            made.
        position: [M, 2] (y, x) px.
    """

    split_image: Ints
    image: Ints
    index: Ints
    position: Ints


class RandomPatches:
    """Patches cut at random, a new place for each in each epoch.

    Args:
        bank: All images; those smaller than a patch are mirrored on.
        images: [I] numbers of those of the split.
        per_image: Samples of each image in an epoch.
        seed: Seed of the places.
    """

    def __init__(self, bank: ImageBank, images: Ints, per_image: int, seed: int) -> None:
        if isinstance(per_image, bool) or not isinstance(per_image, int) or per_image < 1:
            raise ConfigError(
                f"samples_per_image={per_image!r} must be a whole number of at least 1"
            )
        self.images, self.per_image, self.seed = images, per_image, seed
        self._sizes_px = _sizes_of(bank)

    def __len__(self) -> int:
        return len(self.images) * self.per_image

    def locate(self, indices: Ints, epoch: int, size_px: tuple[int, int]) -> Places:
        """Where samples are cut in an epoch; a pure function of (seed, epoch, sample)."""
        split_image = self.split_images_of(indices)
        image = self.images[split_image]
        index = image * self.per_image + indices % self.per_image
        room = np.maximum(self._sizes_px[image] - size_px, 0)
        return Places(split_image, image, index, sample_crops(self.seed, epoch, index, room))

    def split_images_of(self, indices: Ints) -> Ints:
        """[M] number in the split of the image of each sample."""
        return indices // self.per_image


class GridPatches:
    """Patches of a grid that covers every image; the same in each epoch.

    Args:
        bank: All images; those smaller than a patch are mirrored on.
        images: [I] numbers of those of the split.
        patch_px: (height, width).
        stride_px: Distance between patches, one number or (vertical, horizontal).
    """

    def __init__(
        self,
        bank: ImageBank,
        images: Ints,
        patch_px: tuple[int, int],
        stride_px: int | tuple[int, int],
    ) -> None:
        self.images = images
        heights, widths = np.maximum(_sizes_of(bank), patch_px).T
        self.grid = PatchGrid(heights, widths, patch_px, stride_px, name=bank.name)
        counts = self.grid.rows * self.grid.columns
        self._ends = np.cumsum(counts[images])
        self._shifts = np.cumsum(counts)[images] - self._ends

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def locate(self, indices: Ints, epoch: int, size_px: tuple[int, int]) -> Places:
        """Where samples lie."""
        split_image = self.split_images_of(indices)
        index = self._shifts[split_image] + indices
        image, y, x = self.grid.locate(index)
        return Places(split_image, image, index, np.stack((y, x), axis=1))

    def split_images_of(self, indices: Ints) -> Ints:
        """[M] number in the split of the image of each sample."""
        return np.searchsorted(self._ends, indices, side="right")


def _sizes_of(bank: ImageBank) -> Ints:
    return np.stack((np.asarray(bank.heights_px), np.asarray(bank.widths_px)), axis=1).astype(
        np.int64
    )
