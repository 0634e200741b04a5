"""Tiles of many images, collected into batches of one kind."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.inference.slabs import OpenTarget, SlabStitcher
from lit_data.inference.sources import Source
from lit_data.inference.tiling import Tiling


class Kind(NamedTuple):
    """What the tiles of a batch have in common."""

    shape: tuple[int, int, int]
    dtype: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


class Job:
    """One image under way.

    Args:
        source: The image.
        tiling: How it is cut.
        open_target: Where its values go.
    """

    def __init__(self, source: Source, tiling: Tiling, open_target: OpenTarget) -> None:
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
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    def make(cls, kind: Kind, size: int) -> "TileBatch":
        """A batch with room for so many tiles."""
        return cls(kind, np.empty((size, *kind.shape), kind.dtype))

    @property
    def full(self) -> bool:
        """Whether there is no room left."""
        return len(self.jobs) == len(self.tiles)

    def add(self, job: Job, tile: NDArray[Any]) -> None:
        """Copy a tile in."""
        self.tiles[len(self.jobs)] = tile
        self.jobs.append(job)
