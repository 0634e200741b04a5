"""`VolumeSegmentationModule`: learns the class of each voxel of labeled volumes, and scores surfaces."""

import logging
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.scored import ScoredModule, check_class_weights
from lit_data.models.segmentation.losses import choose_loss
from lit_data.models.segmentation.module import ClassScores
from lit_data.wings.volumes.scores import VolumeScores

log = logging.getLogger(__name__)

_HYPERPARAMETERS = ("classes", "schedule", "dice_weight", "class_weights", "surface_mm")


class VolumeSegmentationModule(ScoredModule):
    """A net that predicts the class of each voxel of a window, trained by cross entropy and Dice.

    It takes batches with ``image`` [B, 1, D, H, W] float32 in 0..1 and ``mask`` [B, 1, D, H, W]
    int64: 0 for the background, then the numbers of `classes`.

    It logs ``train/loss`` in each step, and after validation and test, prefixed with ``val/`` or
    ``test/``, ``dice_NAME`` and ``iou_NAME`` of each class, over the voxels of all windows, and
    ``mean_dice`` and ``mean_iou`` over the classes that occur. ``test`` joins the windows of each
    volume and logs the means over volumes of ``surface_dice``, ``hausdorff_95_mm``, ``volume_ml``
    and ``true_ml``, see `score_class`, as ``surface_dice_NAME``, ``mean_surface_dice`` and so on.
    This needs a single process, the package edt, and batches with a ``position``.

    Args:
        net: From [B, 1, D, H, W] to logits [B, K, D, H, W] of the background and of each class.
        classes: Names of the labels 1, 2, ...
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`.
        loss: `mean`, see `PixelLoss`; or your own loss of logits and masks [B, 1, D, H, W] int64,
            such as those of MONAI with ``to_onehot_y=True, softmax=True``.
        dice_weight: See `PixelLoss`.
        class_weights: [K] factors on the cross entropy of the background and of each class.
        surface_mm: Distance up to which surfaces agree in the surface Dice.

    Raises:
        ConfigError: An option is out of its range, or there are no classes; later, if the net or
            the datamodule has other classes.
    """

    notes_loss = True

    def __init__(
        self,
        net: nn.Module,
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
            net,
            optimizer=optimizer,
            schedule=schedule,
        )
        self.classes = names
        self.surface_mm = surface_mm
        check_class_weights(class_weights, ("background", *names))
        self.loss = choose_loss(loss, dice_weight=dice_weight, class_weights=class_weights)
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores[stage] = ClassScores(self.classes)
        self._volumes: VolumeScores | None = None  # of a test
        self.save_hyperparameters(*_HYPERPARAMETERS)

    @override
    def setup(self, stage: str) -> None:
        """Refuse a datamodule with other classes.

        Raises:
            ConfigError: The datamodule has other classes.
        """
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        known_classes = tuple(getattr(datamodule, "classes", self.classes) or ())
        if known_classes != self.classes:
            raise ConfigError(
                f"data.classes={list(known_classes)} and model.classes={list(self.classes)} "
                "differ: set only data.classes, which the model copies"
            )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, D, H, W] of windows [B, 1, D, H, W], the background first.

        Raises:
            ConfigError: The net returns logits of another shape.
        """
        logits: Tensor = self.net(images)
        needed_shape = (len(images), len(self.classes) + 1, *images.shape[2:])
        if logits.shape != needed_shape:
            raise ConfigError(
                f"the net gives {list(logits.shape)}, but {list(needed_shape)} is needed, for "
                f"the background and {', '.join(self.classes)}: see model.net.classes, and sides "
                "of data.windows.size that the net can halve"
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
    def on_test_start(self) -> None:
        """Start joining windows to volumes, or warn that they cannot be joined."""
        self._volumes = None
        if self.trainer.world_size > 1:
            log.warning(
                "each of %d processes tests some windows of each volume: surfaces and sizes are "
                "not scored; test with trainer.devices=1, or predict",
                self.trainer.world_size,
            )
        elif find_spec("edt") is None:
            log.warning("surfaces and sizes are not scored: pip install edt")
        else:
            self._volumes = VolumeScores(self.classes, self.surface_mm)

    @override
    def score(self, batch: Batch, stage: str) -> None:
        scores: Any = self.scores[stage]
        answers = self(batch["image"])
        self.note_loss(batch, lambda: self.loss(answers, batch["mask"]))
        logits = answers.float()
        # Device memory is used first: a step that runs out of memory is repeated.
        probabilities = logits.softmax(1) if stage == "test" else logits
        scores.update(logits, batch["mask"][:, 0])
        if stage == "test" and self._volumes is not None and "position" in batch:
            self._volumes.add(probabilities, batch)

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        scores: Any = self.scores[stage]
        named: dict[str, Tensor] = scores.compute()
        scores.reset()
        if stage == "test" and self._volumes is not None:
            for name, value in self._volumes.take().items():
                named[name] = torch.tensor(value)
        return named
