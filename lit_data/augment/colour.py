"""`ColourJitter`: hue, saturation and value of RGB images."""

import math
from collections.abc import Mapping
from typing import Final

import torch
from kornia.color import hsv_to_rgb, rgb_to_hsv
from numpy.typing import ArrayLike
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform

_KEY: Final = "augment_colour"
_RGB: Final = 3


class ColourJitter(Augmentation):
    """Turns the hue, and multiplies saturation and value, the same for all pixels of a sample.

    Defaults are those of ultralytics (``hsv_h``, ``hsv_s``, ``hsv_v`` of ``ultralytics/cfg/default.yaml``).

    Args:
        hue: Largest turn of the hue either way, as a share of the colour circle, up to 0.5.
        saturation: Saturation is multiplied by a factor in [1 - saturation, 1 + saturation].
        value: The same for the value (the largest of R, G and B).

    Raises:
        ConfigError: An argument is out of its range; later, that images have another number of channels than 3.
    """

    def __init__(self, *, hue: float = 0.015, saturation: float = 0.7, value: float = 0.4) -> None:
        super().__init__()
        if not (0 <= hue <= 0.5 and 0 <= saturation <= 1 and 0 <= value <= 1):
            raise ConfigError(
                f"hue={hue}, saturation={saturation}, value={value}: need 0 <= hue <= 0.5 and the others in 0..1"
            )
        self.hue, self.saturation, self.value = hue, saturation, value

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """``augment_colour`` [B, 3] float32 in [0, 1): hue, saturation, value."""
        return (_KEY,)

    @property
    def is_off(self) -> bool:
        """Whether no pixel changes."""
        return not (self.hue or self.saturation or self.value)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the colours of each sample; see `Augmentation.draw`."""
        return {} if self.is_off else {_KEY: torch.from_numpy(uniform(seed, Stream.COLOUR, index, epoch, 3))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Change the colours as drawn."""
        if self.is_off:
            return layers
        if layers.images.shape[1] != _RGB:
            raise ConfigError(f"images have {layers.images.shape[1]} channels: colours need the three of RGB")
        turn, saturation, value = (2 * draws[_KEY] - 1)[..., None, None].unbind(dim=1)
        hues, saturations, values = rgb_to_hsv(layers.images).unbind(dim=1)
        hues = (hues + 2 * math.pi * self.hue * turn) % (2 * math.pi)
        saturations = (saturations * (1 + self.saturation * saturation)).clamp_(0, 1)
        values = (values * (1 + self.value * value)).clamp_(0, 1)
        images: Tensor = hsv_to_rgb(torch.stack((hues, saturations, values), dim=1))
        return Layers(images.clamp(0, 1), layers.masks, layers.boxes)
