"""`Photometry`: blur, gain, offset, contrast, gamma and noise, each image with numbers of its own."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lit_data.augment.augmentation import Augmentation
from lit_data.augment.filters import blur, gaussian_weights, plane_means, power
from lit_data.augment.layers import Layers
from lit_data.augment.noise import NOISE_DRAWS, noise_windows
from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform

_KEY: Final = "augment_photometry"
_BLUR_KEY: Final = "augment_blur"
_FIRST: Final = 2 + NOISE_DRAWS
"""Gain, noise, and the window of the noise."""
_MORE: Final = 4
"""Offset, contrast, gamma, blur: drawn after the first of all channels, so that those stay what they were."""
_SHARED: Final = (0, 1, *range(_FIRST, _FIRST + _MORE))
"""All but the window of the noise, which no two images share."""


class Photometry(Augmentation):
    """Changes how bright and how sharp images are; masks and boxes stay.

    In this order: blur, contrast, gain, offset, gamma, noise; then values are cut to 0..1. What is 0 is left out, and
    with everything at 0 no pixel is touched. With g a uniform number from [-1, 1], an image x becomes
    ``((x - mean) * (1 + contrast * g) + mean) * (1 + gain * g) + offset * g``, raised to ``1 + gamma * g``.

    Args:
        gain: Largest change of the factor.
        offset: Largest number added, in units of the 0..1 value range.
        contrast: Largest change of the distance from the image's own mean, as a share.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of a Gaussian blur; each image draws its own from [0, blur_px].
        noise: Largest standard deviation of added noise, in units of the 0..1 value range; each image draws its own
            from [0, noise].
        registered: All channels of a sample share their numbers, as one exposure does; noise stays each one's own.

    Raises:
        ConfigError: A size is negative, or gain, contrast or gamma is not below 1.
    """

    def __init__(
        self,
        *,
        gain: float = 0.0,
        offset: float = 0.0,
        contrast: float = 0.0,
        gamma: float = 0.0,
        blur_px: float = 0.0,
        noise: float = 0.0,
        registered: bool = False,
    ) -> None:
        super().__init__()
        for name, share in (("gain", gain), ("contrast", contrast), ("gamma", gamma)):
            if not 0 <= share < 1:
                raise ConfigError(f"{name}={share}: need 0 <= {name} < 1")
        for name, size in (("offset", offset), ("blur_px", blur_px), ("noise", noise)):
            if size < 0:
                raise ConfigError(f"{name}={size}: need {name} >= 0")
        self.gain, self.offset, self.contrast, self.gamma = gain, offset, contrast, gamma
        self.blur_px, self.noise, self.registered = blur_px, noise, registered

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """``augment_photometry`` [B, C, 9] in [0, 1), ``augment_blur`` [B, C, taps] weights; float32."""
        return _KEY, _BLUR_KEY

    @property
    def is_off(self) -> bool:
        """Whether no pixel changes."""
        return not (self.gain or self.offset or self.contrast or self.gamma or self.blur_px or self.noise)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the exposure of each image; see `Augmentation.draw`."""
        if self.is_off:
            return {}
        draws = uniform(seed, Stream.PHOTOMETRY, index, epoch, channels * (_FIRST + _MORE))
        first, more = np.split(draws, [channels * _FIRST], axis=1)
        numbers = np.concatenate((_by_channel(first, channels), _by_channel(more, channels)), axis=-1)
        if self.registered:
            numbers[..., _SHARED] = numbers[:, :1, _SHARED]
        drawn = {_KEY: torch.from_numpy(numbers)}
        if self.blur_px:
            drawn[_BLUR_KEY] = torch.from_numpy(gaussian_weights(self.blur_px * numbers[..., -1], self.blur_px))
        return drawn

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Expose each image as drawn."""
        if self.is_off:
            return layers
        images, numbers = layers.images, draws[_KEY][..., None, None]
        if self.blur_px:
            images = blur(images, draws[_BLUR_KEY])
        images = self._scale(images, numbers)
        if self.gamma:
            images = power(images.clamp(0, 1), 1 + self.gamma * _signed(numbers[:, :, _FIRST + 2]))
        if self.noise:
            windows = noise_windows(draws[_KEY][..., 2:_FIRST], *layers.size_px)
            images = images + self.noise * numbers[:, :, 1] * windows
        return Layers(images.clamp(0, 1), layers.masks, layers.boxes)

    def _scale(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Contrast, gain and offset as one factor and one number to add."""
        if not (self.gain or self.offset or self.contrast):
            return images
        factor = 1 + self.gain * _signed(numbers[:, :, 0])
        if not (self.offset or self.contrast):
            return images * factor
        added = self.offset * _signed(numbers[:, :, _FIRST])
        if self.contrast:
            contrast = 1 + self.contrast * _signed(numbers[:, :, _FIRST + 1])
            added = added + plane_means(images) * (1 - contrast) * factor
            factor = factor * contrast
        # Not addcmul: whether it rounds between the two depends on where a pixel lies in the batch.
        return (images * factor).add_(added)


def _by_channel(draws: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    return draws.reshape(len(draws), channels, -1)


def _signed(numbers: Tensor) -> Tensor:
    """From [0, 1) to [-1, 1)."""
    return 2 * numbers - 1
