"""Images for generative models."""

from lit_data.datasets.gan.dataset import GANDataset

__all__ = ["GANDataset"]
