"""Patches of inspection images with a target and two references."""

from lit_data.datasets.stripes.dataset import StripeDataset

__all__ = ["StripeDataset"]
