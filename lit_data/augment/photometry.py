"""`Photometry`: blur, gain, offset, contrast, gamma and noise, with numbers for each image."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from kornia.enhance import (
    adjust_brightness,
    adjust_brightness_accumulative,
    adjust_contrast,
    adjust_gamma,
)
from kornia.filters import filter2d_separable
from kornia.geometry.transform import warp_affine
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.core.checks import check_share
from lit_data.core.devices import change_each, reused, runs_on_cpu
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Floats

Planes = Floats
Numbers = TypeVar("Numbers", Tensor, Planes)
_TRUNCATE = 3.0
"""Radius of a kernel in standard deviations; the rest of the Gaussian is 0.3 %."""
_STEPS = 65536
"""Number of integer steps that gray values are rounded to before rows are summed."""
_LEAST_WEIGHT = 1e-6
"""Smaller weights at the ends of a kernel are left out on a CPU."""

_CPU = torch.device("cpu")
FIELD_PX = 1024
NOISE_DRAWS = 3
"""Number of draws for one window: row, column, sign."""

_KEY = "augment_photometry"
_BLUR_KEY = "augment_blur"
_GAIN = 0
_NOISE = 1
_WINDOW = slice(2, 2 + NOISE_DRAWS)
_FIRST = 2 + NOISE_DRAWS
"""Number of first draws: gain, noise, and the window of the noise."""
_OFFSET, _CONTRAST, _GAMMA, _BLUR = range(_FIRST, _FIRST + 4)
_MORE = 4
"""Number of draws after the first ones of all channels, which therefore stay the same."""
_SHARED = (_GAIN, _NOISE, _OFFSET, _CONTRAST, _GAMMA, _BLUR)
"""All but the window of the noise, which no two images share."""
_OFF = np.array([0.5, 0.0, 0.5, 0.5, 0.5, 0.0], np.float32)
"""Numbers that do not change an image, in the order of `_SHARED`."""


def gaussian_weights(sigma_px: Planes, largest_px: float) -> Planes:
    """Return kernels along one axis, all as long as the widest one needs.

    Args:
        sigma_px: [...] standard deviations; 0 does not change an image.
        largest_px: Largest possible standard deviation.

    Returns:
        Kernels [..., taps] float32 with sum 1.
    """
    radius = math.ceil(_TRUNCATE * largest_px)
    distance = np.arange(-radius, radius + 1)
    # Such a narrow Gaussian has all its weight in the middle tap, and avoids a division by 0.
    sigma = np.maximum(sigma_px.astype(np.float64), 1e-3)[..., None]
    weights = np.exp(-(distance**2) / (2 * sigma**2))
    normalised: Planes = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return normalised


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Convolve each image with its own kernel along both axes, repeating the edges.

    Args:
        images: [B, C, H, W] float32.
        weights: [B, C, taps] float32, taps odd.

    Returns:
        [B, C, H, W] float32.
    """
    planes = images.reshape(-1, 1, *images.shape[-2:])
    if not len(planes):
        return images
    if len(planes) == 1:
        # A single plane would not be a grouped convolution, and would be summed in another order.
        return blur(images.expand(2, -1, -1, -1), weights.expand(2, -1, -1))[:1]
    kernels = weights.reshape(len(planes), -1)
    blurred: Tensor = filter2d_separable(planes, kernels, kernels, border_type="replicate")
    return blurred.view(images.shape)


def plane_means(images: Tensor) -> Tensor:
    """Return the mean of each image, the same on any device.

    Each row is summed separately, and the rows are added as integers, whose sum is the same in any
    order.

    Args:
        images: [B, C, H, W] float32 in 0..1.

    Returns:
        [B, C, 1, 1] float32, within 1 / 65536 of the mean.
    """
    rows = images.sum(dim=3, keepdim=True)
    sums = (rows * _STEPS).to(torch.int64).sum(dim=2, keepdim=True)
    return sums.to(torch.float32) / (_STEPS * images.shape[2] * images.shape[3])


@torch.compiler.disable  # type: ignore[untyped-decorator]
@lru_cache(maxsize=4)
def noise_field(device: torch.device) -> Tensor:
    """Return the noise field, [FIELD_PX, FIELD_PX] float32, which is the same on all machines.

    It is normally distributed with variance 1 (Box and Muller, 1958).
    """
    draws = uniform(0, Stream.NOISE, np.arange(FIELD_PX), 0, FIELD_PX).astype(np.float64)
    # Two uniform numbers make two normal ones.
    radius, angle = np.sqrt(-2 * np.log(1 - draws[:, ::2])), 2 * np.pi * draws[:, 1::2]
    field = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return torch.from_numpy(field.astype(np.float32)).to(device, non_blocking=True)


def noise_windows(draws: Tensor, height_px: int, width_px: int) -> Tensor:
    """Return windows of the noise field, wrapped at its edges.

    Args:
        draws: [..., NOISE_DRAWS] float32 in [0, 1).
        height_px: Number of rows in a window.
        width_px: Number of columns in a window.

    Returns:
        Normal noise [..., height_px, width_px] float32 with variance 1, on the device of the draws.
    """
    if runs_on_cpu(draws):
        return _cut_windows(draws, height_px, width_px)
    start = (draws[..., :2] * FIELD_PX).long()
    rows = (start[..., 0, None] + torch.arange(height_px, device=draws.device)) % FIELD_PX
    columns = (start[..., 1, None] + torch.arange(width_px, device=draws.device)) % FIELD_PX
    sign = torch.where(draws[..., 2] < 0.5, -1.0, 1.0)
    field: Tensor = noise_field(draws.device)
    window = field[rows[..., :, None], columns[..., None, :]]
    return window * sign[..., None, None]


def _cut_windows(draws: Tensor, height_px: int, width_px: int) -> Tensor:
    """Do the same on a CPU, where copying a slice of the field is far faster than indexing it."""
    flat = draws.reshape(-1, NOISE_DRAWS).numpy()
    windows = np.empty((len(flat), height_px, width_px), np.float32)
    for window, drawn in zip(windows, flat, strict=True):
        np.multiply(*_cut_window(drawn, height_px, width_px), out=window)
    return torch.from_numpy(windows).view(*draws.shape[:-1], height_px, width_px)


def _cut_window(drawn: Planes, height_px: int, width_px: int) -> tuple[Planes, np.float32]:
    """Return a window of the field, and the sign of its values."""
    field = noise_field(_CPU).numpy()
    sign = np.float32(-1 if drawn[2] < 0.5 else 1)
    top, left = int(drawn[0] * FIELD_PX), int(drawn[1] * FIELD_PX)
    bottom, right = top + height_px, left + width_px
    if bottom <= FIELD_PX and right <= FIELD_PX:
        return field[top:bottom, left:right], sign
    rows, columns = np.arange(top, bottom), np.arange(left, right)
    return field.take(rows, axis=0, mode="wrap").take(columns, axis=1, mode="wrap"), sign


class Photometry(Augmentation):
    """Changes brightness and sharpness of images, but not masks and boxes.

    The order is blur, contrast, gain, offset, gamma, noise; then values are clipped to 0..1. A
    change of 0 is skipped, and with all at 0 no pixel changes. With uniform numbers g from [-1, 1],
    an image x becomes ``((x - mean) * (1 + contrast * g) + mean) * (1 + gain * g) + offset * g``,
    raised to ``1 + gamma * g``.

    Args:
        gain: Largest change of the factor.
        offset: Largest number added, in units of the 0..1 value range.
        contrast: Largest change of the distance from the image's own mean, as a fraction.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of a Gaussian blur; each image draws its own from [0,
            blur_px].
        noise: Largest standard deviation of added noise, in units of the 0..1 value range; drawn
            for each image from [0, noise].
        probability: Probability that a change is applied to an image, drawn separately for each
            change.
        registered: Use the same numbers for all channels of a sample, as in one exposure; each
            channel has its own noise.

    Raises:
        ConfigError: A size is negative, gain, contrast or gamma is not below 1, or the probability
            is not valid.
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
        probability: float = 1.0,
        registered: bool = False,
    ) -> None:
        super().__init__()
        check_share("probability", probability)
        for name, change in (("gain", gain), ("contrast", contrast), ("gamma", gamma)):
            if not 0 <= change < 1:
                raise ConfigError(f"{name}={change}: need 0 <= {name} < 1")
        for name, size in (("offset", offset), ("blur_px", blur_px), ("noise", noise)):
            if size < 0:
                raise ConfigError(f"{name}={size}: need {name} >= 0")
        self.gain = gain
        self.offset = offset
        self.contrast = contrast
        self.gamma = gamma
        self.blur_px = blur_px
        self.noise = noise
        self.probability = probability
        self.registered = registered

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Keys of ``augment_photometry`` [B, C, 9] in [0, 1), ``augment_blur`` [B, C, taps]; float32."""
        return _KEY, _BLUR_KEY

    @property
    def is_off(self) -> bool:
        """Return True if no pixel changes."""
        changes = (self.gain, self.offset, self.contrast, self.gamma, self.blur_px, self.noise)
        return not any(changes)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the exposure of each image; see `Augmentation.draw`."""
        if self.is_off:
            return {}
        count = channels * (_FIRST + _MORE + len(_OFF))
        draws = uniform(seed, Stream.PHOTOMETRY, index, epoch, count)
        ends = [channels * _FIRST, channels * (_FIRST + _MORE)]
        # All numbers are drawn even if unused, so that no option changes those of others.
        first, more, chance = np.split(draws, ends, axis=1)
        first, more = _by_channel(first, channels), _by_channel(more, channels)
        numbers = np.concatenate((first, more), axis=-1)
        is_touched = _by_channel(chance, channels) < self.probability
        numbers[..., _SHARED] = np.where(is_touched, numbers[..., _SHARED], _OFF)
        if self.registered:
            numbers[..., _SHARED] = numbers[:, :1, _SHARED]
        tensors = {_KEY: torch.from_numpy(numbers)}
        if self.blur_px:
            weights = gaussian_weights(self.blur_px * numbers[..., _BLUR], self.blur_px)
            tensors[_BLUR_KEY] = torch.from_numpy(weights)
        return tensors

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply the drawn exposure to each image."""
        if self.is_off:
            return layers
        expose = self._expose_samples if runs_on_cpu(layers.images) else self._expose
        changed = expose(layers.images, draws[_KEY], draws.get(_BLUR_KEY))
        return Layers(changed, layers.masks, layers.boxes)

    def _expose(self, images: Tensor, drawn: Tensor, weights: Tensor | None) -> Tensor:
        numbers = _signed(drawn)[..., None, None]
        if weights is not None:
            images = blur(images, weights)
        # Kornia would clip values to 0..1 after each step, and not only at the end.
        if self.contrast:
            means = plane_means(images)
            contrast = 1 + self.contrast * numbers[:, :, _CONTRAST]
            images = adjust_contrast(images - means, contrast, clip_output=False) + means
        if self.gain:
            factor = 1 + self.gain * numbers[:, :, _GAIN]
            images = adjust_brightness_accumulative(images, factor, clip_output=False)
        if self.offset:
            added = self.offset * numbers[:, :, _OFFSET]
            images = adjust_brightness(images, added, clip_output=False)
        if self.gamma:
            exponent = 1 + self.gamma * numbers[:, :, _GAMMA]
            # The default gain would be copied to the device, which waits for it.
            images = adjust_gamma(images.clamp(0, 1), exponent, torch.ones_like(exponent))
        if self.noise:
            windows = noise_windows(drawn[..., _WINDOW], *images.shape[2:])
            images = images + windows.mul_(self.noise * drawn[..., _NOISE, None, None])
        return images.clamp(0, 1)

    def _find_line(self, numbers: Planes, means: Planes | None) -> tuple[Planes, Planes]:
        """Return the factor of each image, and the number to add to it, [C, 1, 1] each.

        Args:
            numbers: Drawn numbers [C, 9, 1, 1] in [-1, 1).
            means: Means [C, 1, 1] of the images; None if the contrast does not change.
        """
        factor = 1 + self.gain * numbers[:, _GAIN]
        added = self.offset * numbers[:, _OFFSET]
        if means is not None:
            contrast = 1 + self.contrast * numbers[:, _CONTRAST]
            # (x - mean) * contrast + mean, times the factor.
            added = added + means * (1 - contrast) * factor
            factor = factor * contrast
        return factor, added

    def _expose_samples(self, images: Tensor, drawn: Tensor, weights: Tensor | None) -> Tensor:
        """Do the same on a CPU with OpenCV, sample by sample, in a third of the time.

        A single sample stays in the processor's caches.
        """
        exposed = reused(images.shape)
        sources, targets, numbers = images.numpy(), exposed.numpy(), drawn.numpy()
        kernels = None if weights is None else weights.numpy()

        def expose(number: int) -> None:
            source, out = sources[number], targets[number]
            if kernels is not None:
                source = _blur_planes(source, kernels[number], out)
            self._expose_sample(source, numbers[number], out)

        change_each(expose, images)
        return exposed

    def _expose_sample(self, source: Planes, drawn: Planes, out: Planes) -> None:
        """Apply all changes after the blur, from [C, H, W] into [C, H, W], which may be the same."""
        import cv2

        flat = out.reshape(-1, out.shape[-1])
        numbers = _signed(drawn)[..., None, None]
        means = None
        if self.contrast:
            means = np.array([cv2.mean(plane)[0] for plane in source], np.float32)[:, None, None]
        factor, added = self._find_line(numbers, means)
        np.multiply(source, factor, out=out)
        if self.offset or self.contrast:
            np.add(out, added, out=out)
        if self.gamma:
            # Logarithm and exponential take half the time of a power; the log of 0 is -inf.
            cv2.log(_clip(flat), dst=flat)
            np.multiply(out, 1 + self.gamma * numbers[:, _GAMMA], out=out)
            cv2.exp(flat, dst=flat)
        if self.noise:
            for plane, row in zip(out, drawn, strict=True):
                window, sign = _cut_window(row[_WINDOW], *plane.shape)
                cv2.scaleAdd(window, float(sign * self.noise * row[_NOISE]), plane, dst=plane)
        _clip(flat)


def _blur_planes(source: Planes, kernels: Planes, out: Planes) -> Planes:
    import cv2

    for plane, kernel, row in zip(source, kernels, out, strict=True):
        # A kernel is as long as the widest one, but a narrow one needs few of its taps.
        taps = kernel[kernel > _LEAST_WEIGHT]
        cv2.sepFilter2D(plane, cv2.CV_32F, taps, taps, dst=row, borderType=cv2.BORDER_REPLICATE)
    return out


def _clip(planes: Planes) -> Planes:
    import cv2

    cv2.threshold(planes, 0, 0, cv2.THRESH_TOZERO, dst=planes)
    cv2.threshold(planes, 1, 0, cv2.THRESH_TRUNC, dst=planes)
    return planes


def _by_channel(draws: Planes, channels: int) -> Planes:
    return draws.reshape(len(draws), channels, draws.shape[1] // channels)


def _signed(numbers: Numbers) -> Numbers:
    """Map [0, 1) to [-1, 1)."""
    return 2 * numbers - 1


class SingleTexture(nn.Module):
    """Small independent shift, gain and noise for each channel of one texture.

    They turn the texture into target and references.

    Args:
        shift_px: Largest shift along each axis, by fractions of a pixel too (bilinear).
        gain: Largest change of a channel's factor, which is in [1 - gain, 1 + gain].
        noise: Standard deviation of the noise of each channel, in units of the 0..1 value range.

    Raises:
        ConfigError: A size is negative, or gain is not below 1.
    """

    def __init__(self, *, shift_px: float = 0.5, gain: float = 0.03, noise: float = 0.01) -> None:
        super().__init__()
        if shift_px < 0 or noise < 0 or not 0 <= gain < 1:
            raise ConfigError(
                f"shift_px={shift_px}, gain={gain}, noise={noise}: need shift_px, noise >= 0, 0 <= "
                "gain < 1"
            )
        self.shift_px = shift_px
        self.gain = gain
        self.noise = noise

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the parameters of a batch.

        The parameters of a sample are a pure function of (seed, epoch, its index).

        Returns:
            ``nuisance`` [B, C, 6] float32 in [0, 1), on the host.
        """
        per_channel = 3 + NOISE_DRAWS  # shift along both axes, gain, window of the noise
        draws = uniform(seed, Stream.NUISANCE, index, epoch, channels * per_channel)
        return {"nuisance": torch.from_numpy(draws.copy()).view(len(draws), channels, per_channel)}

    @torch.no_grad()
    def forward(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Apply drawn parameters.

        Args:
            images: [B, C, H, W] float32 in 0..1.
            draws: The parameters of `draw`, on the device of the images.

        Returns:
            [B, C, H, W] float32 in 0..1.
        """
        batch, channels, height, width = images.shape
        drawn = draws["nuisance"]
        shift = (2 * drawn[..., :2] - 1).reshape(-1, 2, 1) * self.shift_px
        matrix = torch.cat(
            (torch.eye(2, device=images.device).expand(batch * channels, 2, 2), shift), dim=-1
        )
        planes = warp_affine(
            images.reshape(-1, 1, height, width),
            matrix,
            (height, width),
            padding_mode="reflection",
            align_corners=True,
        )
        gain = 1 + self.gain * (2 * drawn[..., 2] - 1)
        images = planes.view_as(images) * gain[..., None, None]
        return (images + self.noise * noise_windows(drawn[..., 3:], height, width)).clamp_(0, 1)
