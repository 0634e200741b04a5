"""Scores of reconstructed volumes, as torchmetrics."""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lit_data.devices import widest_float
from lit_data.modules.voxel.net import Field, PointVoxelNet
from lit_data.modules.voxel.points import Points, find_cells
from lit_data.modules.voxel.queries import Queries


class Losses(NamedTuple):
    """Compute the parts of the loss, each [B] float32.

    Each is a mean over the places of one volume, so none changes another's weight.

    Attributes:
        occupancy: Cross entropy of voxels being occupied; less than 0 is possible where points are
            a subset.
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
    rows = torch.arange(volumes, device=queries.places.device).repeat_interleave(
        count, output_size=volumes * count
    )
    logits, values = (
        part.view(volumes, count) for part in net.ask(field, rows, queries.places.flatten(0, 1))
    )
    asked = queries.values.shape[1]
    entropy = F.softplus(logits[:, asked:]) - queries.occupied * logits[:, asked:]
    return Losses(
        _mean(entropy, queries.weights),
        _mean((values[:, :asked] - queries.values).abs(), queries.value_weights),
        F.binary_cross_entropy_with_logits(
            field.cells, _find_occupied(points, net.grid), reduction="none"
        )
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


_EXACT: Final = 1e-12  # of a squared error: 120 dB


class VoxelScores(Metric):
    """Scores of reconstructed volumes.

    - ``iou`` and ``f1`` of occupancy: intersection over union, and 2 |both| / (|true| +
      |predicted|), of whole volumes; means over the volumes. A volume where nothing is occupied and
      nothing predicted has 1.
    - ``value_mae`` and ``psnr``: mean absolute error of the values, and their peak signal-to-noise
      ratio in dB with a peak of 1; over all true voxels together, found or not.
    """

    full_state_update = False
    higher_is_better = True
    ious: Tensor
    f1s: Tensor
    volumes: Tensor
    absolute: Tensor
    squared: Tensor
    voxels: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("ious", "f1s", "volumes", "absolute", "squared", "voxels"):
            self.add_state(name, torch.zeros((), dtype=widest_float()), dist_reduce_fx="sum")

    @override
    def update(self, both: Tensor, true: Tensor, predicted: Tensor, errors: Tensor) -> None:
        """Count a batch of volumes.

        Args:
            both: [B] voxels that are occupied and predicted; with fractions where they are
                estimated.
            true: [B] voxels that are occupied.
            predicted: [B] voxels that are predicted.
            errors: [3] float64 over the true voxels: sum of |error|, sum of error^2, number.
        """
        both, true, predicted = (count.to(self.ious.dtype) for count in (both, true, predicted))
        union = true + predicted - both
        empty = union <= 0
        self.ious += torch.where(empty, 1.0, both / union.clamp(min=1)).sum()
        self.f1s += torch.where(empty, 1.0, 2 * both / (true + predicted).clamp(min=1)).sum()
        self.volumes += len(both)
        self.absolute += errors[0]
        self.squared += errors[1]
        self.voxels += errors[2]

    @override
    def compute(self) -> dict[str, Tensor]:
        """``iou``, ``f1``, ``value_mae`` and ``psnr``."""
        volumes, voxels = self.volumes.clamp(min=1), self.voxels.clamp(min=1)
        return {
            "iou": (self.ious / volumes).float(),
            "f1": (self.f1s / volumes).float(),
            "value_mae": (self.absolute / voxels).float(),
            "psnr": (-10 * (self.squared / voxels).clamp(min=_EXACT).log10()).float(),
        }


class CodePerplexity(Metric):
    """Count the codes in use, from 1 to the size of the codebook.

    e to the power of the entropy of their fractions.

    Args:
        codes: Size of the codebook.
    """

    full_state_update = False
    higher_is_better = True
    uses: Tensor

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.add_state("uses", torch.zeros(codes, dtype=widest_float()), dist_reduce_fx="sum")

    @override
    def update(self, codes: Tensor) -> None:
        """Count codes, int64 of any shape."""
        flat = codes.flatten()
        self.uses += torch.zeros_like(self.uses).index_add(
            0, flat, torch.ones_like(flat, dtype=self.uses.dtype)
        )

    @override
    def compute(self) -> Tensor:
        """The perplexity; 1 where nothing was counted."""
        shares = self.uses / self.uses.sum().clamp(min=1)
        entropy: Tensor = torch.special.entr(shares).sum()
        return entropy.exp().float()
