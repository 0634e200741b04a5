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
"""Standard deviation of the Gaussian in units of a tile; MONAI's default, from nnU-Net."""


class Rows(Protocol):
    """An image that is read by rows."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return [C, H, W]."""

    def read(self, top: int, bottom: int) -> NDArray[Any]:
        """Return rows [C, bottom - top, W]."""


def read_middle(image: Rows, side_px: int) -> NDArray[Any]:
    """Read the center of an image, [C, h, w] with limited sides."""
    height, width = image.shape[1:]
    top, left = max(0, height - side_px) // 2, max(0, width - side_px) // 2
    return image.read(top, min(top + side_px, height))[:, :, left : left + side_px]


@dataclass(frozen=True, slots=True)
class Seams:
    """Rule for neighboring tiles that share pixels.

    Attributes:
        overlap_px: Least number of shared pixels along an axis.
        margin_px: Pixels next to a seam-side border that have no weight; by default half of the
            shared pixels for `constant`, a quarter for `gaussian`.
        blend: With `constant` all pixels outside of margins have equal weights; with `gaussian`
            weights decrease with the distance from the center.
        multiple_px: Tiles start at multiples of it.
    """

    overlap_px: int
    margin_px: int | None
    blend: Blend
    multiple_px: int

    def margins(self, shared_px: int) -> tuple[int, int]:
        """Return the margins of the tiles before and after a seam for a number of shared pixels."""
        if self.margin_px is not None:
            return self.margin_px, self.margin_px
        if self.blend == "constant":
            return shared_px // 2, shared_px - shared_px // 2  # each pixel is from one tile
        return shared_px // 4, shared_px // 4


@dataclass(frozen=True, slots=True)
class TileAxis:
    """The tiles along one axis of an image.

    Attributes:
        length_px: Length of the image.
        tile_px: Length of each tile.
        starts: First pixel of each tile.
        counted: Pixels of each tile that have weights, within the tile and the image.
        weights: Weights [n] of these pixels for each tile; a pixel's weights sum to 1 over all
            tiles. None if all weights are 1.
    """

    length_px: int
    tile_px: int
    starts: tuple[int, ...]
    counted: tuple[slice, ...]
    weights: tuple[Floats | None, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules of a file for cutting images into tiles, see `lit_data.predict.tiles.Tiling`."""

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
        if stride_px < least_px / MOST_VIEWS:  # 0 would give endless tiles
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


# Most datasets have few sizes; an axis with a hundred tiles of 512 px takes 200 kB.
@lru_cache(maxsize=64)
def plan_axis(length_px: int, tile_px: int, round_px: int, seams: Seams) -> TileAxis:
    """Return the tiles along one axis.

    Args:
        length_px: Length of the image.
        tile_px: Length of a tile, a multiple of the seams' `multiple_px`.
        round_px: A length shorter than a tile is rounded up to a multiple of it.
        seams: Rule for neighboring tiles.
    """
    multiple = seams.multiple_px
    padded = round_up(length_px, multiple)
    if padded <= tile_px:
        tile_px = min(tile_px, round_up(length_px, round_px))
        return TileAxis(length_px, tile_px, (0,), (slice(0, length_px),), (None,))
    stride = (tile_px - seams.overlap_px) // multiple * multiple
    count = -(-(padded - tile_px) // stride) + 1
    # Spread evenly, so that no two tiles share more pixels than necessary.
    slack = (padded - tile_px) // multiple
    starts = tuple(tile * slack // (count - 1) * multiple for tile in range(count))
    counted: list[slice] = []
    counted_weights: list[Floats | None] = []
    for start, weights in zip(starts, weigh_tiles(starts, tile_px, seams), strict=True):
        part = _find_counted(weights, length_px - start)
        part_weights = weights[part].astype(np.float32)
        counted.append(part)
        # Without weights a tile is copied instead of multiplied.
        counted_weights.append(None if (part_weights == 1).all() else part_weights)
    return TileAxis(length_px, tile_px, starts, tuple(counted), tuple(counted_weights))


def _find_counted(weights: Weights, image_px: int) -> slice:
    """Return the pixels of a tile that have weights and are within the image."""
    counted = np.flatnonzero(weights[:image_px])
    return slice(int(counted[0]), int(counted[-1]) + 1) if counted.size else slice(0, 0)


def weigh_tiles(starts: Sequence[int], tile_px: int, seams: Seams) -> list[Weights]:
    """Return weights along one axis; a tile's weight at a pixel is the product over both axes.

    At a seam-side border a net sees padding instead of the rest of the image, which affects pixels
    up to its reach, half the receptive field. Within the margin these pixels have no weight, and the
    neighboring tile covers them. Borders of the image itself have no margin, because the net sees the
    same padding there as in the whole image. So if the margin is at least the reach, all pixels with
    weights, and their averages, equal those of the whole image:

    - `constant` with default margins: if the overlap is at least the receptive field;
    - `gaussian`: the same if ``margin_px`` is the reach, which `lit_data` measures; with default
      margins if the overlap is at least twice the receptive field;
    - nets whose output depends on the whole tile (attention, norms that average over it): never, but
      `gaussian` hides the seams.

    Args:
        starts: First pixel of each tile, ascending.
        tile_px: Length of each tile.
        seams: Rule for neighboring tiles.

    Returns:
        Weights [tile_px] of each tile, which sum to 1 at each pixel.
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
    """Return the weights of a tile before they are normalized."""
    if blend == "constant":
        return np.ones(tile_px)
    deviations = (np.arange(tile_px) - (tile_px - 1) / 2) / (_SIGMA * tile_px)
    weights: Weights = np.exp(-0.5 * deviations**2)
    return weights


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of a step that is at least a value."""
    return -(-value // step) * step


def cut(image: Rows, rows: TileAxis, columns: TileAxis) -> Iterator[NDArray[Any]]:
    """Yield the tiles [C, h, w] row by row; beyond the image they repeat its edge."""
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
    """Yield (first row, finished rows [K, n, W]) from values of tiles in the order of `cut`.

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
        # No later tile covers the rows above the next row of tiles.
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
        part[...] = values  # no other tile has a weight here
        return
    if vertical is not None:
        values = values * vertical[:, None]
    part += values if horizontal is None else values * horizontal
