"""Points of a batch of volumes, and queries of places among them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_data.core.devices import widest_float
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform_torch
from lit_data.core.types import COUNT_SUFFIX, Batch

# Volumes of up to 16384 voxels along an axis; with them a key leaves 21 bits for rows.
_AXIS_BITS = 14


class Points(NamedTuple):
    """Occupied voxels of B volumes, sorted by volume, z, y, x.

    Attributes:
        keys: [N] int64, ascending: volume and place in one number, see `find_key`.
        rows: [N] int64: the volume of each point.
        places: [N, 3] int64 (z, y, x).
        feats: [N, C] float32: column 0 is the value in 0..1.
        counts: [B] int64: number of points of each volume.
        totals: [B] int64: number of occupied voxels of the whole volume; these points may be a
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
        """Return the number of the first point of each volume: [B]."""
        return self.counts.cumsum(0) - self.counts

    def kept_share(self) -> Tensor:
        """Return the fraction of occupied voxels that are points: [B] float32 in (0, 1]; 1 for empty volumes."""
        return (self.counts.clamp(min=1) / self.totals.clamp(min=1)).clamp(max=1.0)

    def look_up(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return True for places that are points.

        Args:
            rows: [...] int64 volumes.
            places: [..., 3] int64.

        Returns:
            [...] bool.
        """
        asked = find_key(rows, places)
        # A place beyond the last key is not a point.
        keys = torch.cat((self.keys, self.keys.new_full((1,), -1)))
        return keys[torch.searchsorted(self.keys, asked)] == asked


def find_key(rows: Tensor, places: Tensor) -> Tensor:
    """Return a number for each (row, z, y, x), ascending in this order: [...] int64."""
    z, y, x = places.long().unbind(-1)
    return (((rows << _AXIS_BITS | z) << _AXIS_BITS) | y) << _AXIS_BITS | x


def find_cells(places: Tensor, shapes: Tensor, grid: int) -> Tensor:
    """Find the cell that contains the center of a voxel.

    The volume is cut into `grid` cells along each axis.

    Args:
        places: [..., 3] int64 (z, y, x).
        shapes: [..., 3] int64 shape of the volume of each voxel.
        grid: Cells along an axis.

    Returns:
        [..., 3] int64.
    """
    return (2 * places + 1) * grid // (2 * shapes)


def read_points(batch: Batch) -> Points:
    """Return the points of a batch or of a micro-batch.

    Args:
        batch: ``coords`` [N, 4] (row, z, y, x), ``feats`` [N, C], ``shape`` [B, 3]. If the batch
            has ``coords_count`` [B], this gives the volume of each point, in order, and the rows
            are not read, because a micro-batch still has the row numbers of the whole batch. If the
            batch has ``occupied_total`` [B], this is the number of occupied voxels of the whole
            volume; otherwise the points are all of them.
    """
    shapes, coords = batch["shape"].long(), batch["coords"].long()
    volume_numbers = torch.arange(len(shapes), device=coords.device)
    counts = batch.get(f"coords{COUNT_SUFFIX}")
    if counts is None:
        rows = coords[:, 0]
        counts = torch.zeros_like(volume_numbers).index_add(0, rows, torch.ones_like(rows))
    else:
        rows = volume_numbers.repeat_interleave(counts, output_size=len(coords))
    # One order whatever the order of the batch, so that sums are the same to the last bit.
    keys, order = find_key(rows, coords[:, 1:]).sort()
    totals = batch.get("occupied_total", counts)
    return Points(
        keys, rows[order], coords[order, 1:], batch["feats"][order].float(), counts, totals, shapes
    )


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """Numbers of places of each volume in each step.

    Attributes:
        points: Occupied voxels, queried for their value.
        near: Voxels around occupied ones, queried for occupancy. The distance along each axis is up
            to a radius between one voxel and two cells, distributed log-uniformly.
        anywhere: Voxels of the whole volume, queried for occupancy.

    Raises:
        ConfigError: A number is not positive.
    """

    points: int = 1024
    near: int = 2048
    anywhere: int = 1024

    def __post_init__(self) -> None:
        if min(self.points, self.near, self.anywhere) < 1:
            raise ConfigError(
                f"points={self.points}, near={self.near}, anywhere={self.anywhere}: need 1 or more "
                "each"
            )


class Queries(NamedTuple):
    """Q places in each of B volumes: first those for the value, then those for the occupancy.

    Attributes:
        places: [B, Q, 3] int64 (z, y, x).
        values: [B, points] float32: true values of the first places.
        value_weights: [B, points] float32: 0 in a volume without points.
        occupied: [B, near + anywhere] float32: 0, or for a point 1 / (fraction of the occupied
            voxels that are points).
        weights: [B, near + anywhere] float32: 0 for places without information.
    """

    places: Tensor
    values: Tensor
    value_weights: Tensor
    occupied: Tensor
    weights: Tensor


def draw_queries(
    points: Points, counts: QueryCounts, *, grid: int, seed: int, index: Tensor, epoch: int
) -> Queries:
    """Draw places; those of a sample are a pure function of (seed, index, epoch) and its points.

    Places for the occupancy are drawn independently of whether they are occupied, so the
    probabilities that a net learns from them are unbiased. If the points are a uniform subset, a
    place that is not a point may still be occupied. Because a known fraction of the occupied places
    are points, a point counts as 1 / fraction, which compensates for the occupied places that count
    as 0. The expected loss equals that for all voxels.

    Args:
        points: Points of B volumes.
        counts: Numbers of places of each volume.
        grid: Cells of the net along an axis.
        seed: 0 <= seed < 2**64.
        index: [B] int64 numbers of the samples.
        epoch: 0 <= epoch < 2**32.
    """
    # Near places need a point, a radius and three offsets each.
    draws = counts.points + 5 * counts.near + 3 * counts.anywhere
    numbers = uniform_torch(seed, Stream.QUERIES, index, epoch, draws)
    at, choice, radius, offset, anywhere = torch.split(
        numbers,
        [counts.points, counts.near, counts.near, 3 * counts.near, 3 * counts.anywhere],
        dim=1,
    )
    chosen, values = _choose(points, at)
    middle, _ = _choose(points, choice)
    near, near_weights = _move(
        middle, points.shapes[:, None], radius, offset.reshape(len(index), -1, 3), grid
    )
    free = (anywhere.reshape(len(index), -1, 3) * points.shapes[:, None]).long()
    asked = torch.cat((near, free), dim=1)
    rows = torch.arange(len(index), device=index.device)[:, None].expand(asked.shape[:2])
    # A point counts as 1 / fraction, see above.
    occupied = points.look_up(rows, asked) / points.kept_share()[:, None]
    has_points = (points.counts > 0).float()[:, None]
    weights = torch.cat(
        (near_weights * has_points, torch.ones_like(free[..., 0], dtype=torch.float32)), dim=1
    )
    return Queries(
        torch.cat((chosen, asked), dim=1), values, has_points.expand_as(values), occupied, weights
    )


def _choose(points: Points, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return places [B, n, 3] and values [B, n] of points of each volume, for numbers [B, n] in [0, 1)."""
    places = torch.cat((points.places, points.places.new_zeros(1, 3)))  # so that there is one
    values = torch.cat((points.feats[:, 0], points.feats.new_zeros(1)))
    counts = points.counts[:, None]
    number = (
        (numbers.to(widest_float(numbers.device)) * counts).long().minimum(counts - 1).clamp(min=0)
    )
    number += points.starts()[:, None]
    return places[number], values[number]


def _move(
    middle: Tensor, shapes: Tensor, radius: Tensor, offset: Tensor, grid: int
) -> tuple[Tensor, Tensor]:
    """Return places around points, inside the volume, and their weights.

    Places in the line of their point have weight 0: the point itself is certainly occupied, and
    subsets that are spread evenly along the lines of a volume contain its neighbors less often.
    """
    # A radius is 1 voxel times farthest^u with u in [0, 1), which is log-uniform.
    farthest = (2 * shapes.amax(-1) / grid).clamp(min=1.5)
    reach = torch.exp(radius * farthest.log())[..., None]
    moved = middle + ((2 * offset - 1) * (reach + 0.5)).round().long()
    moved = moved.clamp(min=0).minimum(shapes - 1)
    return moved, (moved != middle)[..., :2].any(-1).float()
