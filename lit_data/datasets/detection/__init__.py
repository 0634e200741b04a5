"""Images with boxes."""

from lit_data.datasets.detection.dataset import DetectionDataset

__all__ = ["DetectionDataset"]
