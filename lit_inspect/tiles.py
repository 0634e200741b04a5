"""Tiles of large images and their weights, those of `lit_data.inference.tiling`, in NumPy alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_inspect.bounds import MOST_VIEWS, Distance, Side, Sides

Floats = NDArray[np.float32]

_SIGMA = 0.125  # of the Gaussian, in tiles


class Rows(Protocol):
    """An image that is read by rows.

    Attributes:
        shape: [C, H, W].
    """

    shape: tuple[int, int, int]

    def read(self, top: int, bottom: int) -> NDArray[Any]:
        """Return rows [C, bottom - top, W]."""


@dataclass(frozen=True, slots=True)
class TileAxis:
    """Tiles along one axis of an image.

    Attributes:
        length_px: Of the image.
        tile_px: Of each tile.
        starts: First pixel of each.
        counted: Pixels of each that count, within the tile.
        weights: Of the counted pixels, [n]; None where all are 1.
    """

    length_px: int
    tile_px: int
    starts: tuple[int, ...]
    counted: tuple[slice, ...]
    weights: tuple[Floats | None, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules by which images are cut, see `lit_data.inference.tiling.Tiling`."""

    tile_px: Sides
    overlap_px: Distance
    margin_px: Distance | None
    blend: Literal["constant", "gaussian"]
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
        rows = plan_axis(self, height_px, self.tile_px[0])
        return rows, plan_axis(self, width_px, self.tile_px[1])


@lru_cache(maxsize=64)
def plan_axis(tiling: Tiling, length_px: int, tile_px: int) -> TileAxis:
    """Return the tiles along one axis."""
    multiple = tiling.multiple_px
    padded = _round_up(length_px, multiple)
    if padded <= tile_px:
        tile_px = min(tile_px, _round_up(length_px, tiling.round_px))
        return TileAxis(length_px, tile_px, (0,), (slice(0, length_px),), (None,))
    stride = (tile_px - tiling.overlap_px) // multiple * multiple
    count = -(-(padded - tile_px) // stride) + 1
    slack = (padded - tile_px) // multiple
    starts = tuple(tile * slack // (count - 1) * multiple for tile in range(count))
    counted: list[slice] = []
    counted_weights: list[Floats | None] = []
    for start, weights in zip(starts, _weigh(tiling, starts, tile_px), strict=True):
        pixels = np.flatnonzero(weights[: length_px - start])
        part = slice(int(pixels[0]), int(pixels[-1]) + 1) if pixels.size else slice(0, 0)
        part_weights = weights[part].astype(np.float32)
        counted.append(part)
        counted_weights.append(None if (part_weights == 1).all() else part_weights)
    return TileAxis(length_px, tile_px, starts, tuple(counted), tuple(counted_weights))


def _weigh(tiling: Tiling, starts: tuple[int, ...], tile_px: int) -> Iterator[NDArray[np.float64]]:
    """Yield the weights of each tile, which sum to 1 at each pixel."""
    one = np.ones(tile_px)
    if tiling.blend == "gaussian":
        deviations = (np.arange(tile_px) - (tile_px - 1) / 2) / (_SIGMA * tile_px)
        one = np.exp(-0.5 * deviations**2)
    raw_weights = [one.copy() for _ in starts]
    for tile in range(len(starts) - 1):
        shared_px = starts[tile] + tile_px - starts[tile + 1]
        before_px, behind_px = _choose_margins(tiling, shared_px)
        raw_weights[tile][tile_px - before_px :] = 0
        raw_weights[tile + 1][:behind_px] = 0
    total = np.zeros(starts[-1] + tile_px)
    for start, weights in zip(starts, raw_weights, strict=True):
        total[start : start + tile_px] += weights
    for start, weights in zip(starts, raw_weights, strict=True):
        yield weights / total[start : start + tile_px]


def _choose_margins(tiling: Tiling, shared_px: int) -> tuple[int, int]:
    if tiling.margin_px is not None:
        return tiling.margin_px, tiling.margin_px
    if tiling.blend == "constant":
        return shared_px // 2, shared_px - shared_px // 2
    return shared_px // 4, shared_px // 4


def _round_up(value: int, step: int) -> int:
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
