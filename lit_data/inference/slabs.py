"""Tiles become an image again, one row of tiles at a time."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lit_data.inference.tiling import Axis


class Target(Protocol):
    """Takes finished rows of an image."""

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows from `top_px` on: [K, n, W] float32."""

    def close(self) -> None:
        """All rows were written."""


OpenTarget = Callable[[tuple[int, int, int]], Target]
"""Called with the shape [K, H, W] as soon as the number of channels is known."""


class MemoryTarget:
    """Keeps an image in memory.

    Args:
        shape: [K, H, W].

    Attributes:
        values: [K, H, W] float32.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.values = torch.empty(shape)

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows."""
        self.values[:, top_px : top_px + values.shape[1]] = values

    def close(self) -> None:
        """Nothing is left to do."""


class SlabStitcher:
    """Blends the tiles of one image and hands out rows as soon as no further tile covers them.

    Memory holds one row of tiles.

    Args:
        rows: Tiles along the height.
        columns: Tiles along the width.
        open_target: Where the image goes.

    Attributes:
        target: Where the image goes, once its first tile came.
    """

    def __init__(self, rows: Axis, columns: Axis, open_target: OpenTarget) -> None:
        self.target: Target | None = None
        self._rows, self._columns, self._open = rows, columns, open_target
        self._row = self._column = 0
        self._slab = torch.empty(0)

    @property
    def complete(self) -> bool:
        """Whether all tiles came."""
        return self._row == len(self._rows.starts)

    def add(self, values: Tensor) -> None:
        """Take the next tile, row by row: [K, h, w] float32."""
        if self.target is None:
            height = min(self._rows.tile_px, self._rows.length_px)
            self._slab = torch.zeros(len(values), height, self._columns.length_px)
            self.target = self._open((len(values), self._rows.length_px, self._columns.length_px))
        self._blend(values)
        self._column += 1
        if self._column == len(self._columns.starts):
            self._finish_row(self.target)

    def _blend(self, values: Tensor) -> None:
        down, across = self._rows.kept[self._row], self._columns.kept[self._column]
        vertical, horizontal = self._rows.weights[self._row], self._columns.weights[self._column]
        left = self._columns.starts[self._column]
        part = self._slab[:, down, left + across.start : left + across.stop]
        values = values[:, down, across]
        if vertical is not None:
            values = values * vertical[:, None]
        if horizontal is not None:
            part.addcmul_(values, horizontal)
        elif vertical is not None:
            part.add_(values)
        else:
            part.copy_(values)  # all weights are 1: no other tile has a share

    def _finish_row(self, target: Target) -> None:
        top = self._rows.starts[self._row]
        self._row, self._column = self._row + 1, 0
        if self.complete:
            target.write(top, self._slab[:, : self._rows.length_px - top])
            self._slab = torch.empty(0)
            target.close()
            return
        done = self._rows.starts[self._row] - top
        target.write(top, self._slab[:, :done])
        left = self._slab.shape[1] - done
        self._slab[:, :left] = self._slab[:, done:].clone()  # both may overlap
        self._slab[:, left:] = 0
