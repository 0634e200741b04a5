"""LightningDataModules: from a folder to batches on the device."""

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.ct import CTDataModule
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.datamodules.gan import GANDataModule
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.image_files import ImageFolder, MaskedImageFolder
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.datamodules.source import FileOptions, Source
from lit_data.datamodules.stripe import StripeDataModule
from lit_data.datamodules.watermarks import WatermarkDataModule

__all__ = [
    "BaseDataModule",
    "CTDataModule",
    "DetectionDataModule",
    "FileOptions",
    "GANDataModule",
    "ImageDataModule",
    "ImageFolder",
    "InspectionDataModule",
    "LabelledImageDataModule",
    "MaskedImageFolder",
    "Source",
    "StripeDataModule",
    "WatermarkDataModule",
]
