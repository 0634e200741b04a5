"""Stripe samples as people make them before: a list of patches, and in each ``__getitem__`` files,
pixels and defects.

Both datasets draw the defects that `StripeDataset` and the renderer draw for the same sample, so
that ``benchmark`` compares the work and not the result.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_data.datasets.stripes.dataset import StripeDataset
from lit_data.datasets.stripes.drawn import Floats, draw_everywhere, draw_in_windows, place_spots
from lit_data.grid import cut_patch
from lit_data.io.cache import LruCache
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.masks import MaskOptions, read_mask
from lit_data.io.images.readers import read_image
from lit_data.io.images.scaling import Scaling
from lit_data.io.progress import track
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.types import Array, Batch


class StripePatch(NamedTuple):
    """One patch: the files it lies in, its numbers as in `StripeDataset`, and its first row and column in px."""

    files: ImageSource
    mask_path: str | None
    sample_index: int
    image_index: int
    y: int
    x: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeRecipe:
    """What becomes of the files of a patch.

    Args:
        patch_px: (height, width) of a patch.
        decoder: How images are read.
        mask_read: How masks are read.
        dtype: Name of the dtype of the decoded pixels.
        low: Pixel value that becomes 0.
        high: Pixel value that becomes 1.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        seed: Seed of the defects.
        synthesis: Defects for patches without a mask of their own.
        nuisance: Changes the three channels of a patch ([3, h, w], sample index, epoch) before
            defects are drawn.
        finished: Cast to 0..1, spread to three channels and draw; otherwise patches stay as stored.
        scaling: Size that images and masks are brought to before patches are cut; None keeps that
            of the files.
    """

    patch_px: tuple[int, int]
    decoder: ImageDecoder
    mask_read: MaskOptions
    dtype: str
    low: float
    high: float
    expand: tuple[int, ...]
    seed: int
    synthesis: DefectSpec | None = None
    nuisance: Callable[[Floats, int, int], Floats] | None = None
    finished: bool = True
    scaling: Scaling | None = None

    def read(self, files: ImageSource) -> Array:
        """Decode the files of an image once, without the second look that a store takes, and scale it: [C, H, W]."""
        image = self._decode(files)
        return image if self.scaling is None else self.scaling.scale_image(image)

    def _decode(self, files: ImageSource) -> Array:
        images = [read_image(path, self.decoder.read) for path in files.paths]
        if images[0].dtype.name != self.dtype:
            return self.decoder(files).array
        image = images[0] if len(images) == 1 else np.concatenate(images)
        return image if self.decoder.channels is None else image[list(self.decoder.channels)]

    def to_unit(self, image: Array) -> Floats:
        """Three channels in 0..1."""
        spread = image if self.expand == tuple(range(len(image))) else image[list(self.expand)]
        grey = spread.astype(np.float32)
        grey -= np.float32(self.low)
        grey /= np.float32(self.high - self.low)
        return np.clip(grey, 0, 1, out=grey)

    def read_mask(self, path: str) -> Array:
        """A whole mask, scaled as its image: [1, H, W] uint8 in {0, 1}."""
        mask = read_mask(path, self.mask_read)
        return mask if self.scaling is None else self.scaling.scale_mask(mask)

    def plan(self, patches: Sequence[StripePatch], epoch: int) -> DefectPlan | None:
        """The defects of a whole split; none where it has masks, or nothing is drawn."""
        if (
            self.synthesis is None
            or not self.finished
            or not patches
            or patches[0].mask_path is not None
        ):
            return None
        index = [patch.sample_index for patch in patches]
        return sample_plan(
            self.synthesis, self.seed, epoch, index, (len(self.expand), *self.patch_px)
        )


class StripeBaseline(Dataset[Batch]):
    """Map-style: a sample has the keys of a finished stripe batch, without the batch dimension.

    The random numbers of an epoch are drawn at once when it is set, since drawing ours for one
    sample would cost more than what people call for it.

    Args:
        patches: All patches of the split.
        recipe: How a sample is made.
    """

    def __init__(self, patches: Sequence[StripePatch], recipe: StripeRecipe) -> None:
        self.patches, self.recipe = list(patches), recipe
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the defects of this epoch from now on."""
        self.epoch = epoch
        self.defects = self.recipe.plan(self.patches, epoch)
        rows = np.empty(0, np.int64) if self.defects is None else self.defects.row
        self._starts = np.searchsorted(rows, np.arange(len(self.patches) + 1)).tolist()

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, number: int) -> Batch:
        patch = self.patches[number]
        image, mask = self.make(patch, range(*self._starts[number : number + 2]))
        sample = {
            "image": torch.from_numpy(image),
            "index": torch.tensor(patch.sample_index),
            "image_index": torch.tensor(patch.image_index),
            "position": torch.tensor([patch.y, patch.x]),
            "epoch": torch.tensor(self.epoch),
        }
        return sample if mask is None else sample | {"mask": torch.from_numpy(mask)}

    @abstractmethod
    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        """Pixels [C, h, w] of one patch with some of the `defects`, and [1, h, w] of its mask where it has one."""


class OriginalStripes(StripeBaseline):
    """Decodes the whole image for each patch and draws on all of it, then cuts the patch out."""

    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        """Whole image, whole-image defects, crop."""
        recipe = self.recipe
        window = _window_of(patch, recipe.patch_px)
        image = _extend(recipe.read(patch.files), patch, recipe.patch_px)
        mask = None if patch.mask_path is None else recipe.read_mask(patch.mask_path)
        if mask is not None:
            mask = _extend(mask, patch, recipe.patch_px)
        if recipe.finished:
            image = recipe.to_unit(image)
            if recipe.nuisance:
                image[window] = recipe.nuisance(image[window], patch.sample_index, self.epoch)
            if self.defects is not None:
                spots = place_spots(image[window][0], self.defects, planned, patch.y, patch.x)
                mask = draw_everywhere(image, spots)
            mask = None if mask is None else mask.astype(np.float32)
        return image[window].copy(), None if mask is None else mask[window].copy()


class ImprovedStripes(StripeBaseline):
    """Cuts the patch first, draws each defect in its own window only, and keeps decoded images in
    memory.

    Args:
        patches: All patches of the split.
        recipe: How a sample is made.
        cache_bytes: Bound of the decoded images and masks that are kept.
    """

    def __init__(
        self, patches: Sequence[StripePatch], recipe: StripeRecipe, *, cache_bytes: int
    ) -> None:
        super().__init__(patches, recipe)
        self.cache: LruCache[tuple[str, ...], Array] = LruCache(cache_bytes)

    def warm_up(self) -> None:
        """Decode every image once, until the cache is full."""
        patches = {patch.files: patch for patch in self.patches}
        for patch in track(patches.values(), "decoding", len(patches)):
            self._read(patch)
            if len(self.cache) < self.cache.misses:
                return

    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        """Crop, then defects in their windows."""
        recipe = self.recipe
        whole, whole_mask = self._read(patch)
        image = _cut(whole, patch, recipe.patch_px)
        mask = None if whole_mask is None else _cut(whole_mask, patch, recipe.patch_px)
        if recipe.finished:
            image = recipe.to_unit(image)
            if recipe.nuisance:
                image = recipe.nuisance(image, patch.sample_index, self.epoch)
            if self.defects is not None:
                mask = draw_in_windows(image, place_spots(image[0], self.defects, planned, 0, 0))
            mask = None if mask is None else mask.astype(np.float32)
        return image, mask

    def _read(self, patch: StripePatch) -> tuple[Array, Array | None]:
        image = self.cache.get_or_load(patch.files.paths, lambda: self.recipe.read(patch.files))
        path = patch.mask_path
        if path is None:
            return image, None
        return image, self.cache.get_or_load((path,), lambda: self.recipe.read_mask(path))


def list_patches(dataset: StripeDataset, files: Mapping[str, ImageSource]) -> list[StripePatch]:
    """The patches of a split in the order of its dataset.

    Args:
        dataset: The split.
        files: For the first path of each image all its files.
    """
    ranges = [dataset.grid.patches_of(image) for image in dataset.images.tolist()]
    index = (
        np.concatenate([np.arange(r.start, r.stop) for r in ranges])
        if ranges
        else np.empty(0, np.int64)
    )
    image, y, x = dataset.grid.locate(index)
    split_image = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
    names = [files[dataset.bank.name(number)] for number in dataset.images.tolist()]
    masks = [dataset.masks.name(n) if dataset.masks else None for n in range(len(ranges))]
    return [
        StripePatch(names[place], masks[place], *numbers)
        for place, *numbers in zip(
            split_image.tolist(),
            index.tolist(),
            image.tolist(),
            y.tolist(),
            x.tolist(),
            strict=True,
        )
    ]


def _window_of(patch: StripePatch, patch_px: tuple[int, int]) -> tuple[slice, slice, slice]:
    return slice(None), slice(patch.y, patch.y + patch_px[0]), slice(patch.x, patch.x + patch_px[1])


def _extend(image: Array, patch: StripePatch, patch_px: tuple[int, int]) -> Array:
    """Mirror a whole image past its lower and right edge, where the patch reaches past them."""
    below = max(0, patch.y + patch_px[0] - image.shape[1])
    right = max(0, patch.x + patch_px[1] - image.shape[2])
    return (
        np.pad(image, ((0, 0), (0, below), (0, right)), mode="reflect") if below or right else image
    )


def _cut(image: Array, patch: StripePatch, patch_px: tuple[int, int]) -> Array:
    return cut_patch(image, patch.y, patch.x, patch_px).copy()
