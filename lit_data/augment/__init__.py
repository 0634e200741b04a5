"""Augmentation on the device of the batch: parameters come from each sample's own stream, Kornia applies them."""

from lit_data.augment.nuisance import SingleTexture
from lit_data.augment.stripes import StripeAugment

__all__ = ["SingleTexture", "StripeAugment"]
