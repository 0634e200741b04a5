"""Object detection with boxes: files, samples, nets, scores and predictions."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.detection.datamodule import DetectionDataModule
    from lit_data.wings.detection.dataset import DetectionDataset
    from lit_data.wings.detection.model.lite import LiteDetector
    from lit_data.wings.detection.model.module import DetectionModule
    from lit_data.wings.detection.model.net import DetectorNet
    from lit_data.wings.detection.model.torchvision import (
        TorchvisionDetectionModule,
        TorchvisionDetector,
    )
    from lit_data.wings.detection.predictions import BoxTask
    from lit_data.wings.detection.recognition import recognize
    from lit_data.wings.detection.sampling import BoxSampling

__all__ = [
    "BoxSampling",
    "BoxTask",
    "DetectionDataModule",
    "DetectionDataset",
    "DetectionModule",
    "DetectorNet",
    "LiteDetector",
    "TorchvisionDetectionModule",
    "TorchvisionDetector",
    "recognize",
]

TARGETS = (
    "BoxSampling",
    "DetectionDataModule",
    "DetectionModule",
    "DetectorNet",
    "LiteDetector",
    "TorchvisionDetectionModule",
    "TorchvisionDetector",
)
"""Classes that a configuration may name."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "BoxSampling": "sampling",
        "BoxTask": "predictions",
        "DetectionDataModule": "datamodule",
        "DetectionDataset": "dataset",
        "DetectionModule": "model.module",
        "DetectorNet": "model.net",
        "LiteDetector": "model.lite",
        "TorchvisionDetectionModule": "model.torchvision",
        "TorchvisionDetector": "model.torchvision",
        "recognize": "recognition",
    },
)
