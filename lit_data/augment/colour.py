"""`ColourJitter`: hue, saturation and value of RGB images."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from kornia.color import hsv_to_rgb, rgb_to_hsv
from kornia.enhance import (
    adjust_brightness_accumulative,
    adjust_hue_raw,
    adjust_saturation_raw,
)
from numpy.typing import ArrayLike
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.core.devices import change_each, reused, runs_on_cpu
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform
from lit_inspect.counts import counted

_KEY = "augment_colour"
_RGB = 3
_MOST_HSV = (math.inf, 1, 1, 0)
"""Limits of hue, saturation and value; OpenCV requires four numbers."""


class ColourJitter(Augmentation):
    """Jitter of hue, saturation and value, the same for all pixels of a sample.

    Defaults are those of ultralytics (``hsv_h``, ``hsv_s``, ``hsv_v`` of
    ``ultralytics/cfg/default.yaml``).

    Args:
        hue: Largest shift of the hue either way, as a fraction of the color circle, up to 0.5.
        saturation: Largest change of the saturation, which is multiplied by a factor in
            [1 - saturation, 1 + saturation].
        value: Largest change of the value (the largest of R, G and B), likewise.

    Raises:
        ConfigError: An argument is out of its range; later, images do not have 3 channels.
    """

    def __init__(self, *, hue: float = 0.015, saturation: float = 0.7, value: float = 0.4) -> None:
        super().__init__()
        if not (0 <= hue <= 0.5 and 0 <= saturation <= 1 and 0 <= value <= 1):
            raise ConfigError(
                f"hue={hue}, saturation={saturation}, value={value}: need 0 <= hue <= 0.5 and the "
                "others in 0..1"
            )
        self.hue = hue
        self.saturation = saturation
        self.value = value

    @property
    def takes_bytes(self) -> bool:
        """True for any images."""
        return True

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Key of ``augment_colour`` [B, 3] float32 in [0, 1): hue, saturation, value."""
        return (_KEY,)

    @property
    def is_off(self) -> bool:
        """Return True if no pixel changes."""
        return not (self.hue or self.saturation or self.value)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the color changes of each sample; see `Augmentation.draw`."""
        if self.is_off:
            return {}
        return {_KEY: torch.from_numpy(uniform(seed, Stream.COLOUR, index, epoch, 3))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply the drawn color changes."""
        if self.is_off:
            return layers
        if layers.images.shape[1] != _RGB:
            raise ConfigError(
                f"images have {counted(layers.images.shape[1], 'channel')}: color changes need RGB; set "
                "hue, saturation and value of the augmentation to 0"
            )
        turn, saturation, value = (2 * draws[_KEY] - 1).unbind(dim=1)
        change = change_planes if runs_on_cpu(layers.images) else change_colours
        images = change(
            layers.images,
            6 * self.hue * turn,
            1 + self.saturation * saturation,
            1 + self.value * value,
        )
        return Layers(images, layers.masks, layers.boxes)


def change_colours(images: Tensor, turn: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Shift hues and multiply saturations and values, in Kornia's HSV.

    Args:
        images: [B, 3, H, W] float32 in 0..1, in the order R, G, B.
        turn: [B] shifts of the hue, in sixths of the color circle.
        saturation: [B] factors; the saturation stays at most 1.
        value: [B] factors; the value stays at most 1.

    Returns:
        Images [B, 3, H, W] float32 in 0..1.
    """
    turned = adjust_hue_raw(rgb_to_hsv(images), math.pi / 3 * turn)
    hsv = adjust_saturation_raw(turned, saturation)
    hsv[:, 2:] = adjust_brightness_accumulative(hsv[:, 2:], value)
    changed: Tensor = hsv_to_rgb(hsv)
    return changed.clamp_(0, 1)


def change_planes(images: Tensor, turn: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Do the same on a CPU in OpenCV's HSV, with hues in degrees, in two thirds of the time."""
    import cv2

    changed = reused(images.shape)
    sources, targets = images.numpy(), changed.numpy()
    turns_deg = (60 * turn % 360).double().tolist()
    saturations = saturation.double().tolist()
    values = value.double().tolist()

    def change(number: int) -> None:
        pixels = cv2.merge([*sources[number]])
        if images.dtype == torch.uint8:
            pixels = np.divide(pixels, np.float32(255), dtype=np.float32)
        hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
        # One row for each of hue, saturation and value; the last column is added.
        matrix = np.diag((1.0, saturations[number], values[number], 0.0))[:_RGB]
        matrix[0, 3] = turns_deg[number]
        hsv = cv2.min(cv2.transform(hsv, matrix), _MOST_HSV, dst=hsv)
        cv2.split(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), [*targets[number]])

    change_each(change, images)
    return changed
