"""The reading interface that a decoded store and directly read files share."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lit_data.types import Array


class ImageBank(Protocol):
    """Images by number, all of one dtype and one channel count, of equal or different sizes."""

    @property
    def channels(self) -> int:
        """Channels of every image."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of every image: uint8, uint16, int16 or float32."""

    @property
    def heights_px(self) -> NDArray[np.int64]:
        """Rows of each image: [n] int64."""

    @property
    def widths_px(self) -> NDArray[np.int64]:
        """Columns of each image: [n] int64."""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(first path, what is wrong) of each source that was left out."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Array:
        """One image: [C, H, W], read-only."""

    def name(self, index: int) -> str:
        """First source path of one image."""


def describe_bank(bank: ImageBank) -> dict[str, int]:
    """Numbers for a report: ``images``, ``skipped``, and ``pixel_bytes`` of all decoded pixels."""
    pixels = bank.channels * int((bank.heights_px * bank.widths_px).sum())
    return {"images": len(bank), "skipped": len(bank.skipped), "pixel_bytes": pixels * bank.dtype.itemsize}
