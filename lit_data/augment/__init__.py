"""Augmentation on the device of the batch, with numbers from the stream of each sample."""

from lit_data.augment.augmentation import Augmentation, Compiled, Layers
from lit_data.augment.colour import ColourJitter
from lit_data.augment.external import ExternalTransform
from lit_data.augment.geometry import Geometry
from lit_data.augment.host import Albumentations, HostTransform, Torchvision, augment_rows
from lit_data.augment.mixing import MixUp, draw_tiles, pack_tiles
from lit_data.augment.photometry import Photometry, SingleTexture
from lit_data.augment.pipeline import (
    Pipeline,
    StripeAugment,
    as_augmentation,
    detection_augment,
    segmentation_augment,
    stage_augmentations,
    stripe_augment,
)

__all__ = [
    "Albumentations",
    "Augmentation",
    "ColourJitter",
    "Compiled",
    "ExternalTransform",
    "Geometry",
    "HostTransform",
    "Layers",
    "MixUp",
    "Photometry",
    "Pipeline",
    "SingleTexture",
    "StripeAugment",
    "Torchvision",
    "as_augmentation",
    "augment_rows",
    "detection_augment",
    "draw_tiles",
    "pack_tiles",
    "segmentation_augment",
    "stage_augmentations",
    "stripe_augment",
]
