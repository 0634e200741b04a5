"""Tiles of many images, collected into batches of one kind."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_data.inference.sources import OpenedImage
from lit_data.inference.tiling import TileAxis, Tiling


@dataclass(frozen=True, slots=True)
class Progress:
    """Work that was done so far.

    Attributes:
        images: Images that are complete.
        tiles: Tiles that went through the net.
        seconds: Since the start.
    """

    images: int
    tiles: int
    seconds: float

    @property
    def images_per_s(self) -> float:
        """Images per second since the start."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def tiles_per_s(self) -> float:
        """Tiles per second since the start."""
        return self.tiles / self.seconds if self.seconds else 0.0


OnProgress = Callable[[Progress], None]


class Meter:
    """Counts, and calls a listener after each batch and each image.

    Args:
        listener: Called with the progress; none counts only.
        clock: Seconds, for tests.
    """

    def __init__(
        self, listener: OnProgress | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._images = 0
        self._tiles = 0
        self._start_s = clock()

    def add_tiles(self, count: int) -> None:
        """Count tiles that went through the net."""
        self._tiles += count
        self._report()

    def add_image(self) -> None:
        """Count an image that is complete."""
        self._images += 1
        self._report()

    def _report(self) -> None:
        if self._listener is not None:
            self._listener(Progress(self._images, self._tiles, self._clock() - self._start_s))


class Target(Protocol):
    """Takes finished rows of an image."""

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows from `top_px` on: [K, n, W] float32."""

    def close(self) -> None:
        """End it, after all rows were written."""


OpenTarget = Callable[[tuple[int, int, int]], Target]
"""Called with the shape [K, H, W] as soon as the number of channels is known."""


class MemoryTarget:
    """An image in memory.

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
        """Do nothing: the rows are there."""


class SlabStitcher:
    """Blends the tiles of one image and writes rows as soon as no further tile covers them.

    Memory holds one row of tiles.

    Args:
        rows: Tiles along the height.
        columns: Tiles along the width.
        open_target: Opens the target of the image.

    Attributes:
        target: Target of the image, once its first tile came.
    """

    def __init__(self, rows: TileAxis, columns: TileAxis, open_target: OpenTarget) -> None:
        self.target: Target | None = None
        self._rows = rows
        self._columns = columns
        self._open_target = open_target
        self._row = 0  # of the next tile
        self._column = 0
        self._slab = torch.empty(0)  # rows that further tiles cover, [K, h, W]

    @property
    def complete(self) -> bool:
        """True if all tiles came."""
        return self._row == len(self._rows.starts)

    def add(self, values: Tensor) -> None:
        """Take the next tile, row by row: [K, h, w] float32."""
        if self.target is None:
            height = min(self._rows.tile_px, self._rows.length_px)
            self._slab = torch.zeros(len(values), height, self._columns.length_px)
            shape = (len(values), self._rows.length_px, self._columns.length_px)
            self.target = self._open_target(shape)  # only now the channels are known
        self._blend(values)
        self._column += 1
        if self._column == len(self._columns.starts):
            self._finish_row(self.target)

    def _blend(self, values: Tensor) -> None:
        down = self._rows.counted[self._row]
        across = self._columns.counted[self._column]
        vertical = self._rows.weights[self._row]
        horizontal = self._columns.weights[self._column]
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
            part.copy_(values)  # all weights are 1: no other tile counts here

    def _finish_row(self, target: Target) -> None:
        top = self._rows.starts[self._row]
        self._row += 1
        self._column = 0
        if self.complete:
            target.write(top, self._slab[:, : self._rows.length_px - top])
            self._slab = torch.empty(0)
            target.close()
            return
        finished = self._rows.starts[self._row] - top
        # rows above the next row of tiles get no more values
        target.write(top, self._slab[:, :finished])
        shared = self._slab.shape[1] - finished
        self._slab[:, :shared] = self._slab[:, finished:].clone()  # both may overlap
        self._slab[:, shared:] = 0


class Kind(NamedTuple):
    """Shape [C, h, w] and dtype that the tiles of a batch have in common."""

    shape: tuple[int, int, int]
    dtype: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


class ImageJob:
    """One image under way.

    Args:
        source: The image.
        tiling: How it is cut.
        open_target: Opens the target of its values.
    """

    def __init__(self, source: OpenedImage, tiling: Tiling, open_target: OpenTarget) -> None:
        rows, columns = tiling.plan(*source.size_px)
        self.number = source.number
        self.kind = Kind((source.pixels.shape[0], rows.tile_px, columns.tile_px), source.dtype.name)
        self.stitcher = SlabStitcher(rows, columns, open_target)
        self.tiles = source.cut(rows, columns)


@dataclass(slots=True)
class TileBatch:
    """Tiles on their way to the device.

    Attributes:
        kind: Of all of them.
        tiles: [n, C, h, w] as stored, of which the first are filled.
        jobs: For each tile that is there the image it belongs to.
    """

    kind: Kind
    tiles: NDArray[Any]
    jobs: list[ImageJob] = field(default_factory=list)

    @classmethod
    def make(cls, kind: Kind, size: int) -> "TileBatch":
        """Return a batch with room for so many tiles."""
        return cls(kind, np.empty((size, *kind.shape), kind.dtype))

    @property
    def full(self) -> bool:
        """True if there is no room left."""
        return len(self.jobs) == len(self.tiles)

    def add(self, job: ImageJob, tile: NDArray[Any]) -> None:
        """Copy a tile in."""
        self.tiles[len(self.jobs)] = tile
        self.jobs.append(job)
