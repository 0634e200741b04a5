"""Map-style datasets. They know nothing of Lightning, and importing one imports neither Kornia nor Hydra."""

from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.patches import PatchDataset

__all__ = [
    "BankDataset",
    "PatchDataset",
]
