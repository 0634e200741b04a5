"""Tiles of large images, and their weights at each pixel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_inspect.bounds import MOST_VIEWS, Distance, Side, Sides

Floats = NDArray[np.float32]
Weights = NDArray[np.float64]
Blend = Literal["constant", "gaussian"]

_SIGMA = 0.125
"""Standard deviation of the Gaussian in tiles; MONAI's default, after nnU-Net."""


class Rows(Protocol):
    """An image that is read by rows."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return [C, H, W]."""

    def read(self, top: int, bottom: int) -> NDArray[Any]:
        """Return rows [C, bottom - top, W]."""


def read_middle(image: Rows, side_px: int) -> NDArray[Any]:
    """Read the middle of an image, [C, h, w] of up to so many pixels a side."""
    height, width = image.shape[1:]
    top, left = max(0, height - side_px) // 2, max(0, width - side_px) // 2
    return image.read(top, min(top + side_px, height))[:, :, left : left + side_px]


@dataclass(frozen=True, slots=True)
class Seams:
    """Rule by which neighbors share the pixels that both cover.

    Attributes:
        overlap_px: Least number of these pixels.
        margin_px: Pixels next to a seam-side border that count nothing. None: half of the pixels
            that both cover for `constant`, a quarter for `gaussian`.
        blend: `constant` counts all that is not in a margin alike, `gaussian` less with the
            distance from the middle.
        multiple_px: Tiles begin at multiples of it.
    """

    overlap_px: int
    margin_px: int | None
    blend: Blend
    multiple_px: int

    def margins(self, shared_px: int) -> tuple[int, int]:
        """Return the margins of the tiles before and behind a seam that share so many pixels."""
        if self.margin_px is not None:
            return self.margin_px, self.margin_px
        if self.blend == "constant":
            return shared_px // 2, shared_px - shared_px // 2  # each pixel from one tile
        return shared_px // 4, shared_px // 4


@dataclass(frozen=True, slots=True)
class TileAxis:
    """The tiles along one axis of an image.

    Attributes:
        length_px: Of the image.
        tile_px: Of each tile.
        starts: First pixel of each tile.
        counted: Pixels of each tile that count, within the tile; never behind the end of the image.
        weights: Of the counted pixels of each tile: [n]; over all tiles a pixel's weights sum to 1.
            None where all are 1.
    """

    length_px: int
    tile_px: int
    starts: tuple[int, ...]
    counted: tuple[slice, ...]
    weights: tuple[Floats | None, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules by which a file says that images are cut, see `lit_data.predict.tiles.Tiling`."""

    tile_px: Sides
    overlap_px: Distance
    margin_px: Distance | None
    blend: Blend
    multiple_px: Side
    round_px: Side

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        if any(side % self.multiple_px for side in self.tile_px):
            raise ValueError(f"tile_px is not a multiple of multiple_px={self.multiple_px}")
        least_px = min(self.tile_px)
        stride_px = (least_px - self.overlap_px) // self.multiple_px * self.multiple_px
        if stride_px < least_px / MOST_VIEWS:  # of 0 tiles would never end
            raise ValueError(
                f"overlap_px={self.overlap_px} is too large for tiles of {least_px} px"
            )
        if self.margin_px is not None and self.margin_px > self.overlap_px // 2:
            raise ValueError(f"margin_px={self.margin_px} is above half of overlap_px")

    def plan(self, height_px: int, width_px: int) -> tuple[TileAxis, TileAxis]:
        """Return the tiles along the height of an image, and along its width."""
        seams = Seams(self.overlap_px, self.margin_px, self.blend, self.multiple_px)
        rows = plan_axis(height_px, self.tile_px[0], self.round_px, seams)
        return rows, plan_axis(width_px, self.tile_px[1], self.round_px, seams)


# Most datasets have few sizes; an axis of a hundred tiles of 512 px takes 200 kB.
@lru_cache(maxsize=64)
def plan_axis(length_px: int, tile_px: int, round_px: int, seams: Seams) -> TileAxis:
    """Return the tiles along one axis.

    Args:
        length_px: Of the image.
        tile_px: Of a tile, a multiple of that of the seams.
        round_px: A length below that of a tile is filled up to a multiple of it.
        seams: The rule for neighbors.
    """
    multiple = seams.multiple_px
    padded = round_up(length_px, multiple)
    if padded <= tile_px:
        tile_px = min(tile_px, round_up(length_px, round_px))
        return TileAxis(length_px, tile_px, (0,), (slice(0, length_px),), (None,))
    stride = (tile_px - seams.overlap_px) // multiple * multiple
    count = -(-(padded - tile_px) // stride) + 1
    # Spread evenly, so that no two tiles share more than others for nothing.
    slack = (padded - tile_px) // multiple
    starts = tuple(tile * slack // (count - 1) * multiple for tile in range(count))
    counted: list[slice] = []
    counted_weights: list[Floats | None] = []
    for start, weights in zip(starts, weigh_tiles(starts, tile_px, seams), strict=True):
        part = _find_counted(weights, length_px - start)
        part_weights = weights[part].astype(np.float32)
        counted.append(part)
        # Without weights a tile is copied and not multiplied.
        counted_weights.append(None if (part_weights == 1).all() else part_weights)
    return TileAxis(length_px, tile_px, starts, tuple(counted), tuple(counted_weights))


def _find_counted(weights: Weights, image_px: int) -> slice:
    """Return the pixels of a tile with a weight, of those within the image."""
    counted = np.flatnonzero(weights[:image_px])
    return slice(int(counted[0]), int(counted[-1]) + 1) if counted.size else slice(0, 0)


def weigh_tiles(starts: Sequence[int], tile_px: int, seams: Seams) -> list[Weights]:
    """Return weights along one axis; a tile's weight at a pixel is the product over both axes.

    Near a seam-side border a net sees zeros (or a reflection) where the image goes on, as far as it
    reaches: half its receptive field. Such pixels count nothing as long as they lie within the
    margin, and the neighbor covers them. Borders of the image itself have no margin, as there the
    net sees what it would see in the whole image. So if the margin is at least the reach, every
    pixel that counts is that of the whole image, and so is any average:

    - `constant`, margins by default: where the overlap is at least the receptive field;
    - `gaussian`: there too if ``margin_px`` is the reach, which `lit_data` measures; with margins by
      default where it is at least twice as large;
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
    for start, weights in zip(starts, raw_weights, strict=True):
        weights /= total[start : start + tile_px]
    return raw_weights


def weigh_tile(tile_px: int, blend: Blend) -> Weights:
    """Return the weights of a tile by itself."""
    if blend == "constant":
        return np.ones(tile_px)
    deviations = (np.arange(tile_px) - (tile_px - 1) / 2) / (_SIGMA * tile_px)
    weights: Weights = np.exp(-0.5 * deviations**2)
    return weights


def round_up(value: int, step: int) -> int:
    """Return the next multiple of a step, from a value on."""
    return -(-value // step) * step


def cut(image: Rows, rows: TileAxis, columns: TileAxis) -> Iterator[NDArray[Any]]:
    """Yield tiles row by row, [C, h, w] each; those that reach past the end repeat the edge."""
    for top in rows.starts:
        slab = image.read(top, min(top + rows.tile_px, rows.length_px))
        below_px = rows.tile_px - slab.shape[1]
        for left in columns.starts:
            tile = slab[:, :, left : left + columns.tile_px]
            right_px = columns.tile_px - tile.shape[2]
            if below_px or right_px:
                tile = np.pad(tile, ((0, 0), (0, below_px), (0, right_px)), mode="edge")
            yield tile


def stitch(
    values: Iterator[Floats], rows: TileAxis, columns: TileAxis
) -> Iterator[tuple[int, Floats]]:
    """Yield (first row, finished rows [K, n, W]) of the values of tiles that come row by row.

    Memory holds one row of tiles.
    """
    height = min(rows.tile_px, rows.length_px)
    slab: Floats | None = None
    for row, top in enumerate(rows.starts):
        for column in range(len(columns.starts)):
            tile = next(values)
            if slab is None:
                slab = np.zeros((len(tile), height, columns.length_px), np.float32)
            _blend(slab, tile, (rows, row), (columns, column))
        assert slab is not None
        if row + 1 == len(rows.starts):
            yield top, slab[:, : rows.length_px - top]
            return
        finished = rows.starts[row + 1] - top
        yield top, slab[:, :finished].copy()
        # No further tile covers the rows above the next row of tiles.
        shared = slab.shape[1] - finished
        slab[:, :shared] = slab[:, finished:].copy()
        slab[:, shared:] = 0


def _blend(
    slab: Floats, tile: Floats, row: tuple[TileAxis, int], column: tuple[TileAxis, int]
) -> None:
    down, across = row[0].counted[row[1]], column[0].counted[column[1]]
    left = column[0].starts[column[1]]
    part = slab[:, down, left + across.start : left + across.stop]
    vertical, horizontal = row[0].weights[row[1]], column[0].weights[column[1]]
    values = tile[:, down, across]
    if vertical is None and horizontal is None:
        part[...] = values  # no other tile counts here
        return
    if vertical is not None:
        values = values * vertical[:, None]
    part += values if horizontal is None else values * horizontal
