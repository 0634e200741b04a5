"""`VoxelModule`: learn to write volumes again from a few numbers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.modules.schedule import OptimizerFactory, Schedule
from lit_data.modules.scored import ScoredModule
from lit_data.modules.voxel.decoding import Decoding, compare, reconstruct
from lit_data.modules.voxel.net import Field, PointVoxelNet
from lit_data.modules.voxel.points import Points, read_points
from lit_data.modules.voxel.queries import QueryCounts, draw_queries
from lit_data.modules.voxel.scores import CodePerplexity, VoxelScores, find_losses
from lit_data.rng import check_seed
from lit_data.types import Batch


class VoxelModule(ScoredModule):
    """An autoencoder of occupied voxels, its losses, and scores of whole volumes.

    Takes batches with ``coords`` [N, 4] int (row, z, y, x), ``feats`` [N, C] float32 whose column 0
    is the value in 0..1, ``shape`` [B, 3] and ``index`` [B]; see `read_points` for ``coords_count``
    and ``occupied_total``.

    Logs ``train/loss`` in each step, and after validation and test, with ``val/`` or ``test/``
    before it:

    - ``iou``, ``f1``: of occupancy in whole volumes, see `VoxelScores`. Predicted are voxels above
      `threshold` in cells above `cell_threshold`. Every voxel of these cells is asked for, up to
      `score_voxels` for a batch; of more, an even choice, scaled up. Where points are a subset, so
      is what is found of them.
    - ``value_mae``, ``psnr``: of the values at the points;
    - ``perplexity``: codes in use, where there is a quantiser.

    `load_from_checkpoint(path, net=PointVoxelNet())` restores the plain arguments; net, optimizer
    and queries are given again.

    Args:
        net: The autoencoder.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the
            optimizer has it.
        seed: Draws the places that are asked for in training, see `draw_queries`.
        queries: How many places.
        value_weight: Weight of the values in the loss.
        cell_weight: Weight of the cells' occupancy.
        code_weight: Weight of the distance between latents and codes (commitment).
        threshold: Predicted voxels are occupied with a higher probability.
        cell_threshold: Cells with a lower probability of holding anything are not looked into.
        query_chunk: Voxels that are asked for at once in evaluation and prediction.
        score_voxels: See above.

    Raises:
        ConfigError: The schedule is unknown, or a number is out of range.
    """

    net: PointVoxelNet

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
        super().__init__(net, optimizer=optimizer or _make_adamw, schedule=schedule)
        self.decoding = Decoding(threshold, cell_threshold, query_chunk, score_voxels)
        self.seed, self.queries = check_seed(seed), queries or QueryCounts()
        self.value_weight, self.cell_weight, self.code_weight = (
            value_weight,
            cell_weight,
            code_weight,
        )
        self.scores = nn.ModuleDict({"val": VoxelScores(), "test": VoxelScores()})
        if net.quantiser is not None:
            self.uses = nn.ModuleDict(
                {stage: CodePerplexity(net.quantiser.codes) for stage in ("val", "test")}
            )
        # Plain values only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters("schedule", "seed", "value_weight", "cell_weight", "code_weight")
        self.save_hyperparameters("threshold", "cell_threshold", "query_chunk", "score_voxels")

    @override
    def forward(self, points: Points) -> Field:
        """Encode the points of volumes."""
        field: Field = self.net(points)
        return field

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        points = read_points(batch)
        queries = draw_queries(
            points,
            self.queries,
            grid=self.net.grid,
            seed=self.seed,
            index=batch["index"],
            epoch=self.current_epoch,
        )
        losses = find_losses(self.net, self(points), points, queries)
        losses_of_volumes = (
            losses.occupancy + self.value_weight * losses.value + self.cell_weight * losses.cells
        )
        return (losses_of_volumes + self.code_weight * losses.codes).mean()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the codebook, once for all pieces that the batch may have been cut into."""
        if self.net.quantiser is not None:
            self.net.quantiser.update()

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Tensor]]:
        """The reconstruction of each volume.

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


def _make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=1e-2)
