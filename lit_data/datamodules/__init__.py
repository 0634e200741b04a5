"""LightningDataModules: from a folder to batches on the device."""

from lit_data.datamodules.ct import CTDataModule
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.datamodules.gan import GANDataModule
from lit_data.datamodules.stripes import StripeDataModule
from lit_data.datamodules.watermarks import WatermarkDataModule

__all__ = ["CTDataModule", "DetectionDataModule", "GANDataModule", "StripeDataModule", "WatermarkDataModule"]
