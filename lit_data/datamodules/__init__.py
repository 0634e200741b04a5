"""LightningDataModules: from a folder to batches on the device."""

from lit_data.datamodules.detection import DetectionDataModule
from lit_data.datamodules.stripes import StripeDataModule

__all__ = ["DetectionDataModule", "StripeDataModule"]
