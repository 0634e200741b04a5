"""`VoxelModule`: learns to reconstruct volumes from a few numbers."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lit_data.core.devices import widest_float
from lit_data.core.rng import check_seed
from lit_data.core.types import Batch
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.scored import ScoredModule, refuse_true_precision
from lit_data.wings.volumes.voxel.net import Decoding, Field, PointVoxelNet, compare, reconstruct
from lit_data.wings.volumes.voxel.points import (
    Points,
    Queries,
    QueryCounts,
    draw_queries,
    find_cells,
    read_points,
)

_EXACT = 1e-12  # of a squared error: 120 dB


class VoxelModule(ScoredModule):
    """An autoencoder of occupied voxels, its losses, and scores of whole volumes.

    It takes batches with ``coords`` [N, 4] int (row, z, y, x), ``feats`` [N, C] float32 whose
    column 0 is the value in 0..1, ``shape`` [B, 3] and ``index`` [B]; see `read_points` for
    ``coords_count`` and ``occupied_total``.

    It logs ``train/loss`` in each step, ``val/loss`` in training, and after validation and test,
    prefixed with ``val/`` or ``test/``:

    - ``iou``, ``f1``: of occupancy in whole volumes, see `VoxelScores`. Predicted voxels are above
      `threshold`, in cells above `cell_threshold`. Every voxel of these cells is predicted, up to
      `score_voxels` for a batch; of more, an evenly spread subset is predicted and scaled up. If
      points are a subset, the hits among them are scaled up too.
    - ``value_mae``, ``psnr``: of the values at the points;
    - ``perplexity``: number of codes in use, if there is a quantizer.

    `load_from_checkpoint(path, net=PointVoxelNet())` restores the plain arguments; pass net,
    optimizer and queries again.

    Args:
        net: The autoencoder.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the
            optimizer has it.
        seed: Seed of the places queried in training, see `draw_queries`.
        queries: Numbers of places.
        value_weight: Weight of the values in the loss.
        cell_weight: Weight of the cells' occupancy.
        code_weight: Weight of the distance between latents and codes (commitment).
        threshold: Voxels with a higher probability are predicted as occupied.
        cell_threshold: Cells with a lower probability of containing anything are skipped.
        query_chunk: Voxels queried at once in evaluation and prediction.
        score_voxels: Maximum number of voxels of a batch to score volumes by.

    Raises:
        ConfigError: The schedule is unknown, or a number is out of range.
    """

    net: PointVoxelNet
    notes_loss = True

    def __init__(
        self,
        net: PointVoxelNet,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        seed: int = 0,
        queries: QueryCounts | None = None,
        value_weight: float = 4.0,
        cell_weight: float = 1.0,
        code_weight: float = 0.25,
        threshold: float = 0.5,
        cell_threshold: float = 0.05,
        query_chunk: int = 131072,
        score_voxels: int = 4_194_304,
    ) -> None:
        super().__init__(
            net,
            optimizer=optimizer or partial(torch.optim.AdamW, lr=5e-3, weight_decay=1e-2),
            schedule=schedule,
        )
        self.decoding = Decoding(threshold, cell_threshold, query_chunk, score_voxels)
        self.seed = check_seed(seed)
        self.queries = queries or QueryCounts()
        self.value_weight = value_weight
        self.cell_weight = cell_weight
        self.code_weight = code_weight
        self.scores = nn.ModuleDict({"val": VoxelScores(), "test": VoxelScores()})
        if net.quantiser is not None:
            self.uses = nn.ModuleDict(
                {stage: CodePerplexity(net.quantiser.codes) for stage in ("val", "test")}
            )
        # Plain values only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters("schedule", "seed", "value_weight", "cell_weight", "code_weight")
        self.save_hyperparameters("threshold", "cell_threshold", "query_chunk", "score_voxels")

    @override
    def setup(self, stage: str) -> None:
        """Refuse weights of another dtype, which would round places of voxels."""
        refuse_true_precision(self)

    @override
    def forward(self, points: Points) -> Field:
        """Encode the points of volumes."""
        field: Field = self.net(points)
        return field

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        points = read_points(batch)
        return self._compare(self(points), points, batch["index"], epoch=self.current_epoch)

    def _compare(self, field: Field, points: Points, index: Tensor, *, epoch: int) -> Tensor:
        """Return the loss of encoded points, at the places of an epoch."""
        queries = draw_queries(
            points, self.queries, grid=self.net.grid, seed=self.seed, index=index, epoch=epoch
        )
        losses = find_losses(self.net, field, points, queries)
        # A sum for each volume first: micro-batches are then weighted by their volumes.
        losses_of_volumes = (
            losses.occupancy + self.value_weight * losses.value + self.cell_weight * losses.cells
        )
        return (losses_of_volumes + self.code_weight * losses.codes).mean()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the codebook, once for all micro-batches."""
        if self.net.quantiser is not None:
            self.net.quantiser.update()

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Tensor]]:
        """Return the reconstruction of each volume.

        Returns:
            For each volume its predicted voxels, in the order z, y, x: ``coords`` [n, 3] int32,
            ``values`` [n] float32 in 0..1, ``scores`` [n] float32 in 0..1, the probabilities.
        """
        return reconstruct(self.net, self(read_points(batch)), self.decoding)

    @override
    def score(self, batch: Batch, stage: str) -> None:
        points = read_points(batch)
        field = self(points)
        scores: Any = self.scores[stage]
        scores.update(*compare(self.net, field, points, self.decoding))
        # Each validation uses the places of epoch 0, so that losses can be compared.
        self.note_loss(batch, lambda: self._compare(field, points, batch["index"], epoch=0))
        if field.codes is not None:
            uses: Any = self.uses[stage]
            uses.update(field.codes)

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        scores: Any = self.scores[stage]
        values = dict(scores.compute())
        scores.reset()
        if self.net.quantiser is not None:
            uses: Any = self.uses[stage]
            values["perplexity"] = uses.compute()
            uses.reset()
        return values


class Losses(NamedTuple):
    """Parts of the loss, each [B] float32.

    Each is a mean over the places of one volume, so no volume changes the weight of another.

    Attributes:
        occupancy: Cross entropy of voxels being occupied; may be below 0 if points are a subset.
        value: Mean absolute error at points.
        cells: Cross entropy of cells containing a point.
        codes: Mean squared distance of latents to their codes.
    """

    occupancy: Tensor
    value: Tensor
    cells: Tensor
    codes: Tensor


def find_losses(net: PointVoxelNet, field: Field, points: Points, queries: Queries) -> Losses:
    """Return the loss of each volume, in float32.

    Args:
        net: The net.
        field: Encoded points.
        points: Points of B volumes.
        queries: Places in the volumes.
    """
    volumes, count = queries.places.shape[:2]
    rows = torch.arange(volumes, device=queries.places.device).repeat_interleave(
        count, output_size=volumes * count
    )
    logits, values = (
        part.view(volumes, count) for part in net.ask(field, rows, queries.places.flatten(0, 1))
    )
    asked = queries.values.shape[1]  # the first places are asked for values, the rest for occupancy
    # Cross entropy with targets above 1, which account for voxels missing in the subset.
    entropy = F.softplus(logits[:, asked:]) - queries.occupied * logits[:, asked:]
    cell_entropy = F.binary_cross_entropy_with_logits(
        field.cells, _find_occupied(points, net.grid), reduction="none"
    )
    return Losses(
        _mean(entropy, queries.weights),
        _mean((values[:, :asked] - queries.values).abs(), queries.value_weights),
        cell_entropy.flatten(1).mean(1),
        field.misses,
    )


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1)


def _find_occupied(points: Points, grid: int) -> Tensor:
    """Return the cells with a point: [B, G, G, G] float32 in {0, 1}."""
    z, y, x = find_cells(points.places, points.shapes[points.rows], grid).unbind(1)
    occupied = points.feats.new_zeros(len(points.shapes), grid, grid, grid)
    # Instead of an index of shares: all write the same number, so their order does not matter.
    return occupied.index_put((points.rows, z, y, x), occupied.new_ones(()))


class VoxelScores(Metric):
    """Scores of reconstructed volumes.

    - ``iou`` and ``f1`` of occupancy: intersection over union, and 2 |both| / (|true| +
      |predicted|), of whole volumes; means over the volumes. A volume in which nothing is occupied
      or predicted has 1.
    - ``value_mae`` and ``psnr``: mean absolute error of the values, and their peak signal-to-noise
      ratio in dB with a peak of 1; over all true voxels together, predicted or not.
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
        # Sums only, so that ranks and batches of any size add up to the same.
        for name in ("ious", "f1s", "volumes", "absolute", "squared", "voxels"):
            self.add_state(name, torch.zeros((), dtype=widest_float()), dist_reduce_fx="sum")

    @override
    def update(self, both: Tensor, true: Tensor, predicted: Tensor, errors: Tensor) -> None:
        """Count a batch of volumes.

        Args:
            both: [B] voxels that are occupied and predicted; fractions if they are estimated.
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
        """Return ``iou``, ``f1``, ``value_mae`` and ``psnr``; NaN without volumes or occupied voxels."""
        errors = self.squared / self.voxels
        return {
            "iou": (self.ious / self.volumes).float(),
            "f1": (self.f1s / self.volumes).float(),
            "value_mae": (self.absolute / self.voxels).float(),
            "psnr": (-10 * errors.clamp(min=_EXACT).log10()).float(),
        }


class CodePerplexity(Metric):
    """Perplexity of the codes: the effective number in use, from 1 to the size of the codebook.

    It is e to the power of the entropy of the codes' fractions.

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
        """Return the perplexity; 1 if nothing was counted."""
        shares = self.uses / self.uses.sum().clamp(min=1)
        entropy: Tensor = torch.special.entr(shares).sum()
        return entropy.exp().float()
