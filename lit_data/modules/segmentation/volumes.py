"""`VolumeSegmentationModule`: learn the class of each voxel of labelled volumes, and score surfaces."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.datasets.ct.distance import Mask, find_box, measure_depth
from lit_data.errors import ConfigError
from lit_data.modules.schedule import OptimizerFactory, Schedule
from lit_data.modules.scored import ScoredModule
from lit_data.modules.segmentation.losses import PixelLoss
from lit_data.modules.segmentation.module import ClassScores
from lit_data.modules.segmentation.nets import VolumeUNet
from lit_data.types import Batch

_HYPERPARAMETERS: Final = ("classes", "schedule", "dice_weight", "class_weights", "surface_mm")
_PERCENT: Final = 95  # of the Hausdorff distance, whose largest one follows a single voxel


class VolumeSegmentationModule(ScoredModule):
    """A net that gives each voxel of a window its class, by cross entropy and Dice.

    Takes batches with ``image`` [B, 1, D, H, W] float32 in 0..1 and ``mask`` [B, 1, D, H, W] int64:
    0 for the background, then the numbers of `classes`.

    Logs ``train/loss`` in each step, and after validation and test, with ``val/`` or ``test/``
    before it, ``dice_NAME`` and ``iou_NAME`` of each class, over the voxels of all windows, and
    ``mean_dice`` and ``mean_iou`` of those that there are. Distances of surfaces are those of whole
    volumes: ``predict`` gives them.

    Args:
        net: From [B, 1, D, H, W] to logits [B, K, D, H, W] of the background and of each class;
            `VolumeUNet` by default.
        classes: Names of the labels 1, 2, ...
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`.
        loss: `mean`, see `PixelLoss`; or a loss of your own, from the logits and masks
            [B, 1, D, H, W] int64, as those of MONAI are with ``to_onehot_y=True, softmax=True``.
        dice_weight: See `PixelLoss`.
        class_weights: [K] factors on the cross entropy of the background and of each class.
        surface_mm: In the surface Dice of ``predict``, surfaces that are nearer agree.

    Raises:
        ConfigError: An option is out of its range, or there are no classes; later, that the net or
            the datamodule has others.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        *,
        classes: Sequence[str],
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        loss: Literal["mean"] | nn.Module = "mean",
        dice_weight: float = 1.0,
        class_weights: Sequence[float] | None = None,
        surface_mm: float = 1.0,
    ) -> None:
        names = tuple(map(str, classes or ()))
        if not names or surface_mm < 0:
            raise ConfigError(
                f"classes={list(names)}, surface_mm={surface_mm}: name at least one class, "
                "as data.classes, and give a distance of at least 0"
            )
        optimizer = optimizer or partial(torch.optim.AdamW, lr=5e-3, weight_decay=1e-2)
        super().__init__(
            net or VolumeUNet(channels=1, classes=names),
            optimizer=optimizer,
            schedule=schedule,
        )
        self.classes = names
        self.surface_mm = surface_mm
        self.loss: nn.Module
        if isinstance(loss, nn.Module):
            self.loss = loss
        else:
            self.loss = PixelLoss(loss, dice_weight=dice_weight, class_weights=class_weights)
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores[stage] = ClassScores(self.classes)
        self.save_hyperparameters(*_HYPERPARAMETERS)

    @override
    def setup(self, stage: str) -> None:
        """Refuse a datamodule with other classes.

        Raises:
            ConfigError: It has.
        """
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        known_classes = tuple(getattr(datamodule, "classes", self.classes))
        if known_classes != self.classes:
            raise ConfigError(
                f"data.classes={list(known_classes)} and model.classes={list(self.classes)} differ: "
                "set data.classes alone, which the model takes over"
            )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, D, H, W] of windows [B, 1, D, H, W], the background first.

        Raises:
            ConfigError: The net gives others.
        """
        logits: Tensor = self.net(images)
        needed_shape = (len(images), len(self.classes) + 1, *images.shape[2:])
        if logits.shape != needed_shape:
            raise ConfigError(
                f"the net gives {list(logits.shape)} and {list(needed_shape)} is needed, for the "
                f"background and {', '.join(self.classes)}: see model.net.classes, and sides of "
                "data.windows.size that the net can halve"
            )
        return logits

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.loss(self(batch["image"]), batch["mask"])
        return loss

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return probabilities [B, K, D, H, W] float32, the background first."""
        logits: Tensor = self(batch["image"])
        return logits.float().softmax(1)

    @override
    def score(self, batch: Batch, stage: str) -> None:
        scores: Any = self.scores[stage]
        scores.update(self(batch["image"]).float(), batch["mask"][:, 0])

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        scores: Any = self.scores[stage]
        named: dict[str, Tensor] = scores.compute()
        scores.reset()
        return named


class SurfaceScores(NamedTuple):
    """Scores of one class of one volume.

    Attributes:
        dice: Surface Dice, 0..1: the fraction of both surfaces that lies within the tolerance of
            the other one (Nikolov et al., "Deep learning to achieve clinically applicable
            segmentation", 2018).
        hausdorff_95_mm: The larger one of the two directions' 95th percentile of the distances of
            surface voxels to the other surface.
    """

    dice: float
    hausdorff_95_mm: float


def score_surfaces(
    predicted: Mask, true: Mask, spacing_mm: tuple[float, float, float], tolerance_mm: float
) -> SurfaceScores | None:
    """Compare the surfaces of two masks, as ``compute_surface_dice`` and ``compute_hausdorff_distance`` of MONAI do.

    A voxel is of the surface if one of its six neighbours is not of the mask.

    Args:
        predicted: [Z, Y, X].
        true: [Z, Y, X].
        spacing_mm: (z, y, x) between voxel centres.
        tolerance_mm: Distance up to which surfaces agree.

    Returns:
        None where one of the masks is empty, which has no surface.

    Raises:
        ConfigError: The package edt is not installed.
    """
    if not predicted.any() or not true.any():
        return None
    # Nothing outside of both masks changes a distance between them.
    box = find_box(predicted | true)
    surfaces = find_surface(predicted[box]), find_surface(true[box])
    near, total, farthest_mm = 0, 0, 0.0
    # One direction after the other: the distances of a volume take four bytes a voxel.
    for surface, other in (surfaces, reversed(surfaces)):
        distances_mm = measure_depth(~other, spacing_mm, np.inf)[surface]
        near += int((distances_mm <= tolerance_mm).sum())
        total += len(distances_mm)
        farthest_mm = max(farthest_mm, float(np.percentile(distances_mm, _PERCENT)))
    return SurfaceScores(near / total, farthest_mm)


def find_surface(mask: Mask) -> Mask:
    """Return the voxels of a mask that have a neighbour outside of it; beyond the array all is."""
    inside = mask.copy()
    for axis in range(3):
        forward = np.moveaxis(inside, axis, 0)
        source = np.moveaxis(mask, axis, 0)
        forward[1:] &= source[:-1]
        forward[:-1] &= source[1:]
        forward[0] = False
        forward[-1] = False
    return mask & ~inside
