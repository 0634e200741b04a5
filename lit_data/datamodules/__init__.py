"""LightningDataModules: from a folder to batches on the device."""

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.image_files import ImageFolder, MaskedImageFolder
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.datamodules.source import FileOptions, Source
from lit_data.datamodules.stripe import StripeDataModule

__all__ = [
    "BaseDataModule",
    "FileOptions",
    "ImageDataModule",
    "ImageFolder",
    "InspectionDataModule",
    "LabelledImageDataModule",
    "MaskedImageFolder",
    "Source",
    "StripeDataModule",
]
