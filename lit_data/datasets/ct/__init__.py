"""CT volumes: their occupied voxels, or windows of them."""

from lit_data.datasets.ct.dataset import CTDataset

__all__ = ["CTDataset"]
