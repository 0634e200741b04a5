"""Images in memory, behind the interface of a store."""

from collections.abc import Sequence

import numpy as np

from lit_data.core.types import Array
from lit_data.images import ImageBank


class MemoryBank(ImageBank):
    """Images of any sizes, named by their numbers."""

    skipped = ()

    def __init__(self, images: Sequence[Array]) -> None:
        self.images = list(images)
        self.channels, self.dtype = images[0].shape[0], images[0].dtype
        self.heights_px = np.array([image.shape[1] for image in images])
        self.widths_px = np.array([image.shape[2] for image in images])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Array:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"folder/{index}.png"
