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
"""Number of pixels that are drawn together: on a CPU, so that intermediate results stay in its
cache, and on a GPU, where each pixel takes 40 bytes."""


class MixUp(Augmentation):
    """Blends a sample with another one of its batch; the result has the boxes of both.

    The weight of the sample itself is drawn from Beta(alpha, alpha) as in Zhang et al., "mixup:
    Beyond empirical risk minimization" (ICLR 2018). Boxes are treated as in ultralytics
    (``data/augment.py``, `MixUp`), whose alpha of 32 makes both images about equally visible. The
    numbers of a sample come from its own stream; its partner depends on the batch. A batch of one
    sample does not change.

    If boxes are mixed, this waits for the device, because their number changes.

    Args:
        probability: Fraction of the samples that are blended.
        alpha: Parameter of the Beta distribution, above 0; small numbers make one of the two images
            faint.

    Raises:
        ConfigError: An argument is out of its range; later, there are masks, which cannot be
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
        self._kornia = RandomMixUpV2()  # it gets the drawn numbers

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Key of ``augment_mixup`` [B, 2] float32: the weight of the sample itself, and its partner.

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
        """Blend samples with the drawn weights and partners."""
        samples = len(layers.images)
        if self.is_off or samples == 1:
            return layers
        if layers.masks is not None:
            raise ConfigError("MixUp is not defined for masks: remove it")
        weight, choice = draws[_KEY].unbind(dim=1)
        sample = torch.arange(samples, device=weight.device)
        # The product can round up to the number of other samples.
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
    # A box belongs to its own sample and to all samples that have it as their partner: pairs of
    # (sample, box).
    belongs = (owner == sample[:, None]) | (owner == partner[:, None])
    row, box = belongs.nonzero(as_tuple=True)
    return torch.cat((row[:, None].to(boxes.dtype), boxes[box, 1:]), dim=1)


def invert_beta(levels: Floats, alpha: float) -> Doubles:
    """Return Beta(alpha, alpha) numbers from uniform ones."""
    logits, probability = _tabulate_beta(alpha)
    logit = np.interp(levels, probability, logits)
    numbers: Doubles = (1 + np.tanh(logit / 2)) / 2
    return numbers


@lru_cache(maxsize=8)
def _tabulate_beta(alpha: float) -> tuple[Doubles, Doubles]:
    """Return logits, and the probability that Beta(alpha, alpha) stays below each.

    The distribution of the logit has a single peak for any alpha, with density (x (1 - x))^alpha;
    its tails end where e^-20 is left.
    """
    end = 20 / alpha + np.sqrt(80 / alpha)
    logits = np.linspace(-end, end, _KNOTS)
    density = np.exp(-2 * alpha * (np.logaddexp(logits / 2, -logits / 2) - np.log(2)))
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))  # trapezoids
    return logits, area / area[-1]


def pack_tiles(plan: MosaicPlan, places_px: Ints, tiles: int) -> Tensor:
    """Return a plan as one tensor, which reaches the device in one copy.

    Args:
        plan: Mosaics whose images are numbers of samples of the same batch.
        places_px: [B, 4] (top, left, bottom, right) of each image in its own sample.
        tiles: Largest number of tiles in a sample.

    Returns:
        [B, 1 + tiles, 13] float32; the first row of each sample stands for pixels without a tile.
        The columns are, for y and again for x: start and stop of the window, source pixels for each
        pixel of the window, position of pixel 0 in the source, first and last pixel of the source.
        The last column is the number of the source sample.
    """
    step = 1 / plan.scale[:, None]
    # Images are centered in their samples, so positions count from there.
    sources_px = places_px[plan.image]
    first = 0.5 * step - plan.origin - 0.5 + sources_px[:, :2]
    columns = []
    for axis in (0, 1):
        columns += [plan.window[:, axis], plan.window[:, 2 + axis], step[:, 0], first[:, axis]]
        columns += [sources_px[:, axis], sources_px[:, 2 + axis] - 1]
    columns.append(plan.image)
    # Rows ascend: the tiles of a sample are numbered from the beginning of its row.
    number_in_sample = np.arange(len(plan)) - np.searchsorted(plan.row, plan.row)
    packed = np.zeros((len(places_px), 1 + tiles, _COLUMNS), np.float32)
    packed[plan.row, 1 + number_in_sample] = np.stack(columns, axis=1)
    return torch.from_numpy(packed)


def draw_tiles(images: Tensor, tiles: Tensor) -> Tensor:
    """Draw mosaics by bilinear interpolation of each pixel in its tile.

    The four neighbors are looked up by one index for all channels. On a CPU core this takes a third
    of the time of a `grid_sample` over (sample, y, x), and keeps bytes until they are weighted.
    Nothing waits for the device.

    Args:
        images: [B, C, H, W] in 0..255, bytes or not, each image alone in its sample.
        tiles: [B, 1 + tiles, 13] of `pack_tiles`, on the same device.

    Returns:
        Mosaics [B, C, H, W] float32 in 0..1, gray where there is no tile.
    """
    batch, channels, height, width = images.shape
    # Row c starts with channel c of the first image and continues with all that follows, so that
    # one index works for all channels.
    plane_px = height * width
    planes = images.flatten().unfold(0, ((batch - 1) * channels + 1) * plane_px, plane_px)
    mosaics = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    samples = max(1, PASS_PX[images.is_cuda] // plane_px)
    parts = zip(torch.split(mosaics, samples), torch.split(tiles, samples), strict=True)
    for some_mosaics, some_tiles in parts:
        _draw_some(some_mosaics, planes, some_tiles)
    return mosaics


def _draw_some(mosaics: Tensor, planes: Tensor, tiles: Tensor) -> None:
    """Draw into samples [n, C, H, W] from the planes of all samples."""
    channels, height, width = mosaics.shape[1:]
    down = _trace(tiles[..., :_AXIS], height)
    right = _trace(tiles[..., _AXIS : 2 * _AXIS], width)
    number = torch.arange(tiles.shape[1], device=tiles.device, dtype=tiles.dtype)
    # Windows do not overlap, so each sum has one term; small integers are exact in any precision.
    numbers = (down.inside * number[:, None]).transpose(1, 2) @ right.inside
    tile = numbers.long()[:, None]
    is_covered = numbers.clamp_(max=1)
    # index of a pixel's row among those of all samples, by its tile; columns are added to it
    rows = tiles[..., -1:].long() * (channels * height * width) + down.pixel * width
    index = _look_up(rows[..., None], tile) + _look_up(right.pixel[:, :, None], tile)
    weights = _weigh(
        _look_up(down.fraction[..., None], tile),
        _look_up(right.fraction[:, :, None], tile),
        is_covered,
    )
    mosaics.copy_(torch.sub(1, is_covered).mul_(FILL / 255)[:, None])
    flat = index.view(1, -1).expand(channels, -1)
    # steps to the pixel below and to the right; 0 in images of one row or column
    below, beside = width * (height > 1), int(width > 1)
    for start, weight in zip((0, beside, below, below + beside), weights, strict=True):
        corner = planes[:, start:].gather(1, flat).view(channels, *index.shape).transpose(0, 1)
        mosaics.addcmul_(corner, weight[:, None])


class _Axis(NamedTuple):
    """One axis of the tiles, for each output pixel along it; all [B, tiles, length]."""

    inside: Tensor
    """Float32, 1 inside the window."""
    pixel: Tensor
    """Int64, the upper or left one of the two pixels to read."""
    fraction: Tensor
    """Float32, weight of the other pixel."""


def _trace(columns: Tensor, length: int) -> _Axis:
    low, high, step, first, start, end = columns[..., None].unbind(dim=2)
    pixels = torch.arange(length, device=columns.device, dtype=columns.dtype)
    # A tile repeats its edges beyond them, so that no gray is blended in.
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
    """Return the weights of the four pixels around a position, upper left first, [B, H, W] each.

    The weights also scale 0..255 to 0..1.
    """
    total = is_covered * (1 / 255)
    lower = total * down
    lower_right = lower * right
    upper = total - lower
    upper_right = upper * right
    return upper - upper_right, upper_right, lower - lower_right, lower_right
