"""Masks of defects and of watermarks."""

from lit_data.modules.segmentation.module import SegmentationModule
from lit_data.modules.segmentation.nets import CompareNet, UNet

__all__ = ["CompareNet", "SegmentationModule", "UNet"]
