"""Single images with masks as people load them before: files read and patches cut in each ``__getitem__``."""

from collections.abc import Iterable, Mapping

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from lit_data.datasets.inspection.occupancy import PartialMasks
from lit_data.datasets.inspection.patches import InspectionDataset
from lit_data.datasets.stripes.baselines import (
    ImprovedStripes,
    OriginalStripes,
    StripeBaseline,
    StripePatch,
    StripeRecipe,
    list_patches,
)
from lit_data.io.images.decoders import ImageSource
from lit_data.types import Array, Batch


class MarkedPatches(StripeBaseline):
    """A mask for each patch: of zeros where an image has none, and of the class of its image where that says it.

    Attributes:
        numbers: Class of what the mask of an image marks, for those whose masks are black and white.
    """

    numbers: Mapping[int, int]

    @override
    def make(self, patch: StripePatch, planned: Iterable[int]) -> tuple[Array, Array | None]:
        image, mask = super().make(patch, planned)  # type: ignore[safe-super]  # that of the class beside this one
        if mask is None:
            mask = np.zeros((1, *image.shape[1:]), np.float32 if self.recipe.finished else np.uint8)
        elif self.numbers:
            mask[mask == 1] = self.numbers[patch.image_index]
        return image, mask


class OriginalPatches(MarkedPatches, OriginalStripes):
    """Decodes image and mask for each patch."""


class ImprovedPatches(MarkedPatches, ImprovedStripes):
    """Keeps decoded images and masks in memory."""


def build_inspection_baselines(
    dataset: InspectionDataset, recipe: StripeRecipe, *, cache_bytes: int
) -> Mapping[str, Dataset[Batch]]:
    """The original loader of a split and its improved form; both take every patch of the grid once.

    Args:
        dataset: The split.
        recipe: How its samples are made.
        cache_bytes: Bound of what the improved one keeps.
    """
    masks = dataset.masks
    if not isinstance(masks, PartialMasks) or any(dataset.margin_px):
        return {}
    names = [dataset.bank.name(number) for number in dataset.images.tolist()]
    has_mask = set(dataset.images[masks.of_image >= 0].tolist())
    listed = list_patches(dataset, {name: ImageSource((name,)) for name in names})
    patches = [patch if patch.image_index in has_mask else patch._replace(mask_path=None) for patch in listed]
    built: list[MarkedPatches] = [
        OriginalPatches(patches, recipe),
        ImprovedPatches(patches, recipe, cache_bytes=cache_bytes),
    ]
    numbers = [] if masks.numbers is None else masks.numbers.tolist()
    for baseline in built:
        baseline.numbers = dict(zip(dataset.images.tolist(), numbers, strict=False))
    return dict(zip(("original", "improved"), built, strict=True))
