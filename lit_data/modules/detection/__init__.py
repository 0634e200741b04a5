"""Boxes of objects."""

from lit_data.modules.detection.module import DetectionModule
from lit_data.modules.detection.net import DetectorNet

__all__ = ["DetectionModule", "DetectorNet"]
