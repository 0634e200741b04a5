"""`DetectionModule`: learn to find objects and to say what they are."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.devices import constant
from lit_data.errors import ConfigError
from lit_data.modules.detection.boxes import BoxScores, Objects, non_maximum_suppression
from lit_data.modules.detection.net import Predictions
from lit_data.modules.detection.seams import WindowObjects
from lit_data.modules.detection.targets import detection_loss, read_truths
from lit_data.modules.schedule import OptimizerFactory, Schedule
from lit_data.modules.scored import ScoredModule
from lit_data.types import Batch

# In evaluation: average precision ranks all scores, but most places have lower ones.
LEAST_SCORE: Final = 0.01
MOST_KEPT: Final = 100  # boxes of an image; what COCO counts of a class
_MOST_COMPARED: Final = 1000  # boxes of an image that non-maximum suppression looks at


class DetectionModule(ScoredModule):
    """A net that finds objects, its loss, and mean average precision.

    Takes batches with ``image`` [B, 3, H, W] float32 in 0..1 and ``boxes`` [N, 6] float32: row in
    the batch, class, and centre x, centre y, width, height as fractions of the image; see
    `read_truths`.

    Logs ``train/loss`` in each step, and after validation and test, with ``val/`` or ``test/``
    before it:

    - ``map50``: mean over the classes of the average precision at IoU 0.5;
    - ``map``: the same, mean over IoU 0.5, 0.55 .. 0.95.

    Where samples are windows of large images, what is found in the windows of an image is joined, see
    `join_windows`, and compared with the boxes of the image. An image of which windows are missing,
    as with ``limit_val_batches``, counts not.

    `load_from_checkpoint(path, net=DetectorNet(3))` restores the plain arguments; net and optimizer
    are given again.

    Args:
        net: From [B, 3, H, W] images to `Predictions`; see `DetectorNet`.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the
            optimizer has it.
        box_weight: Weight of the boxes in the loss, see `detection_loss`.
        score_threshold: Predicted objects have a higher score. Evaluation has its own, 0.01.
        iou_threshold: Of two objects of a class that overlap more, the one with the higher score
            stays.

    Raises:
        ConfigError: The schedule is unknown, or a threshold is no fraction; later, that the
            dataset has more classes than the net.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "warmup_cosine",
        box_weight: float = 2.0,
        score_threshold: float = 0.25,
        iou_threshold: float = 0.6,
    ) -> None:
        optimizer = optimizer or partial(torch.optim.AdamW, lr=5e-3, weight_decay=5e-2)
        super().__init__(net, optimizer=optimizer, schedule=schedule)
        if not (0 <= score_threshold < 1 and 0 < iou_threshold <= 1):
            raise ConfigError(
                f"score_threshold={score_threshold}, iou_threshold={iou_threshold}: need 0 <= "
                "score_threshold < 1 and 0 < iou_threshold <= 1"
            )
        self.box_weight = box_weight
        self.score_threshold = score_threshold
        self.iou_threshold = iou_threshold
        self.scores = nn.ModuleDict({"val": BoxScores(), "test": BoxScores()})
        self._windows = {"val": WindowObjects(), "test": WindowObjects()}
        # Plain values only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters("schedule", "box_weight", "score_threshold", "iou_threshold")

    @override
    def setup(self, stage: str) -> None:
        """Compare the classes of the net with those of the dataset, where both say them.

        Raises:
            ConfigError: The set has more: their objects would fit no output of the net.
        """
        trainer: Any = self.trainer
        net_classes = getattr(self.net, "classes", None)
        names = getattr(trainer.datamodule, "classes", None)
        if not isinstance(net_classes, int) or not isinstance(names, Sequence):
            return
        if len(names) > net_classes:
            raise ConfigError(
                f"the dataset has {len(names)} classes, the net {net_classes}: set "
                f"model.net.classes={len(names)}"
            )

    @override
    def forward(self, images: Tensor) -> Predictions:
        """Return the net's predictions at its places in images [B, 3, H, W]."""
        predictions: Predictions = self.net(images)
        return predictions

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        return detection_loss(self(batch["image"]), read_truths(batch), box_weight=self.box_weight)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[Objects]:
        """The objects of each image.

        Returns:
            For each image up to 100 objects, the highest score first: ``boxes`` [n, 4] float32
            (left, top, right, bottom) in pixels of the batch image, ``scores`` [n] float32 in 0..1,
            ``classes`` [n] int64.
        """
        return self._find(batch["image"], self.score_threshold)

    def _find(self, images: Tensor, score_threshold: float) -> list[Objects]:
        height_px, width_px = images.shape[-2:]
        predictions = self(images)
        limits = constant(
            (width_px, height_px) * 2, predictions.boxes.device, predictions.boxes.dtype
        )
        boxes = predictions.boxes.clamp(min=0).minimum(limits)
        objects = []
        for logits, places in zip(predictions.logits, boxes, strict=True):
            objects.append(find_objects(logits, places, score_threshold, self.iou_threshold))
        return objects

    @override
    def score(self, batch: Batch, stage: str) -> None:
        predicted = self._find(batch["image"], LEAST_SCORE)
        if self._has_windows:
            self._windows[stage].add(predicted, batch)
            # Images are done one after the other, so few are open, but on several ranks.
            for image in set(batch["image_index"].tolist()):
                self._score_whole(image, stage)
            return
        truths = read_truths(batch)
        true = []
        for row in range(len(batch["image"])):
            objects = truths.of(row)
            true.append({"boxes": objects.boxes, "classes": objects.classes})
        metric: Any = self.scores[stage]
        metric.update(predicted, true)

    @property
    def _has_windows(self) -> bool:
        """True if samples are windows of images, which are scored as a whole."""
        trainer: Any = self._trainer
        return getattr(getattr(trainer, "datamodule", None), "windows", None) is not None

    def _score_whole(self, image: int, stage: str) -> None:
        """Score an image if all of its windows are there."""
        trainer: Any = self.trainer
        whole_image = trainer.datamodule.find_whole(image)
        joined = self._windows[stage].take(image, whole_image)
        if joined is None:
            return
        best = {name: values[:_MOST_COMPARED] for name, values in joined.items()}
        boxes = torch.from_numpy(whole_image.corners)
        classes = torch.from_numpy(whole_image.classes)
        self._update(stage, best, {"boxes": boxes.float(), "classes": classes})

    def _update(self, stage: str, predicted: Objects, true: Objects) -> None:
        metric: Any = self.scores[stage]
        pair = []
        for objects in (predicted, true):
            pair.append({name: values.to(self.device) for name, values in objects.items()})
        metric.update(pair[:1], pair[1:])

    def _score_rest(self, stage: str) -> None:
        """Score images whose windows lie on several ranks; those with windows that are missing count not."""
        self._windows[stage].gather()
        for image in list(self._windows[stage].parts):
            self._score_whole(image, stage)
        self._windows[stage].parts.clear()
        # So that a rank without an image takes part.
        nothing = {"boxes": torch.zeros(0, 4), "classes": torch.zeros(0, dtype=torch.int64)}
        self._update(stage, nothing | {"scores": torch.zeros(0)}, nothing)

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        metric: Any = self.scores[stage]
        if self._has_windows:
            self._score_rest(stage)
        values: dict[str, Tensor] = metric.compute()
        metric.reset()
        return values


def find_objects(
    logits: Tensor, boxes: Tensor, score_threshold: float, iou_threshold: float
) -> Objects:
    """Find the objects of one image.

    Each place and class above the threshold, less those that a better one overlaps.

    Args:
        logits: [P, classes].
        boxes: [P, 4] corners in pixels.
        score_threshold: Objects have a higher score.
        iou_threshold: See `non_maximum_suppression`.

    Returns:
        ``boxes`` [n, 4], ``scores`` [n], ``classes`` [n] int64 of up to 100 objects, the highest
        score first.
    """
    scores = logits.sigmoid().flatten()
    scores, flat = scores.topk(min(_MOST_COMPARED, len(scores)))
    flat = flat[scores > score_threshold]
    scores = scores[scores > score_threshold]
    places = flat // logits.shape[1]
    classes = flat % logits.shape[1]
    best = non_maximum_suppression(
        boxes[places], scores, classes, iou_threshold=iou_threshold, most=MOST_KEPT
    )
    return {"boxes": boxes[places][best], "scores": scores[best], "classes": classes[best]}
