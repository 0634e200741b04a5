"""`Augmentation`: numbers are drawn on the host, pixels are changed on the device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_data.augment.layers import Layers


class Augmentation(nn.Module, ABC):
    """Base of all augmentations.

    `draw` makes every random number of a batch on the host, each sample's from its own stream. The numbers travel with
    the batch, under keys that begin with ``augment_``, and `forward` applies them on the device and draws nothing.

    A subclass writes `draw`, `draw_keys` and `transform`.
    """

    crop_px: tuple[int, int] | None = None
    """(height, width) that comes out; none where that is what goes in."""

    @property
    @abstractmethod
    def draw_keys(self) -> tuple[str, ...]:
        """The keys that `draw` may add to a batch."""

    @abstractmethod
    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the numbers of a batch; each sample's are a pure function of (seed, epoch, its index).

        Args:
            seed: 0 <= seed < 2**64.
            epoch: The epoch.
            index: [B] sample indices, on the host.
            channels: C, the number of images of a sample.

        Returns:
            Tensors whose first dimension is B, on the host.
        """

    @abstractmethod
    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers; called without gradient and without autocast."""

    def margin_px(self, patch_px: tuple[int, int]) -> tuple[int, int]:
        """Pixels (above and below, left and right) that a patch must be read larger by, so that no padding is seen.

        Args:
            patch_px: (height, width) that shall come out, by a crop to it.
        """
        return 0, 0

    @torch.no_grad()
    def forward(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers, in float32 whatever the precision of the run.

        Args:
            layers: What is augmented; its tensors are left as they are.
            draws: What `draw` returned, on the device of the layers; other keys are ignored.

        Returns:
            New layers on the same device.
        """
        with torch.autocast(layers.images.device.type, enabled=False):
            return self.transform(layers, draws)
