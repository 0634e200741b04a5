"""The datasets that ``benchmark`` compares a stripe set with, made from the parts of its datamodule."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_data.augment import SingleTexture
from lit_data.datamodules.stripe_files import StripeFiles
from lit_data.datamodules.stripe_transform import StripeTransform
from lit_data.datasets import StripeDataset
from lit_data.datasets.stripe_baselines import ImprovedStripes, OriginalStripes, StripeRecipe, list_patches
from lit_data.datasets.stripe_drawing import Floats
from lit_data.types import Batch


def build_stripe_baselines(
    dataset: StripeDataset, files: StripeFiles, transformation: StripeTransform, *, finished: bool
) -> Mapping[str, Dataset[Batch]]:
    """The original loader of a split and its improved form; none where they cannot do what the transformation does.

    Args:
        dataset: The split.
        files: Where its pixels come from.
        transformation: What is drawn on them; augmentation is left out.
        finished: Cast, and draw the defects; otherwise patches stay as stored.
    """
    library = transformation.synthesis is not None and not transformation.synthesis.has_plain_spots_only
    if (finished and library) or any(dataset.margin_px):
        return {}
    recipe = StripeRecipe(
        patch_px=dataset.grid.patch_px,
        decoder=files.decoder,
        mask_read=files.mask_read,
        dtype=dataset.bank.dtype.name,
        low=transformation.values.low,
        high=transformation.values.high,
        expand=transformation.expand,
        seed=transformation.seed,
        synthesis=transformation.synthesis,
        nuisance=PatchNuisance(transformation.nuisance, transformation.seed) if transformation.nuisance else None,
        finished=finished,
    )
    patches = list_patches(dataset, {source.paths[0]: source for source in files.list_images()})
    return {
        "original": OriginalStripes(patches, recipe),
        "improved": ImprovedStripes(patches, recipe, cache_bytes=files.cache_bytes),
    }


@dataclass(frozen=True, slots=True)
class PatchNuisance:
    """`SingleTexture` for one sample in a worker.

    Args:
        nuisance: What makes the channels differ.
        seed: Of its draws.
    """

    nuisance: SingleTexture
    seed: int

    def __call__(self, patch: Floats, index: int, epoch: int) -> Floats:
        """Change a patch, [3, h, w] in 0..1."""
        draws = self.nuisance.draw(self.seed, epoch, np.array([index]), len(patch))
        changed: Floats = self.nuisance.forward(torch.from_numpy(patch.copy())[None], draws)[0].numpy()
        return changed
