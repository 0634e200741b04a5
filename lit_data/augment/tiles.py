"""Mosaics drawn on the device, from images that lie alone in the samples of their batch."""

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.mosaic import FILL, Ints, MosaicPlan

_AXIS: Final = 6
_COLUMNS: Final = 2 * _AXIS + 1
PASS_PX: Final = (1 << 18, 1 << 24)
"""Pixels that are drawn together on a CPU, so that what is made of them stays in its cache, and on
a GPU, where that takes 40 bytes for each."""


def pack_tiles(plan: MosaicPlan, places_px: Ints, tiles: int) -> Tensor:
    """A plan as one tensor, which crosses to the device in one copy.

    Args:
        plan: Mosaics whose images are numbers of samples of the same batch.
        places_px: [B, 4] (top, left, bottom, right) of each image in its own sample.
        tiles: The most that a sample has.

    Returns:
        [B, 1 + tiles, 13] float32; the first of each sample stands for what no tile covers. For y,
        and again for x: the window's first pixel and the one behind its last, pixels of the source
        for one of the window, where in the source pixel 0 looks, the first and the last pixel of
        the source; then the number of the sample it comes from.
    """
    step, place = 1 / plan.scale[:, None], places_px[plan.image]
    first = 0.5 * step - plan.origin - 0.5 + place[:, :2]
    axes = [
        np.stack(
            (
                plan.window[:, axis],
                plan.window[:, 2 + axis],
                step[:, 0],
                first[:, axis],
                low,
                high - 1,
            ),
            axis=1,
        )
        for axis, low, high in zip((0, 1), place[:, :2].T, place[:, 2:].T, strict=True)
    ]
    starts = np.searchsorted(
        plan.row, plan.row
    )  # where the tiles of the same sample begin: rows ascend
    packed = np.zeros((len(places_px), 1 + tiles, _COLUMNS), np.float32)
    packed[plan.row, 1 + np.arange(len(plan)) - starts] = np.concatenate(
        (*axes, plan.image[:, None]), axis=1
    )
    return torch.from_numpy(packed)


def draw_tiles(images: Tensor, tiles: Tensor) -> Tensor:
    """Draw mosaics: each pixel finds its tile, and in that tile the four pixels around its place.

    These are looked up by one index for all channels, which on a CPU core takes a third of the time
    of a `grid_sample` over (sample, y, x), and leaves bytes bytes until they are weighed. Nothing
    waits for the device.

    Args:
        images: [B, C, H, W] uint8, each image alone in its sample.
        tiles: [B, 1 + tiles, 13] of `pack_tiles`, on the same device.

    Returns:
        [B, C, H, W] float32 in 0..1, grey where there is no tile.
    """
    batch, channels, height, width = images.shape
    # Row c holds channel c of the first image, and behind it all that follows: one index serves all
    # channels.
    planes = images.flatten().unfold(
        0, ((batch - 1) * channels + 1) * height * width, height * width
    )
    drawn = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    samples = max(1, PASS_PX[images.is_cuda] // (height * width))
    for some, theirs in zip(torch.split(drawn, samples), torch.split(tiles, samples), strict=True):
        _draw_some(some, planes, theirs)
    return drawn


def _draw_some(drawn: Tensor, planes: Tensor, tiles: Tensor) -> None:
    """Draw samples [n, C, H, W] from the planes of all."""
    channels, height, width = drawn.shape[1:]
    down, right = _trace(tiles[..., :_AXIS], height), _trace(tiles[..., _AXIS : 2 * _AXIS], width)
    number = torch.arange(tiles.shape[1], device=tiles.device, dtype=tiles.dtype)
    # Windows do not overlap, so each sum has one number in it; a few whole numbers are exact in any
    # precision.
    numbers = (down.inside * number[:, None]).transpose(1, 2) @ right.inside
    slot, shown = numbers.long()[:, None], numbers.clamp_(max=1)
    rows = tiles[..., -1:].long() * (channels * height * width) + down.pixel * width
    index = _look_up(rows[..., None], slot) + _look_up(right.pixel[:, :, None], slot)
    weights = _weigh(
        _look_up(down.share[..., None], slot), _look_up(right.share[:, :, None], slot), shown
    )
    drawn.copy_(torch.sub(1, shown).mul_(FILL / 255)[:, None])
    flat = index.view(1, -1).expand(channels, -1)
    below, beside = width * (height > 1), int(width > 1)
    for start, weight in zip((0, beside, below, below + beside), weights, strict=True):
        corner = planes[:, start:].gather(1, flat).view(channels, *index.shape).transpose(0, 1)
        drawn.addcmul_(corner, weight[:, None])


class _Axis(NamedTuple):
    """One axis of the tiles of a batch, for each pixel of the output along it; [B, tiles, length] each."""

    inside: Tensor
    """float32, 1 in the window."""
    pixel: Tensor
    """int64, the upper or left one of the two pixels to look at."""
    share: Tensor
    """float32, of the other one."""


def _trace(columns: Tensor, length: int) -> _Axis:
    low, high, step, first, start, end = columns[..., None].unbind(dim=2)
    pixels = torch.arange(length, device=columns.device, dtype=columns.dtype)
    place = (pixels * step + first).clamp(
        start, end
    )  # beyond its edges a tile repeats them: no grey comes in
    pixel = torch.minimum(place.floor(), end - 1).clamp_(min=0)
    inside = (pixels >= low) & (pixels < high)
    return _Axis(inside.to(columns.dtype), pixel.long(), place - pixel)


def _look_up(values: Tensor, slot: Tensor) -> Tensor:
    """[B, tiles, H, 1] or [B, tiles, 1, W] at the tile of each pixel, [B, 1, H, W]: [B, H, W]."""
    return values.expand(-1, -1, *slot.shape[2:]).gather(1, slot)[:, 0]


def _weigh(down: Tensor, right: Tensor, shown: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the four pixels around a place, upper left first, which take 0..255 to 0..1; [B, H, W] each."""
    whole = shown * (1 / 255)
    lower = whole * down
    lower_right = lower * right
    upper = whole - lower
    upper_right = upper * right
    return upper - upper_right, upper_right, lower - lower_right, lower_right
