"""Places of the tiles of an image, their weights at each pixel, and the reach of a net."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_data.checks import check_choice
from lit_data.errors import ConfigError
from lit_data.grid import count_positions, pair_px
from lit_data.types import Size

Blend = Literal["constant", "gaussian"]
Weights = np.ndarray[tuple[int], np.dtype[np.float64]]

_SIGMA = 0.125
"""Standard deviation of the Gaussian in tiles; MONAI's default, after nnU-Net."""


@dataclass(frozen=True, slots=True)
class Seams:
    """Rule by which neighbours share the pixels that both cover.

    Attributes:
        blend: `constant` counts all that is not in a margin alike, `gaussian` less with the
            distance from the middle.
        margin_px: Pixels next to a seam-side border that count nothing. None: half of the pixels
            that both cover for `constant`, a quarter for `gaussian`.
    """

    blend: Blend
    margin_px: int | None

    def margins(self, shared_px: int) -> tuple[int, int]:
        """Return the margins of the tiles before and behind a seam that share so many pixels."""
        if self.margin_px is not None:
            return self.margin_px, self.margin_px
        if self.blend == "constant":
            return shared_px // 2, shared_px - shared_px // 2  # each pixel from one tile
        return shared_px // 4, shared_px // 4


def weigh_tiles(starts: Sequence[int], tile_px: int, seams: Seams) -> list[Weights]:
    """Return weights along one axis; a tile's weight at a pixel is the product over both axes.

    Near a seam-side border a net sees zeros (or a reflection) where the image goes on, as far as it
    reaches: half its receptive field. Such pixels count nothing as long as they lie within the
    margin, and the neighbour covers them. Borders of the image itself have no margin, as there the
    net sees what it would see in the whole image. So if the margin is at least the reach, every
    pixel that counts is that of the whole image, and so is any average:

    - `constant`, margins by default: where the overlap is at least the receptive field;
    - `gaussian`: there too if ``margin_px`` is the reach, which `TiledPredictor` measures; with
      margins by default where it is at least twice as large;
    - nets whose output depends on all of the tile (attention, norms that average over it): never,
      and there `gaussian` hides the seams.

    Args:
        starts: First pixel of each tile, ascending.
        tile_px: Length of each.
        seams: The rule.

    Returns:
        For each tile [tile_px] weights that sum to 1 at each pixel.
    """
    raw_weights = [weigh_tile(tile_px, seams.blend) for _ in starts]
    for tile in range(len(starts) - 1):
        shared_px = starts[tile] + tile_px - starts[tile + 1]
        before_px, behind_px = seams.margins(shared_px)
        raw_weights[tile][tile_px - before_px :] = 0
        raw_weights[tile + 1][:behind_px] = 0
    total = np.zeros(starts[-1] + tile_px)
    for start, weights in zip(starts, raw_weights, strict=True):
        total[start : start + tile_px] += weights
    # divided by the sum over all tiles, so that they add up to 1 at each pixel
    for start, weights in zip(starts, raw_weights, strict=True):
        weights /= total[start : start + tile_px]
    return raw_weights


def weigh_tile(tile_px: int, blend: Blend) -> Weights:
    """Return the weights of a tile by itself."""
    if blend == "constant":
        return np.ones(tile_px)
    middle_px = (tile_px - 1) / 2
    deviations = (np.arange(tile_px, dtype=np.float64) - middle_px) / (_SIGMA * tile_px)
    return np.exp(-0.5 * deviations**2)


@dataclass(frozen=True, slots=True)
class TileAxis:
    """The tiles along one axis of an image.

    Attributes:
        length_px: Of the image.
        tile_px: Of each tile.
        starts: First pixel of each tile.
        counted: Pixels of each tile that count, within the tile; never behind the end of the image.
        weights: Of the counted pixels of each tile: [n] float32; over all tiles a pixel's weights
            sum to 1. None where all are 1.
    """

    length_px: int
    tile_px: int
    starts: tuple[int, ...]
    counted: tuple[slice, ...]
    weights: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules by which images are cut.

    Args:
        tile_px: Tile size, one number or (height, width).
        overlap_px: Least number of pixels that neighbouring tiles share.
        margin_px: Pixels next to the seam-side borders of a tile that count nothing; at most half
            the overlap. None takes half of the overlap for `constant`, which then takes each pixel
            from one tile, and a quarter for `gaussian`.
        blend: Average of the pixels that several tiles cover, see `weigh_tiles`.
        multiple_px: Tiles begin at multiples of it, and long sides are filled up to a multiple of
            it: the total stride of a net that works at lower resolutions (16 for a UNet of four
            halvings).
        round_px: A side shorter than a tile is filled up to a multiple of it, so that images of
            about one size share batches. None takes an eighth of a tile.

    Raises:
        ConfigError: The sizes do not fit each other.
    """

    tile_px: int | Size
    overlap_px: int
    margin_px: int | None = None
    blend: Blend = "constant"
    multiple_px: int = 1
    round_px: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_choice("blend", self.blend, get_args(Blend))
        if self.multiple_px < 1 or (self.round_px is not None and self.round_px < 1):
            raise ConfigError(
                f"multiple_px={self.multiple_px}, round_px={self.round_px}: need at least 1"
            )
        if any(side % self.multiple_px for side in self.sides_px):
            raise ConfigError(
                f"tile_px={self.tile_px} is not a multiple of multiple_px={self.multiple_px}"
            )
        most_px = min(self.sides_px) - self.multiple_px  # so that each tile begins behind the last
        if not 0 <= self.overlap_px <= most_px:
            raise ConfigError(
                f"overlap_px={self.overlap_px} must be from 0 to {most_px} for "
                f"tile_px={self.tile_px}, multiple_px={self.multiple_px}"
            )
        if self.margin_px is not None and not 0 <= self.margin_px <= self.overlap_px // 2:
            raise ConfigError(
                f"margin_px={self.margin_px} must be from 0 to {self.overlap_px // 2}, half of "
                f"overlap_px={self.overlap_px}: some pixels would come from no tile"
            )

    @property
    def sides_px(self) -> Size:
        """Tile (height, width)."""
        return pair_px("tile_px", self.tile_px)

    def plan(self, height_px: int, width_px: int) -> tuple[TileAxis, TileAxis]:
        """Return the tiles of an image along its height, and along its width."""
        tile_height_px, tile_width_px = self.sides_px
        rows = _plan_axis(self, height_px, tile_height_px)
        columns = _plan_axis(self, width_px, tile_width_px)
        return rows, columns


# Most datasets have few sizes; an axis of a hundred tiles of 512 px takes 200 kB.
@lru_cache(maxsize=64)
def _plan_axis(tiling: Tiling, length_px: int, tile_px: int) -> TileAxis:
    multiple = tiling.multiple_px
    padded = _round_up(length_px, multiple)
    if padded <= tile_px:
        step = tiling.round_px or _round_up(max(tile_px // 8, 1), multiple)
        tile_px = min(tile_px, _round_up(length_px, step))
        return TileAxis(length_px, tile_px, (0,), (slice(0, length_px),), (None,))
    stride = (tile_px - tiling.overlap_px) // multiple * multiple
    count = int(count_positions(padded, tile_px, stride, "cover"))
    # Spread evenly, so that no two tiles share more than others for nothing.
    slack = (padded - tile_px) // multiple
    starts = tuple(tile * slack // (count - 1) * multiple for tile in range(count))
    tile_weights = weigh_tiles(starts, tile_px, Seams(tiling.blend, tiling.margin_px))
    counted: list[slice] = []
    counted_weights: list[Tensor | None] = []
    for start, weights in zip(starts, tile_weights, strict=True):
        part = _find_counted(weights, length_px - start)
        part_weights = weights[part].astype(np.float32)
        counted.append(part)
        # without weights a tile is copied and not multiplied
        has_weights = not (part_weights == 1).all()
        counted_weights.append(torch.from_numpy(part_weights) if has_weights else None)
    return TileAxis(length_px, tile_px, starts, tuple(counted), tuple(counted_weights))


def _find_counted(weights: Weights, image_px: int) -> slice:
    """Return the pixels of a tile with a weight, of those within the image."""
    counted = np.flatnonzero(weights[:image_px])
    return slice(int(counted[0]), int(counted[-1]) + 1) if counted.size else slice(0, 0)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def measure_reach_px(
    call: Callable[[Tensor], Tensor],
    channels: int,
    tile_px: Size,
    *,
    multiple_px: int = 1,
) -> int | None:
    """Return the pixels to each side on which a net's value of a pixel depends.

    That is half its receptive field.

    One pixel in the middle of a tile is not a number, and neither are the values that depend on it:
    they need no threshold, and one call at each end of a period of the net's stride. A net that
    replaces such values (by ``where`` or ``nan_to_num``) seems to see less than it does.

    Args:
        call: From [1, C, h, w] float32 to [1, K, h, w].
        channels: C.
        tile_px: (h, w).
        multiple_px: Total stride of the net.

    Returns:
        The larger of both axes; None where it sees as far as the tile's border, at least.
    """
    middle_y, middle_x = (side // 2 // multiple_px * multiple_px for side in tile_px)
    farthest = 0
    for shift in {0, multiple_px - 1}:  # both ends of a period of the stride
        reach = _measure_at(call, channels, tile_px, (middle_y + shift, middle_x + shift))
        if reach is None:
            return None
        farthest = max(farthest, reach)
    return farthest


def _measure_at(
    call: Callable[[Tensor], Tensor],
    channels: int,
    tile_px: Size,
    pixel: tuple[int, int],
) -> int | None:
    """Return the reach from one pixel (y, x); None where it ends at the border of the tile."""
    tile = torch.zeros(1, channels, *tile_px)
    tile[:, :, pixel[0], pixel[1]] = torch.nan
    is_touched = call(tile).isnan().any(1)[0]
    farthest = 0
    for axis, middle in enumerate(pixel):
        touched = is_touched.any(1 - axis).nonzero().flatten().tolist()
        if not touched:
            continue
        # at the border the reach may be cut off
        if touched[0] == 0 or touched[-1] == tile_px[axis] - 1:
            return None
        farthest = max(farthest, middle - touched[0], touched[-1] - middle)
    return farthest
