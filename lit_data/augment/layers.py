"""`Layers`: what moves together when a batch is augmented."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.errors import ConfigError

BOX_COLUMNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Images, masks and boxes of one batch, on one device.

    Args:
        images: [B, C, H, W] float32 in 0..1.
        masks: [B, K, H, W] of any dtype, or none. They are moved by nearest neighbour, so no new value appears.
        boxes: [N, 6] float32 = (row in batch, class, cx, cy, w, h), the last four in shares 0..1 of the image size, or
            none.

    Raises:
        ConfigError: A shape or dtype is another, or the sizes disagree.
    """

    images: Tensor
    masks: Tensor | None = None
    boxes: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what would be moved wrongly."""
        if self.images.ndim != 4 or self.images.dtype != torch.float32:
            raise ConfigError(f"images are {_describe(self.images)}: they must be [B, C, H, W] float32")
        if self.masks is not None and not self._fits(self.masks):
            raise ConfigError(
                f"masks are {_describe(self.masks)} beside images {_describe(self.images)}: they must be [B, K, H, W]"
            )
        if self.boxes is not None and (self.boxes.ndim != 2 or self.boxes.shape[1] != BOX_COLUMNS):
            raise ConfigError(f"boxes are {_describe(self.boxes)}: they must be [N, 6] = (row, class, cx, cy, w, h)")

    @property
    def size_px(self) -> tuple[int, int]:
        """(H, W) of the images."""
        height, width = self.images.shape[-2:]
        return height, width

    def _fits(self, masks: Tensor) -> bool:
        return masks.ndim == 4 and masks.shape[0] == self.images.shape[0] and masks.shape[2:] == self.images.shape[2:]


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
