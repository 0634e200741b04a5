"""Masks of defects and of watermarks."""

from lit_data.modules.segmentation.compare_net import CompareNet
from lit_data.modules.segmentation.module import SegmentationModule
from lit_data.modules.segmentation.unet import UNet

__all__ = ["CompareNet", "SegmentationModule", "UNet"]
