"""Scores of reconstructed volumes, as torchmetrics."""

from typing import Final

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lit_data.devices import widest_float

_EXACT: Final = 1e-12  # of a squared error: 120 dB


class VoxelScores(Metric):
    """How well volumes are reconstructed.

    - ``iou`` and ``f1`` of occupancy: intersection over union, and 2 |both| / (|true| + |predicted|), of whole volumes;
      means over the volumes. A volume where nothing is occupied and nothing predicted has 1.
    - ``value_mae`` and ``psnr``: mean absolute error of the values, and their peak signal-to-noise ratio in dB with
      a peak of 1; over all true voxels together, found or not.
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
            both: [B] voxels that are occupied and predicted; with fractions where they are estimated.
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
    """How many codes are in use: e to the power of the entropy of their shares, from 1 to the size of the codebook.

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
        self.uses += torch.zeros_like(self.uses).index_add(0, flat, torch.ones_like(flat, dtype=self.uses.dtype))

    @override
    def compute(self) -> Tensor:
        """The perplexity; 1 where nothing was counted."""
        shares = self.uses / self.uses.sum().clamp(min=1)
        entropy: Tensor = torch.special.entr(shares).sum()
        return entropy.exp().float()
