"""Tiles of an image by the options of a user, and the reach of a net."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.types import Size
from lit_inspect.tiles import Blend, Seams, TileAxis, plan_axis, round_up


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules by which images are cut.

    Args:
        tile_px: Tile size, one number or (height, width).
        overlap_px: Least number of pixels that neighbouring tiles share.
        margin_px: Pixels next to the seam-side borders of a tile that count nothing; at most half
            the overlap. None takes half of the overlap for `constant`, which then takes each pixel
            from one tile, and a quarter for `gaussian`.
        blend: Average of the pixels that several tiles cover, see `lit_inspect.tiles.weigh_tiles`.
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
        rows = self._plan_axis(height_px, tile_height_px)
        return rows, self._plan_axis(width_px, tile_width_px)

    def _plan_axis(self, length_px: int, tile_px: int) -> TileAxis:
        step_px = self.round_px or round_up(max(tile_px // 8, 1), self.multiple_px)
        seams = Seams(self.overlap_px, self.margin_px, self.blend, self.multiple_px)
        return plan_axis(length_px, tile_px, step_px, seams)


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
