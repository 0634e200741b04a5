"""The points of a batch of volumes: whose they are, where they lie, and what lies at a place."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from lit_data.types import COUNT_SUFFIX, Batch

_AXIS_BITS: Final = (
    14  # volumes of up to 16384 voxels along an axis; with them a key leaves 21 bits for rows
)


class Points(NamedTuple):
    """Occupied voxels of B volumes, in the order of volume, z, y, x, however they came.

    Attributes:
        keys: [N] int64, ascending: volume and place in one number, see `find_key`.
        rows: [N] int64: the volume of each.
        places: [N, 3] int64 (z, y, x).
        feats: [N, C] float32: column 0 is the value in 0..1.
        counts: [B] int64: points of each volume.
        totals: [B] int64: occupied voxels of the whole volume, of which these points may be a
            uniform subset.
        shapes: [B, 3] int64 (z, y, x) voxels.
    """

    keys: Tensor
    rows: Tensor
    places: Tensor
    feats: Tensor
    counts: Tensor
    totals: Tensor
    shapes: Tensor

    def starts(self) -> Tensor:
        """[B]: number of the first point of each volume."""
        return self.counts.cumsum(0) - self.counts

    def kept_share(self) -> Tensor:
        """[B] float32 in (0, 1]: share of the occupied voxels that are points; 1 for empty volumes."""
        return (self.counts.clamp(min=1) / self.totals.clamp(min=1)).clamp(max=1.0)

    def look_up(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return True where a place is a point.

        Args:
            rows: [...] int64.
            places: [..., 3] int64.

        Returns:
            [...] bool.
        """
        asked = find_key(rows, places)
        # What is beyond the last key is no point.
        keys = torch.cat((self.keys, self.keys.new_full((1,), -1)))
        return keys[torch.searchsorted(self.keys, asked)] == asked


def find_key(rows: Tensor, places: Tensor) -> Tensor:
    """[...] int64: a number for each (row, z, y, x), ascending in this order."""
    z, y, x = places.long().unbind(-1)
    return (((rows << _AXIS_BITS | z) << _AXIS_BITS) | y) << _AXIS_BITS | x


def find_cells(places: Tensor, shapes: Tensor, grid: int) -> Tensor:
    """Find the cell that the centre of a voxel lies in.

    The volume is cut into `grid` cells along each axis.

    Args:
        places: [..., 3] int64 (z, y, x).
        shapes: [..., 3] int64, of the volume of each.
        grid: Cells along an axis.

    Returns:
        [..., 3] int64.
    """
    return (2 * places + 1) * grid // (2 * shapes)


def read_points(batch: Batch) -> Points:
    """The points of a batch or of a piece of one.

    Args:
        batch: ``coords`` [N, 4] (row, z, y, x), ``feats`` [N, C], ``shape`` [B, 3]. Where there is
            ``coords_count`` [B], it says whose the points are, in order, and the rows are not read:
            a piece of a batch still has the row numbers of the whole. Where there is
            ``occupied_total`` [B], it says how many voxels are occupied in the whole volume;
            otherwise the points are all of them.
    """
    shapes, coords = batch["shape"].long(), batch["coords"].long()
    volume_numbers = torch.arange(len(shapes), device=coords.device)
    counts = batch.get(f"coords{COUNT_SUFFIX}")
    if counts is None:
        rows = coords[:, 0]
        counts = torch.zeros_like(volume_numbers).index_add(0, rows, torch.ones_like(rows))
    else:
        rows = volume_numbers.repeat_interleave(counts, output_size=len(coords))
    keys, order = find_key(rows, coords[:, 1:]).sort()
    totals = batch.get("occupied_total", counts)
    return Points(
        keys, rows[order], coords[order, 1:], batch["feats"][order].float(), counts, totals, shapes
    )
