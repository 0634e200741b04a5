"""Map-style datasets. They know nothing of Lightning, and importing one imports neither Kornia nor Hydra."""

from lit_data.datasets.detection import DetectionDataset
from lit_data.datasets.stripes import StripeDataset

__all__ = ["DetectionDataset", "StripeDataset"]
