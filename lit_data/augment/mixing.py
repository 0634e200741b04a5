"""Samples made of several images: MixUp, and mosaics drawn on the device."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from kornia.augmentation import RandomMixUpV2
from numpy.typing import ArrayLike
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import FILL, MosaicPlan
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Doubles, Floats, Ints

_KEY = "augment_mixup"
_KNOTS = 2049

_AXIS = 6
_COLUMNS = 2 * _AXIS + 1
PASS_PX = (1 << 18, 1 << 24)
"""Pixels that are drawn together on a CPU, so that what is made of them stays in its cache, and on
a GPU, where that takes 40 bytes for each."""


class MixUp(Augmentation):
    """Blend of a sample with another one of its batch, which has the boxes of both.

    The weight of the sample itself is drawn from Beta(alpha, alpha) as by Zhang et al., "mixup:
    Beyond empirical risk minimization" (ICLR 2018); boxes as in ultralytics (``data/augment.py``,
    `MixUp`), whose alpha is 32: both images are seen about equally well. The numbers of a sample
    come from its own stream; the image that becomes its partner depends on the batch. A batch of
    one sample stays as it is.

    If boxes are mixed, this waits for the device, because their number changes.

    Args:
        probability: Fraction of the samples that are blended.
        alpha: Above 0; small numbers leave one of the two images faint.

    Raises:
        ConfigError: An argument is out of its range; later, that there are masks, which cannot be
            blended.
    """

    def __init__(self, *, probability: float = 0.0, alpha: float = 32.0) -> None:
        super().__init__()
        if not (0 <= probability <= 1 and 0 < alpha < np.inf):
            raise ConfigError(
                f"probability={probability}, alpha={alpha}: need a probability in 0..1 and alpha > "
                "0"
            )
        self.probability = probability
        self.alpha = float(alpha)
        self._kornia = RandomMixUpV2()  # of which the numbers are given

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """``augment_mixup`` [B, 2] float32: the weight of the sample itself, and its partner.

        The weight is 1 if the sample is not blended. The partner is a number in [0, 1), which
        `transform` spreads over the other samples of the batch.
        """
        return (_KEY,)

    @property
    def takes_bytes(self) -> bool:
        """True if no sample changes; see `Augmentation`."""
        return self.is_off

    @property
    def is_off(self) -> bool:
        """Return True if no sample changes."""
        return not self.probability

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw weights and partners; see `Augmentation.draw`."""
        if self.is_off:
            return {}
        chance, level, partner = uniform(seed, Stream.MIXUP, index, epoch, 3).T
        weight = np.where(chance < self.probability, invert_beta(level, self.alpha), 1.0)
        return {_KEY: torch.from_numpy(np.stack((weight, partner), axis=1).astype(np.float32))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Blend as drawn."""
        samples = len(layers.images)
        if self.is_off or samples == 1:
            return layers
        if layers.masks is not None:
            raise ConfigError("MixUp is not defined for masks: remove it")
        weight, choice = draws[_KEY].unbind(dim=1)
        sample = torch.arange(samples, device=weight.device)
        # The product can round up to the number of the other samples.
        step = 1 + (choice * (samples - 1)).long().clamp_(max=samples - 2)
        partner = torch.where(weight < 1, (sample + step) % samples, sample)
        blend = {"mixup_pairs": partner, "mixup_lambdas": 1 - weight}
        images = self._kornia.apply_transform(layers.images, blend)
        boxes = None if layers.boxes is None else _join_boxes(layers.boxes, sample, partner)
        return Layers(images, boxes=boxes)


def _join_boxes(boxes: Tensor, sample: Tensor, partner: Tensor) -> Tensor:
    """Return the boxes of each sample and of its partner, ordered by sample.

    A sample that is its own partner keeps its boxes.
    """
    owner = boxes[:, 0]
    # A box belongs to its own sample and to all whose partner that is: pairs of (sample, box).
    belongs = (owner == sample[:, None]) | (owner == partner[:, None])
    row, box = belongs.nonzero(as_tuple=True)
    return torch.cat((row[:, None].to(boxes.dtype), boxes[box, 1:]), dim=1)


def invert_beta(levels: Floats, alpha: float) -> Doubles:
    """Return numbers of Beta(alpha, alpha) from uniform ones."""
    logits, probability = _tabulate_beta(alpha)
    logit = np.interp(levels, probability, logits)
    numbers: Doubles = (1 + np.tanh(logit / 2)) / 2
    return numbers


@lru_cache(maxsize=8)
def _tabulate_beta(alpha: float) -> tuple[Doubles, Doubles]:
    """Return logits, and the probability that Beta(alpha, alpha) stays below each.

    As a logit it has a single hump for any alpha, with density (x (1 - x))^alpha; its tails end
    where e^-20 is left.
    """
    end = 20 / alpha + np.sqrt(80 / alpha)
    logits = np.linspace(-end, end, _KNOTS)
    density = np.exp(-2 * alpha * (np.logaddexp(logits / 2, -logits / 2) - np.log(2)))
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))  # trapezoids
    return logits, area / area[-1]


def pack_tiles(plan: MosaicPlan, places_px: Ints, tiles: int) -> Tensor:
    """Return a plan as one tensor, which crosses to the device in one copy.

    Args:
        plan: Mosaics whose images are numbers of samples of the same batch.
        places_px: [B, 4] (top, left, bottom, right) of each image in its own sample.
        tiles: The most tiles of a sample.

    Returns:
        [B, 1 + tiles, 13] float32; the first of each sample stands for pixels without a tile. For
        y, and again for x: the window's first pixel and the one behind its last, pixels of the
        source for one of the window, place in the source of pixel 0, first and last pixel of the
        source; then the number of the sample it comes from.
    """
    step = 1 / plan.scale[:, None]
    # Images lie in the middle of their samples, so places count from there.
    sources_px = places_px[plan.image]
    first = 0.5 * step - plan.origin - 0.5 + sources_px[:, :2]
    columns = []
    for axis in (0, 1):
        columns += [plan.window[:, axis], plan.window[:, 2 + axis], step[:, 0], first[:, axis]]
        columns += [sources_px[:, axis], sources_px[:, 2 + axis] - 1]
    columns.append(plan.image)
    # Rows ascend: the tiles of a sample are numbered from where its row begins.
    number_in_sample = np.arange(len(plan)) - np.searchsorted(plan.row, plan.row)
    packed = np.zeros((len(places_px), 1 + tiles, _COLUMNS), np.float32)
    packed[plan.row, 1 + number_in_sample] = np.stack(columns, axis=1)
    return torch.from_numpy(packed)


def draw_tiles(images: Tensor, tiles: Tensor) -> Tensor:
    """Draw mosaics: each pixel is weighed from the four pixels around its place in its tile.

    These are looked up by one index for all channels, which on a CPU core takes a third of the time
    of a `grid_sample` over (sample, y, x), and leaves bytes as they are until they are weighed.
    Nothing waits for the device.

    Args:
        images: [B, C, H, W] of 0..255, bytes or not, each image alone in its sample.
        tiles: [B, 1 + tiles, 13] of `pack_tiles`, on the same device.

    Returns:
        [B, C, H, W] float32 in 0..1, gray where there is no tile.
    """
    batch, channels, height, width = images.shape
    # Row c holds channel c of the first image, and behind it all that follows: one index serves all
    # channels.
    plane_px = height * width
    planes = images.flatten().unfold(0, ((batch - 1) * channels + 1) * plane_px, plane_px)
    mosaics = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    samples = max(1, PASS_PX[images.is_cuda] // plane_px)
    parts = zip(torch.split(mosaics, samples), torch.split(tiles, samples), strict=True)
    for some_mosaics, some_tiles in parts:
        _draw_some(some_mosaics, planes, some_tiles)
    return mosaics


def _draw_some(mosaics: Tensor, planes: Tensor, tiles: Tensor) -> None:
    """Draw into samples [n, C, H, W] from the planes of all."""
    channels, height, width = mosaics.shape[1:]
    down = _trace(tiles[..., :_AXIS], height)
    right = _trace(tiles[..., _AXIS : 2 * _AXIS], width)
    number = torch.arange(tiles.shape[1], device=tiles.device, dtype=tiles.dtype)
    # Windows do not overlap, so each sum has one number in it; a few whole numbers are exact in any
    # precision.
    numbers = (down.inside * number[:, None]).transpose(1, 2) @ right.inside
    tile = numbers.long()[:, None]
    is_covered = numbers.clamp_(max=1)
    # Number of a pixel's row among those of all samples, by its tile; columns are added to it.
    rows = tiles[..., -1:].long() * (channels * height * width) + down.pixel * width
    index = _look_up(rows[..., None], tile) + _look_up(right.pixel[:, :, None], tile)
    weights = _weigh(
        _look_up(down.fraction[..., None], tile),
        _look_up(right.fraction[:, :, None], tile),
        is_covered,
    )
    mosaics.copy_(torch.sub(1, is_covered).mul_(FILL / 255)[:, None])
    flat = index.view(1, -1).expand(channels, -1)
    # Steps to the pixel below and beside; none in images of one row or column.
    below, beside = width * (height > 1), int(width > 1)
    for start, weight in zip((0, beside, below, below + beside), weights, strict=True):
        corner = planes[:, start:].gather(1, flat).view(channels, *index.shape).transpose(0, 1)
        mosaics.addcmul_(corner, weight[:, None])


class _Axis(NamedTuple):
    """One axis of the tiles, for each pixel of the output along it: [B, tiles, length] each."""

    inside: Tensor
    """float32, 1 in the window."""
    pixel: Tensor
    """int64, the upper or left one of the two pixels to look at."""
    fraction: Tensor
    """float32, weight of the other one."""


def _trace(columns: Tensor, length: int) -> _Axis:
    low, high, step, first, start, end = columns[..., None].unbind(dim=2)
    pixels = torch.arange(length, device=columns.device, dtype=columns.dtype)
    # Beyond its edges a tile repeats them, so that no grey comes in.
    position = (pixels * step + first).clamp(start, end)
    pixel = torch.minimum(position.floor(), end - 1).clamp_(min=0)
    inside = (pixels >= low) & (pixels < high)
    return _Axis(inside.to(columns.dtype), pixel.long(), position - pixel)


def _look_up(values: Tensor, tile: Tensor) -> Tensor:
    """Return [B, tiles, H, 1] or [B, tiles, 1, W] at the tile [B, 1, H, W] of each pixel."""
    return values.expand(-1, -1, *tile.shape[2:]).gather(1, tile)[:, 0]


def _weigh(
    down: Tensor, right: Tensor, is_covered: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights of the four pixels around a place, upper left first: [B, H, W] each.

    They take 0..255 to 0..1.
    """
    total = is_covered * (1 / 255)
    lower = total * down
    lower_right = lower * right
    upper = total - lower
    upper_right = upper * right
    return upper - upper_right, upper_right, lower - lower_right, lower_right
