"""`DrawnImages`: whole images without changes, and again with synthetic defects as ground truth."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.core.grid import PatchGrid, cut_patch
from lit_data.core.types import Array, Batch, Ints
from lit_data.datamodules.image_batch import ImageTransform
from lit_data.datasets.good_names import GOOD
from lit_data.datasets.occupancy import is_defect
from lit_data.images.bank import ImageBank

KIND = "synthetic"
"""Kind of the images with drawn defects."""
_EPOCH = 2**31 + 1
"""Epoch of the random numbers, which no training reaches."""
_OPEN_IMAGES = 2
"""Number of cached images; the patches of an image follow each other."""


class DrawnImages(ImageBank):
    """Images as a model gets them, followed by the same ones with synthetic defects.

    Each image of the second half has as many defects as a sample with defects in the synthesis, and
    at least one true one. They are a pure function of the seed and the number of the image.

    Args:
        bank: Stored images.
        numbers: [n] numbers of the images to use.
        names: [n] paths of these images below the root.
        transform: Transform of their batches, with a synthesis.
        make_grid: Function that returns the patches of a bank.

    Attributes:
        grid: Patches of all 2 n images.
        numbers: [2 n] numbers of the stored images.
        originals: [2 n] paths of these images below the root.
        names: [2 n] names, for the second half in a separate folder.
        image_kinds: [2 n] ``good`` or ``synthetic``.
    """

    dtype: "np.dtype[Any]" = np.dtype(np.float32)

    def __init__(
        self,
        bank: ImageBank,
        numbers: Ints,
        names: Sequence[str],
        transform: ImageTransform,
        make_grid: Callable[[ImageBank], PatchGrid],
    ) -> None:
        assert transform.synthesis is not None
        least, most = transform.synthesis.true_count
        spec = replace(
            transform.synthesis, probability=1.0, true_count=(max(1, least), max(1, most))
        )
        self._bank, self._half = bank, len(numbers)
        self._transform = replace(transform, synthesis=spec)
        self.skipped = ()
        self.channels = len(transform.expand)
        self.heights_px = np.tile(bank.heights_px[numbers], 2)
        self.widths_px = np.tile(bank.widths_px[numbers], 2)
        self.numbers = np.tile(numbers, 2)
        self.originals = [*names, *names]
        self.names = [*names, *(f"{KIND}/{name}" for name in names)]
        self.image_kinds = [GOOD] * len(numbers) + [KIND] * len(numbers)
        self.grid = make_grid(self)
        self._draw = lru_cache(_OPEN_IMAGES)(self._draw_image)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Array:
        """Return [C, H, W] float32 in 0..1."""
        return self._draw(index)[0]

    @override
    def name(self, index: int) -> str:
        return self._bank.name(int(self.numbers[index]))

    @property
    def image_sizes_px(self) -> Tensor:
        """[2 n, 2] int64 (height, width)."""
        return torch.from_numpy(np.stack((self.heights_px, self.widths_px), axis=1))

    def read_mask(self, index: int) -> Array:
        """Return [H, W] uint8, 1 where a true defect was drawn."""
        return self._draw(index)[1]

    read_stored_mask = read_mask

    def has_defect(self, index: int) -> bool:
        """Return True if a visible defect was drawn."""
        return bool(is_defect(self.read_mask(index)).any())

    def choose(self, limit: int | float) -> list[int]:
        """Return the numbers of the first images, and of the same ones with defects.

        Args:
            limit: Number or fraction of the images, like Lightning's limits of batches.
        """
        count = min(limit, self._half) if isinstance(limit, int) else math.ceil(limit * self._half)
        return [*range(count), *range(self._half, self._half + count)]

    def batches(self, shares: Sequence[Sequence[int]], rank: int, size: int) -> Iterator[Batch]:
        """Yield batches of the patches of a rank's images, one image after the other.

        A batch has ``image`` [B, C, h, w] float32 in 0..1, ``mask`` [B, 1, h, w] float32,
        ``image_index`` [B] and ``position`` [B, 2] int64, like those of a datamodule, and ``drawn``
        [B] bool, which is False if all ranks need a step and this one has nothing to score.

        Args:
            shares: Images of each rank.
            rank: Rank whose batches are yielded.
            size: Largest number of patches in a batch.
        """
        counts = []
        for share in shares:
            patches_of = map(self.grid.patches_of, share)
            counts.append(sum(-(-len(patches) // size) for patches in patches_of))
        for image in shares[rank]:
            patches = self.grid.patches_of(image)
            for start in range(0, len(patches), size):
                yield self._cut(image, np.array(patches[start : start + size]))
        for _ in range(counts[rank], max(counts)):
            batch = self._cut(0, np.array(self.grid.patches_of(0)[:1]))
            yield batch | {"drawn": torch.zeros(1, dtype=torch.bool)}

    def _cut(self, image: int, patches: Ints) -> Batch:
        pixels, mask = self._draw(image)
        images, tops, lefts = self.grid.locate(patches)
        cut_pixels, cut_masks = [], []
        for top, left in zip(tops.tolist(), lefts.tolist(), strict=True):
            cut_pixels.append(cut_patch(pixels, top, left, self.grid.patch_px))
            cut_masks.append(cut_patch(mask[None], top, left, self.grid.patch_px))
        return {
            "image": torch.from_numpy(np.stack(cut_pixels)),
            "mask": torch.from_numpy(np.stack(cut_masks)).float(),
            "image_index": torch.from_numpy(images),
            "position": torch.from_numpy(np.stack((tops, lefts), axis=1)),
            "drawn": torch.ones(len(patches), dtype=torch.bool),
        }

    def _draw_image(self, index: int) -> tuple[Array, Array]:
        """Return pixels and mask of an image."""
        number = int(self.numbers[index])
        pixels = np.array(self._bank[number])  # a copy: torch warns of read-only arrays
        batch: Batch = {
            "image": torch.from_numpy(pixels)[None],
            "index": torch.tensor([number]),
            "epoch": torch.tensor([_EPOCH]),
        }
        size_px = (pixels.shape[1], pixels.shape[2])
        spec = self._transform.synthesis if index >= self._half else None
        transform = replace(self._transform, read_px=size_px, synthesis=spec)
        planned = transform.plan(batch)
        finished = transform.draw(planned)
        if "mask" not in finished:
            return finished["image"][0].numpy(), np.zeros(size_px, np.uint8)
        return finished["image"][0].numpy(), finished["mask"][0, 0].to(torch.uint8).numpy()
