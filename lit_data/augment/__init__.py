"""Augmentation on the device of the batch, with numbers from the stream of each sample."""

from lit_data.augment.augmentation import Augmentation, Compiled, Layers
from lit_data.augment.builders import detection_augment, segmentation_augment, stripe_augment
from lit_data.augment.colour import ColourJitter
from lit_data.augment.external import ExternalTransform
from lit_data.augment.geometry import Geometry
from lit_data.augment.mixup import MixUp
from lit_data.augment.nuisance import SingleTexture, StripeAugment
from lit_data.augment.photometry import Photometry
from lit_data.augment.pipeline import Pipeline, as_augmentation, stage_augmentations
from lit_data.augment.tiles import draw_tiles, pack_tiles

__all__ = [
    "Augmentation",
    "ColourJitter",
    "Compiled",
    "ExternalTransform",
    "Geometry",
    "Layers",
    "MixUp",
    "Photometry",
    "Pipeline",
    "SingleTexture",
    "StripeAugment",
    "as_augmentation",
    "detection_augment",
    "draw_tiles",
    "pack_tiles",
    "segmentation_augment",
    "stage_augmentations",
    "stripe_augment",
]
