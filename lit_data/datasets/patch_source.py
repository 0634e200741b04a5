"""Sources of patches, which choose the image and the position of each sample."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_count, is_count
from lit_data.core.errors import ConfigError
from lit_data.core.grid import PatchGrid
from lit_data.core.rng import sample_crops
from lit_data.core.types import FieldSpec, Ints, Size
from lit_data.images.bank import ImageBank


@dataclass(frozen=True, slots=True)
class ProgressiveSize:
    """Side of training patches as a pure function of the epoch.

    Nothing restarts when it changes, and a resumed run continues with the size that it would have
    had.

    Args:
        sizes: (first epoch, side in px) of each stage; the first stage begins with epoch 0.

    Raises:
        ConfigError: There is no stage, the epochs do not increase from 0, or a size is not
            positive.
    """

    sizes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Convert plain lists, as from a configuration file, and check them."""
        rows = [tuple(row) if isinstance(row, Sequence) else () for row in self.sizes]
        object.__setattr__(self, "sizes", tuple(rows))
        are_whole = all(
            len(row) == 2 and is_count(row[0], 0) and is_count(row[1], 1) for row in rows
        )
        if not rows or not are_whole:
            raise ConfigError(f"sizes={self.sizes!r} must be a list of [first epoch, side in px]")
        epochs = [row[0] for row in rows]
        if epochs[0] != 0 or any(late <= early for early, late in pairwise(epochs)):
            raise ConfigError(
                f"sizes={self.sizes!r}: the epochs must ascend, and the first must be 0"
            )

    @property
    def largest_px(self) -> int:
        """Largest side of all stages, which buffers must have space for."""
        return max(size for _, size in self.sizes)

    def size_at(self, epoch: int) -> int:
        """Return the side of the patches of an epoch, px."""
        return self.sizes[bisect_right(self.sizes, epoch, key=lambda row: row[0]) - 1][1]


@dataclass(frozen=True, slots=True)
class Places:
    """Patches of M samples, each in its image.

    Attributes:
        split_image: [M] number of the image in the split.
        image: [M] number of the image in the bank.
        index: [M] number of the patch among those of all images, so that its random numbers do not
            depend on the split.
        position: [M, 2] (y, x) px.
    """

    split_image: Ints
    image: Ints
    index: Ints
    position: Ints

    def put(self, rows: Ints, other: "Places") -> None:
        """Replace the given rows by those of other places."""
        self.split_image[rows] = other.split_image
        self.image[rows] = other.image
        self.index[rows] = other.index
        self.position[rows] = other.position


class PatchSource(ABC):
    """Source of the patch of each sample of a split, a pure function of sample and epoch.

    Attributes:
        images: [I] numbers in the bank of the images of the split.
        fields: Fields of samples in addition to those of `PatchDataset`.
    """

    images: Ints
    fields: Mapping[str, FieldSpec] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    @property
    @abstractmethod
    def patch_px(self) -> Size:
        """(height, width) of the largest patches of all epochs."""

    def size_at(self, epoch: int) -> Size:
        """Return (height, width) of the patches of an epoch."""
        return self.patch_px

    @property
    @abstractmethod
    def image_ends(self) -> Ints | None:
        """End of the samples of each image, [I]; None if that changes with the epoch."""

    @abstractmethod
    def locate(self, indices: Ints, epoch: int) -> Places:
        """Return the places of samples in an epoch, by their numbers in the split."""

    def images_of(self, indices: Ints, epoch: int) -> Ints:
        """Return [M] numbers in the bank of the images of samples."""
        return self.locate(indices, epoch).image

    def locate_always(self, index: int, epoch: int) -> Places | None:
        """Return the place of one sample for a message, or None if it depends on an unknown epoch."""
        return self.locate(np.array([index]), epoch)


class RandomPatches(PatchSource):
    """Random patches, with new positions in each epoch.

    Args:
        bank: All images; images smaller than a patch are reflect-padded.
        images: [I] numbers of the images of the split.
        per_image: Number of samples of each image in an epoch.
        size_px: (height, width) of the patches, or their sides by epoch.
        seed: Seed of the positions.
    """

    def __init__(
        self,
        bank: ImageBank,
        images: Ints,
        per_image: int,
        size_px: Size | ProgressiveSize,
        seed: int,
    ) -> None:
        check_count("samples_per_image", per_image, 1)
        self.images = images
        self.per_image = per_image
        self.size_px = size_px
        self.seed = seed
        self._sizes_px = _sizes_of(bank)

    def __len__(self) -> int:
        return len(self.images) * self.per_image

    @property
    @override
    def patch_px(self) -> Size:
        if isinstance(self.size_px, ProgressiveSize):
            return self.size_px.largest_px, self.size_px.largest_px
        return self.size_px

    @override
    def size_at(self, epoch: int) -> Size:
        if isinstance(self.size_px, ProgressiveSize):
            side_px = self.size_px.size_at(epoch)
            return side_px, side_px
        return self.size_px

    @property
    @override
    def image_ends(self) -> Ints:
        return np.arange(1, len(self.images) + 1) * self.per_image

    @override
    def locate(self, indices: Ints, epoch: int) -> Places:
        split_image = indices // self.per_image
        image = self.images[split_image]
        # Numbered among the patches of all images, so that a split does not change random numbers.
        index = image * self.per_image + indices % self.per_image
        # Small images cannot move, and are reflect-padded at the end of each side.
        room_px = np.maximum(self._sizes_px[image] - self.size_at(epoch), 0)
        position = sample_crops(self.seed, epoch, index, room_px)
        return Places(split_image, image, index, position)

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        return self.images[indices // self.per_image]


class GridPatches(PatchSource):
    """Every patch of a grid once, the same in each epoch.

    Args:
        grid: The patches of all images of the bank.
        images: Numbers of the images of the split; all of them by default.
    """

    def __init__(self, grid: PatchGrid, images: Sequence[int] | Ints | None = None) -> None:
        self.grid = grid
        counts = grid.rows * grid.columns
        if images is None:
            images = np.arange(len(counts))
        self.images = np.ascontiguousarray(images, dtype=np.int64)
        self._image_ends = np.cumsum(counts[self.images])
        # The sum of this and the number of a patch in the split is its number among all images.
        self._shifts = np.cumsum(counts)[self.images] - self._image_ends

    def __len__(self) -> int:
        return int(self._image_ends[-1]) if self._image_ends.size else 0

    @property
    @override
    def patch_px(self) -> Size:
        return self.grid.patch_px

    @property
    @override
    def image_ends(self) -> Ints | None:
        return self._image_ends

    @override
    def locate(self, indices: Ints, epoch: int) -> Places:
        # The image of a patch is the first one that ends after it.
        split_image = np.searchsorted(self._image_ends, indices, side="right")
        index = self._shifts[split_image] + indices
        image, y, x = self.grid.locate(index)
        return Places(split_image, image, index, np.stack((y, x), axis=1))


def make_padded_grid(bank: ImageBank, patch_px: Size, stride_px: int | Size) -> PatchGrid:
    """Return the grid that covers every image; images smaller than a patch are reflect-padded.

    Args:
        bank: All images.
        patch_px: (height, width).
        stride_px: Distance between patches, one number or (vertical, horizontal).
    """
    # For the grid, a small image is as large as a patch; the cut reflects the missing pixels.
    heights_px, widths_px = np.maximum(_sizes_of(bank), patch_px).T
    return PatchGrid(heights_px, widths_px, patch_px, stride_px, name=bank.name)


def _sizes_of(bank: ImageBank) -> Ints:
    sizes_px = np.stack((np.asarray(bank.heights_px), np.asarray(bank.widths_px)), axis=1)
    return sizes_px.astype(np.int64)
