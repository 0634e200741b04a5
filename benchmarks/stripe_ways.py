"""Stripe samples as people make them: a list of patches, and files, pixels and defects for each.

Both datasets draw the defects that `PatchDataset` and the renderer draw for the same sample, so
that the suite ``loaders`` compares the work and not the result.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from benchmarks.spots import Floats, draw_everywhere, draw_in_windows, place_spots
from lit_data.core.errors import ConfigError
from lit_data.core.grid import cut_patch
from lit_data.core.progress import track
from lit_data.core.recent_cache import LruCache
from lit_data.core.types import Array, Batch, Stage
from lit_data.datamodules import StripeDataModule
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.readers import read_image
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan


class StripePatch(NamedTuple):
    """One patch.

    Attributes:
        files: Those of its image.
        sample_index: Its number as in `PatchDataset`.
        image_index: That of its image.
        y: Its first row in px.
        x: Its first column in px.
    """

    files: ImageSource
    sample_index: int
    image_index: int
    y: int
    x: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeRecipe:
    """Making of a sample from the files of a patch.

    Args:
        patch_px: (height, width) of a patch.
        decoder: How images are read.
        dtype: Name of the dtype of the decoded pixels.
        low: Pixel value that becomes 0.
        high: Pixel value that becomes 1.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        seed: Seed of the defects.
        synthesis: Defects, if any are drawn.
        finished: Cast to 0..1, spread to three channels and draw; otherwise patches stay as stored.
    """

    patch_px: tuple[int, int]
    decoder: ImageDecoder
    dtype: str
    low: float
    high: float
    expand: tuple[int, ...]
    seed: int
    synthesis: DefectSpec | None = None
    finished: bool = True

    def read(self, files: ImageSource) -> Array:
        """Decode an image once, without the second look that a store takes: [C, H, W]."""
        images = [read_image(path, self.decoder.read) for path in files.paths]
        if images[0].dtype.name != self.dtype:
            return self.decoder(files).array
        image = images[0] if len(images) == 1 else np.concatenate(images)
        return image if self.decoder.channels is None else image[list(self.decoder.channels)]

    def to_unit(self, image: Array) -> Floats:
        """Return three channels in 0..1."""
        grey = image[list(self.expand)].astype(np.float32)
        grey -= np.float32(self.low)
        grey /= np.float32(self.high - self.low)
        return np.clip(grey, 0, 1, out=grey)

    def plan(self, patches: Sequence[StripePatch], epoch: int) -> DefectPlan | None:
        """Return the defects of a whole split; None where nothing is drawn."""
        if self.synthesis is None or not self.finished or not patches:
            return None
        index = [patch.sample_index for patch in patches]
        shape = (len(self.expand), *self.patch_px)
        return sample_plan(self.synthesis, self.seed, epoch, index, shape)


class StripeWay(Dataset[Batch]):
    """Map-style: a sample has the keys of a finished stripe batch, without the batch dimension.

    The random numbers of an epoch are drawn at once when it is set, since drawing ours for one
    sample would cost more than what people call for it.

    Args:
        patches: All patches of the split.
        recipe: How a sample is made.
    """

    def __init__(self, patches: Sequence[StripePatch], recipe: StripeRecipe) -> None:
        self.patches = list(patches)
        self.recipe = recipe
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the defects of this epoch from now on."""
        self.epoch = epoch
        self.defects = self.recipe.plan(self.patches, epoch)
        rows = np.empty(0, np.int64) if self.defects is None else self.defects.row
        # the plan is sorted by sample: the defects of one lie between two neighbours
        self._bounds = np.searchsorted(rows, np.arange(len(self.patches) + 1)).tolist()

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, number: int) -> Batch:
        patch = self.patches[number]
        defects = range(self._bounds[number], self._bounds[number + 1])
        image, mask = self.make(patch, defects)
        sample = {
            "image": torch.from_numpy(image),
            "index": torch.tensor(patch.sample_index),
            "image_index": torch.tensor(patch.image_index),
            "position": torch.tensor([patch.y, patch.x]),
            "epoch": torch.tensor(self.epoch),
        }
        if mask is not None:
            sample["mask"] = torch.from_numpy(mask)
        return sample

    @abstractmethod
    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        """Make one patch.

        Args:
            patch: Its files and its place.
            planned: Numbers of its `defects`.

        Returns:
            Pixels [C, h, w], and its mask [1, h, w] where it has one.
        """


class OriginalStripes(StripeWay):
    """Decodes the whole image for each patch and draws on all of it, then cuts the patch out."""

    @override
    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        recipe = self.recipe
        height, width = recipe.patch_px
        window = np.s_[:, patch.y : patch.y + height, patch.x : patch.x + width]
        image = _extend(recipe.read(patch.files), patch, recipe.patch_px)
        mask = None
        if recipe.finished:
            image = recipe.to_unit(image)
            if self.defects is not None:
                spots = place_spots(image[window][0], self.defects, planned, patch.y, patch.x)
                mask = draw_everywhere(image, spots)[window].astype(np.float32)
        return image[window].copy(), mask


class ImprovedStripes(StripeWay):
    """Cuts the patch first, draws each defect in its own window, and keeps decoded images.

    Args:
        patches: All patches of the split.
        recipe: How a sample is made.
        cache_bytes: Bound of the decoded images in memory.
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
            if len(self.cache) < self.cache.misses:  # one had to go
                return

    @override
    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        recipe = self.recipe
        image = cut_patch(self._read(patch), patch.y, patch.x, recipe.patch_px).copy()
        mask = None
        if recipe.finished:
            image = recipe.to_unit(image)
            if self.defects is not None:
                spots = place_spots(image[0], self.defects, planned, 0, 0)
                mask = draw_in_windows(image, spots).astype(np.float32)
        return image, mask

    def _read(self, patch: StripePatch) -> Array:
        return self.cache.get_or_load(patch.files.paths, lambda: self.recipe.read(patch.files))


def make_stripe_ways(
    datamodule: StripeDataModule, stage: Stage, *, finished: bool = True
) -> tuple[OriginalStripes, ImprovedStripes]:
    """Make the datasets that people have, for a split; augmentation is left out.

    Args:
        datamodule: An opened set.
        stage: Whose samples.
        finished: Cast, and draw the defects; otherwise patches stay as stored.

    Raises:
        ConfigError: They cannot do what the datamodule does.
    """
    dataset, files = datamodule.dataset(stage), datamodule.source
    transformation = datamodule.transformation
    synthesis = transformation.synthesis
    has_other_defects = synthesis is not None and not synthesis.has_plain_spots_only
    decoder = files.decoder
    if not isinstance(decoder, ImageDecoder):
        raise ConfigError(
            "other ways read images at full size: leave data.scale and data.size_px out"
        )
    has_other_defects |= dataset.masks is not None
    if (finished and (has_other_defects or transformation.nuisance)) or any(dataset.margin_px):
        raise ConfigError("other ways make stripes with plain spots alone: +experiment=stripe")
    recipe = StripeRecipe(
        patch_px=dataset.patches.patch_px,
        decoder=decoder,
        dtype=dataset.bank.dtype.name,
        low=transformation.values.low,
        high=transformation.values.high,
        expand=transformation.expand,
        seed=transformation.seed,
        synthesis=synthesis,
        finished=finished,
    )
    patches = list_patches(dataset, {source.paths[0]: source for source in files.list_images()})
    improved = ImprovedStripes(patches, recipe, cache_bytes=files.cache_bytes)
    return OriginalStripes(patches, recipe), improved


def list_patches(dataset: PatchDataset, files: Mapping[str, ImageSource]) -> list[StripePatch]:
    """List the patches of a split in the order of its dataset.

    Args:
        dataset: The split.
        files: For the first path of each image all its files.
    """
    assert isinstance(dataset.patches, GridPatches)
    grid = dataset.patches.grid
    patches = []
    for image in dataset.images.tolist():
        image_files = files[dataset.bank.name(image)]
        index = np.array(grid.patches_of(image))
        _, tops_px, lefts_px = grid.locate(index)
        for sample, y, x in zip(index.tolist(), tops_px.tolist(), lefts_px.tolist(), strict=True):
            patches.append(StripePatch(image_files, sample, image, y, x))
    return patches


def _extend(image: Array, patch: StripePatch, patch_px: tuple[int, int]) -> Array:
    """Reflect-pad a whole image at its lower and right edge, as far as the patch reaches past."""
    below = max(0, patch.y + patch_px[0] - image.shape[1])
    right = max(0, patch.x + patch_px[1] - image.shape[2])
    if below == 0 and right == 0:
        return image
    return np.pad(image, ((0, 0), (0, below), (0, right)), mode="reflect")
