"""Map-style datasets, which do not depend on Lightning and import neither Kornia nor Hydra."""

from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.patches import PatchDataset

__all__ = [
    "BankDataset",
    "PatchDataset",
]
