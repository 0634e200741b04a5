"""What a net that reconstructs volumes learns at the places it is asked for."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.modules.voxel_net import Field, PointVoxelNet
from lit_data.modules.voxel_points import Points, find_cells
from lit_data.modules.voxel_queries import Queries


class Losses(NamedTuple):
    """Parts of the loss, each [B] float32: a mean over the places of one volume, so none changes another's weight.

    Attributes:
        occupancy: Cross entropy of voxels being occupied; less than 0 is possible where points are a subset.
        value: Mean absolute error at points.
        cells: Cross entropy of cells holding a point.
        codes: Mean squared distance of latents to their codes.
    """

    occupancy: Tensor
    value: Tensor
    cells: Tensor
    codes: Tensor


def find_losses(net: PointVoxelNet, field: Field, points: Points, queries: Queries) -> Losses:
    """The loss of each volume, in float32.

    Args:
        net: The net.
        field: What it has made of the points.
        points: Of B volumes.
        queries: Places in them.
    """
    volumes, count = queries.places.shape[:2]
    rows = torch.arange(volumes, device=queries.places.device).repeat_interleave(count, output_size=volumes * count)
    logits, values = (part.view(volumes, count) for part in net.ask(field, rows, queries.places.flatten(0, 1)))
    asked = queries.values.shape[1]
    entropy = F.softplus(logits[:, asked:]) - queries.occupied * logits[:, asked:]
    return Losses(
        _mean(entropy, queries.weights),
        _mean((values[:, :asked] - queries.values).abs(), queries.value_weights),
        F.binary_cross_entropy_with_logits(field.cells, _find_occupied(points, net.grid), reduction="none")
        .flatten(1)
        .mean(1),
        field.misses,
    )


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1)


def _find_occupied(points: Points, grid: int) -> Tensor:
    """[B, G, G, G] float32 in {0, 1}: cells with a point."""
    z, y, x = find_cells(points.places, points.shapes[points.rows], grid).unbind(1)
    occupied = points.feats.new_zeros(len(points.shapes), grid, grid, grid)
    # In place of an index of shares: all write the same number, so their order does not matter.
    return occupied.index_put((points.rows, z, y, x), occupied.new_ones(()))
