"""Stripe patches as people make them: files, pixels and spots for each patch, one after the other."""

import random
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.grid import cut_patch
from lit_data.core.progress import track
from lit_data.core.types import Array, Batch, Floats, Stage
from lit_data.datamodules import StripeDataModule
from lit_data.datasets.patch_source import GridPatches
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.readers import read_image
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.families.spot import Spot


class StripePatch(NamedTuple):
    """One patch.

    Attributes:
        files: Those of its image.
        y: Its first row in px.
        x: Its first column in px.
    """

    files: ImageSource
    y: int
    x: int


class StripeRecipe(NamedTuple):
    """Making of a sample from the files of a patch.

    Attributes:
        decoder: How images are read.
        patch_px: (height, width) of a patch.
        low: Pixel value that becomes 0.
        high: Pixel value that becomes 1.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        synthesis: Spots, if any are drawn.
        finished: Cast to 0..1, spread to three channels and draw; otherwise patches stay as stored.
    """

    decoder: ImageDecoder
    patch_px: tuple[int, int]
    low: float
    high: float
    expand: tuple[int, ...]
    synthesis: DefectSpec | None
    finished: bool


class PlainStripes(Dataset[Batch]):
    """Map-style: decodes the whole image for each patch and draws on all of it, then cuts the patch.

    Args:
        patches: All patches of the split.
        recipe: How a sample is made.
        keeps_images: Keep decoded images in memory, cut the patch first, and draw each spot in its
            own window.
    """

    def __init__(
        self, patches: Sequence[StripePatch], recipe: StripeRecipe, *, keeps_images: bool = False
    ) -> None:
        self.patches = list(patches)
        self.recipe = recipe
        self.keeps_images = keeps_images
        self._images: dict[ImageSource, Array] = {}

    def warm_up(self) -> None:
        """Decode every image once."""
        sources = {patch.files for patch in self.patches}
        for source in track(sources, "decoding", len(sources)):
            self._images[source] = self._decode(source)

    def __len__(self) -> int:
        return len(self.patches)

    @override
    def __getitem__(self, number: int) -> Batch:
        (source, top, left), recipe = self.patches[number], self.recipe
        if self.keeps_images:
            image = cut_patch(self._images[source], top, left, recipe.patch_px)
            top = left = 0
        else:
            image = self._decode(source)
        layers = {"image": image}
        if recipe.finished:
            unit = image[list(recipe.expand)].astype(np.float32) - np.float32(recipe.low)
            unit /= np.float32(recipe.high - recipe.low)
            layers = {"image": unit.clip(0, 1)}
        if recipe.finished and recipe.synthesis is not None:
            layers["mask"] = self._draw(layers["image"], recipe.synthesis, top, left)
        return {
            name: torch.from_numpy(cut_patch(pixels, top, left, recipe.patch_px).copy())
            for name, pixels in layers.items()
        }

    def _decode(self, source: ImageSource) -> Array:
        """Decode an image once, without the second look that a store takes: [C, H, W]."""
        decoder = self.recipe.decoder
        image = np.concatenate([read_image(path, decoder.read) for path in source.paths])
        return image if decoder.channels is None else image[list(decoder.channels)]

    def _draw(self, image: Floats, spec: DefectSpec, top: int, left: int) -> Floats:
        """Draw random spots into a patch of an image; return the mask of the true ones, [1, H, W]."""
        rng = np.random.default_rng(random.getrandbits(64))
        size_px = image.shape[1:]
        mask = np.zeros((1, *size_px), np.float32)
        count = int(rng.integers(*spec.count, endpoint=True)) * (rng.random() < spec.probability)
        true_count = rng.integers(*spec.true_count, endpoint=True)
        shapes = cast(Spot, spec.members[0]).spots
        low, high = spec.amplitude
        # All numbers at once, as a call costs more than its numbers.
        draws = rng.random((count, 5)).tolist()
        is_shown = rng.random((count, len(image))) < 0.5
        for number, (kind, down, across, strength, sign) in enumerate(draws):
            shape = shapes[int(kind * len(shapes))]
            y = top + down * self.recipe.patch_px[0]
            x = left + across * self.recipe.patch_px[1]
            amplitude = (low + strength * (high - low)) * (1 if sign < 0.5 else -1)
            rows = _window(y, shape.height_px, size_px[0])
            columns = _window(x, shape.width_px, size_px[1])
            part = (rows, columns) if self.keeps_images else np.s_[:, :]
            below = np.arange(size_px[0], dtype=np.float32)[part[0], None] - y
            beside = np.arange(size_px[1], dtype=np.float32)[part[1]] - x
            spot = np.exp(-((below / shape.sigma_y_px) ** 2) / 2) * amplitude
            spot = spot * np.exp(-((beside / shape.sigma_x_px) ** 2) / 2)
            if not self.keeps_images:
                inside = np.zeros(size_px, np.float32)
                inside[rows, columns] = 1
                spot *= inside
            if number < true_count:
                is_shown[number] = np.arange(len(image)) == 0
                mask[0, rows, columns] = 1
            image[:, *part] += is_shown[number][:, None, None] * spot
        np.clip(image, 0, 1, out=image)
        return mask


def _window(middle: float, length: int, side: int) -> slice:
    """Return the pixels of one axis that a spot covers, within the image."""
    first = round(middle) - (length - 1) // 2
    return slice(max(0, first), min(side, first + length))


def make_stripe_ways(
    datamodule: StripeDataModule, stage: Stage, *, finished: bool = True
) -> tuple[PlainStripes, PlainStripes]:
    """Make the datasets that people have, for a split; augmentation is left out.

    Args:
        datamodule: An opened set.
        stage: Whose samples.
        finished: Cast, and draw the defects; otherwise patches stay as stored.

    Returns:
        One that decodes the image for each patch, and one that keeps decoded images.

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
        decoder=decoder,
        patch_px=dataset.patches.patch_px,
        low=transformation.values.low,
        high=transformation.values.high,
        expand=transformation.expand,
        synthesis=synthesis,
        finished=finished,
    )
    source_of = {source.paths[0]: source for source in files.list_images()}
    assert isinstance(dataset.patches, GridPatches)
    grid = dataset.patches.grid
    patches = []
    for image in dataset.images.tolist():
        _, tops_px, lefts_px = grid.locate(np.array(grid.patches_of(image)))
        source = source_of[dataset.bank.name(image)]
        for top, left in zip(tops_px.tolist(), lefts_px.tolist(), strict=True):
            patches.append(StripePatch(source, top, left))
    return PlainStripes(patches, recipe), PlainStripes(patches, recipe, keeps_images=True)
