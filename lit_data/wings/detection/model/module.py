"""`DetectionModule`: trains, scores and runs a net that finds objects and their classes."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.devices import constant
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.image_ranks import JudgedModule
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.score_curves import ScoreCurves
from lit_data.wings.detection.model.boxes import Objects, non_maximum_suppression, soft_suppression
from lit_data.wings.detection.model.net import Predictions
from lit_data.wings.detection.model.scores import SIZE_LIMITS_PX, SIZES, BoxScores
from lit_data.wings.detection.model.seams import WindowObjects, score_objects
from lit_data.wings.detection.model.targets import Truths, detection_loss, read_truths
from lit_data.wings.detection.windows import MarkedBoxes
from lit_inspect.boxes import LEAST_SCORE
from lit_inspect.counts import counted

Suppression = Literal["hard", "soft"]

MOST_KEPT = 100  # boxes of an image; what COCO counts of a class
_MOST_COMPARED = 1000  # boxes of an image that non-maximum suppression compares
_UNCHOSEN = 0.25  # score of objects before a validation has found any
_LEAST_PROBABILITY = 1e-12  # in an exported file


class DetectionModule(JudgedModule):
    """A net that finds objects, its loss, and mean average precision.

    It takes batches with ``image`` [B, C, H, W] float32 in 0..1 and ``boxes`` [N, 6] float32: row
    in the batch, class, and center x, center y, width, height as fractions of the image; see
    `read_truths`. In the regions of ``ignored``, which have the same form, objects of their class
    are neither learned nor scored.

    It logs ``train/loss`` in each step, ``val/loss`` in training, and after validation and test,
    prefixed with ``val/`` or ``test/``, see `BoxScores`:

    - ``map50``: mean over the classes of the average precision at IoU 0.5;
    - ``map``: the same, averaged over IoU 0.5, 0.55 .. 0.95; ``map_small``, ``map_medium`` and
      ``map_large`` for objects of one size;
    - ``ap50_NAME`` and ``ap_NAME`` of each class, if the datamodule names the classes;
    - ``froc_0.1``, ``froc_1``, ``froc_10``: fraction of the objects found at this many false alarms
      per image;
    - ``object_f1_max`` and its score threshold. Checkpoints store the threshold of the last
      validation as ``predict_threshold``, and ``predict`` uses it;
    - the image scores of `JudgedModule`. The score of an image is the highest score of its boxes,
      or 0 if none reaches 0.01. An image shows a defect if it has a box; images with ignored
      regions only are not counted.

    If samples are windows of large images, the objects found in the windows of an image are joined,
    see `lit_inspect.boxes.join_windows`, and compared with the boxes of the image. An image with
    missing windows, as with ``limit_val_batches``, is not counted.

    `load_from_checkpoint(path, net=DetectorNet(3))` restores the plain arguments; pass the net and
    the optimizer again.

    Args:
        net: From [B, 3, H, W] images to `Predictions`; see `DetectorNet`.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the
            optimizer has it.
        box_weight: Weight of the boxes in the loss, see `detection_loss`.
        score_threshold: Predicted objects have a higher score. None takes the threshold chosen by
            validation, or 0.25 before any. Evaluation always uses 0.01.
        iou_threshold: Of two objects of a class with a larger IoU, the one with the higher score
            stays.
        nms: `hard` drops the other object. `soft` multiplies its score by 1 - IoU instead, and
            keeps it if it stays above the score threshold: for objects that are close together.
        size_limits_px: Sides of squares whose areas separate small, medium and large objects, in px
            of the image on the disk.

    Raises:
        ConfigError: The schedule is unknown, or a threshold is not a fraction; later, if the
            dataset has more classes than the net.
    """

    predict_threshold: Tensor
    exported_as = "boxes"
    notes_loss = True
    not_in_bar: ClassVar[tuple[str, ...]] = (
        "map_",
        "ap50_",
        "ap_",
        "froc_",
        "object_f1_max",
        "image_",
        "misses",
        "false_alarms",
    )

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "warmup_cosine",
        box_weight: float = 2.0,
        score_threshold: float | None = None,
        iou_threshold: float = 0.6,
        nms: Suppression = "hard",
        size_limits_px: Sequence[float] = SIZE_LIMITS_PX,
    ) -> None:
        optimizer = optimizer or partial(torch.optim.AdamW, lr=5e-3, weight_decay=5e-2)
        super().__init__(net, optimizer=optimizer, schedule=schedule, predict_threshold=_UNCHOSEN)
        if not (0 <= (score_threshold or 0) < 1 and 0 < iou_threshold <= 1):
            raise ConfigError(
                f"score_threshold={score_threshold}, iou_threshold={iou_threshold}: need 0 <= "
                "score_threshold < 1 and 0 < iou_threshold <= 1"
            )
        check_choice("nms", nms, get_args(Suppression))
        _check_limits(size_limits_px)
        self.box_weight = box_weight
        self.score_threshold = score_threshold
        self.iou_threshold = iou_threshold
        self.nms: Suppression = nms
        self.scores = nn.ModuleDict(
            {"val": BoxScores(size_limits_px), "test": BoxScores(size_limits_px)}
        )
        self._windows = {"val": WindowObjects(), "test": WindowObjects()}
        # Plain values only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters(
            "schedule", "box_weight", "score_threshold", "iou_threshold", "nms", "size_limits_px"
        )

    @override
    def setup(self, stage: str) -> None:
        """Compare the classes and channels of the net with those of the dataset, if both are known.

        Raises:
            ConfigError: The dataset has more classes than the net has outputs, or its images have
                other channels than the net takes.
        """
        trainer: Any = self.trainer
        _check_channels(self.net, trainer.datamodule)
        net_classes = getattr(self.net, "classes", None)
        names = getattr(trainer.datamodule, "classes", None)
        if not isinstance(names, Sequence):
            return
        metrics: Any = self.scores.children()
        for metric in metrics:
            metric.names = names
        if not isinstance(net_classes, int):
            return
        if len(names) > net_classes:
            raise ConfigError(
                f"the dataset has {counted(len(names), 'class', 'classes')}, but the net has {net_classes}: set "
                f"model.net.classes={len(names)}"
            )

    @override
    def forward(self, images: Tensor) -> Predictions:
        """Return the net's predictions at its places in images [B, 3, H, W]."""
        predictions: Predictions = self.net(images)
        return predictions

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        return self._compare(self(batch["image"]), batch)

    def _compare(self, predictions: Predictions, batch: Batch) -> Tensor:
        """Return the loss of predictions."""
        return detection_loss(
            predictions,
            read_truths(batch),
            _read_ignored(batch),
            box_weight=self.box_weight,
        )

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[Objects]:
        """Return the objects of each image.

        Returns:
            For each image up to 100 objects, the highest score first: ``boxes`` [n, 4] float32
            (left, top, right, bottom) in pixels of the batch image, ``scores`` [n] float32 in 0..1,
            ``classes`` [n] int64.
        """
        threshold = self.score_threshold
        if threshold is None:
            threshold = float(self.predict_threshold)
        images = batch["image"]
        return self.read_objects(self(images), images, threshold)

    def read_objects(
        self,
        predictions: Any,  # noqa: ANN401 - of the net, which torchvision's detectors have another form of
        images: Tensor,
        score_threshold: float,
    ) -> list[Objects]:
        """Return the objects above a score from what the net predicts for images."""
        height_px, width_px = images.shape[-2:]
        limits = constant(
            (width_px, height_px) * 2, predictions.boxes.device, predictions.boxes.dtype
        )
        boxes = predictions.boxes.clamp(min=0).minimum(limits)
        objects = []
        for logits, places in zip(predictions.logits, boxes, strict=True):
            objects.append(
                find_objects(logits, places, score_threshold, self.iou_threshold, self.nms)
            )
        return objects

    @override
    def invert(self, answers: Tensor, images: Tensor) -> Predictions:
        """Convert exported outputs [B, P, 4 + classes], box fractions and probabilities, to predictions."""
        height_px, width_px = images.shape[-2:]
        limits = answers.new_tensor((width_px, height_px) * 2)
        logits = answers[..., 4:].double().logit(eps=_LEAST_PROBABILITY).float()
        return Predictions(logits, answers[..., :4] * limits, ())

    @override
    def score(self, batch: Batch, stage: str) -> None:
        images = batch["image"]
        predictions = self(images)
        self.note_loss(batch, lambda: self._compare(predictions, batch))
        predicted = self.read_objects(predictions, images, LEAST_SCORE)
        if self._has_windows:
            self._windows[stage].add(predicted, batch)
            # Images are sampled one after the other, so few are open, except on several ranks.
            for image in set(batch["image_index"].tolist()):
                self._score_whole(image, stage)
            return
        count = len(images)
        true = _list_objects(read_truths(batch), count)
        regions = _read_ignored(batch)
        ignored = None if regions is None else _list_objects(regions, count)
        scales = _find_scales(batch)
        if scales is not None:
            _cut_to_images(predicted, batch, scales)
        for row, objects in enumerate(predicted):
            unknown = ignored is not None and len(ignored[row]["classes"]) > 0
            self._rank(stage, score_objects(objects), len(true[row]["classes"]), unknown=unknown)
        metric: Any = self.scores[stage]
        metric.update(predicted, true, ignored, scales)

    def _rank(self, stage: str, score: float, boxes: int, *, unknown: bool) -> None:
        """Rank an image by the highest score of its boxes.

        Args:
            stage: Stage to rank it in.
            score: Score of that box.
            boxes: Number of true boxes of the image.
            unknown: True if the image has ignored regions; without a box it is then not ranked.
        """
        if boxes or not unknown:
            shows = torch.tensor([boxes > 0], device=self.device)
            self.rank(stage, torch.tensor([score], device=self.device), shows)

    @property
    def _has_windows(self) -> bool:
        """True if samples are windows of images, which are scored as a whole."""
        trainer: Any = self._trainer
        return bool(getattr(getattr(trainer, "datamodule", None), "joins_windows", False))

    def _score_whole(self, image: int, stage: str) -> None:
        """Score an image if all of its windows have been added."""
        trainer: Any = self.trainer
        whole_image = trainer.datamodule.find_whole(image)
        joined = self._windows[stage].take(image, whole_image)
        if joined is None:
            return
        objects, score = joined
        best = {name: values[:_MOST_COMPARED] for name, values in objects.items()}
        true, ignored = (
            _read_marked(whole_image.objects),
            _read_marked(whole_image.ignored),
        )
        unknown = len(ignored["classes"]) > 0
        self._rank(stage, score, len(true["classes"]), unknown=unknown)
        self._update(stage, best, true, ignored)

    def _update(self, stage: str, *objects: Objects) -> None:
        """Score the detections of an image, with its true boxes and its ignored regions."""
        metric: Any = self.scores[stage]
        parts = []
        for of_kind in objects:
            parts.append([{name: values.to(self.device) for name, values in of_kind.items()}])
        metric.update(*parts)

    def _score_rest(self, stage: str) -> None:
        """Score images whose windows are on several ranks; images with missing windows are not counted."""
        self._windows[stage].gather()
        for image in list(self._windows[stage].parts):
            self._score_whole(image, stage)
        self._windows[stage].parts.clear()
        metric: Any = self.scores[stage]
        metric.update([], [])  # so that a rank without an image takes part

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        metric: Any = self.scores[stage]
        if self._has_windows:
            self._score_rest(stage)
        values: dict[str, Tensor] = metric.compute()
        images = self.take_ranks(stage)
        curves = {} if metric.curve is None else {"objects": metric.curve}
        self.curves[stage] = ScoreCurves(curves)
        ranking = self.find_ranking(stage)
        if ranking is not None:
            self.confusion[stage] = ranking.confusion
            self.curves[stage] = ScoreCurves(
                {"images": ranking.curve, **curves}, ranking.image_scores
            )
        metric.reset()
        chosen = values["object_f1_max_threshold"]
        if stage == "val" and chosen.isfinite():
            self.predict_threshold.fill_(chosen)
        return values | images


def _check_limits(limits_px: Sequence[float]) -> None:
    is_pair = len(limits_px) == len(SIZES) - 1
    if not is_pair or not 0 < limits_px[0] < limits_px[1]:
        raise ConfigError(f"size_limits_px={list(limits_px)} must be two ascending sides above 0")


def _check_channels(net: nn.Module, datamodule: object) -> None:
    net_channels = getattr(net, "channels", None)
    # Without a bank, nothing is known about the images, and nothing is refused.
    image_channels: Any = getattr(getattr(datamodule, "bank", None), "channels", net_channels)
    if net_channels != image_channels and isinstance(net_channels, int):
        raise ConfigError(
            f"images have {counted(image_channels, 'channel')}, but the net needs {net_channels}: set "
            f"model.net.channels={image_channels}, or data.read.gray_to_rgb=true for gray images"
        )


def _read_ignored(batch: Batch) -> Truths | None:
    return read_truths(batch, "ignored") if "ignored" in batch else None


def _list_objects(truths: Truths, count: int) -> list[Objects]:
    """Return the boxes of each of `count` images."""
    images = []
    for row in range(count):
        objects = truths.of(row)
        images.append({"boxes": objects.boxes, "classes": objects.classes})
    return images


def _find_scales(batch: Batch) -> list[float] | None:
    """Return the px of each image on the disk per px of its sample, into which it is fitted."""
    if "shape" not in batch or "window" in batch:  # windows are as large as on the disk
        return None
    fractions = batch["shape"] / batch["shape"].new_tensor(batch["image"].shape[-2:])
    scales: list[float] = fractions.amax(1).tolist()
    return scales


def _cut_to_images(found: Sequence[Objects], batch: Batch, scales: Sequence[float]) -> None:
    """Clip boxes to their image in the middle of its sample, as `predict` does.

    Boxes outside the image are dropped.
    """
    sample_px = batch["shape"].new_tensor(batch["image"].shape[-2:])
    for objects, shape_px, scale in zip(found, batch["shape"], scales, strict=True):
        margin_px = (sample_px - shape_px / scale) / 2
        low = (margin_px - 0.5).floor().clamp(min=0)  # images begin at a whole pixel
        corners = torch.stack([low, sample_px - low]).flip(1).to(objects["boxes"])
        boxes = objects["boxes"].clamp(corners[0].repeat(2), corners[1].repeat(2))
        is_inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
        objects["boxes"] = boxes[is_inside]
        for name in ("classes", "scores"):
            objects[name] = objects[name][is_inside]


def _read_marked(marked: MarkedBoxes) -> Objects:
    boxes = torch.from_numpy(marked.corners).float()
    return {"boxes": boxes, "classes": torch.from_numpy(marked.classes)}


def find_objects(
    logits: Tensor,
    boxes: Tensor,
    score_threshold: float,
    iou_threshold: float,
    nms: Suppression = "hard",
) -> Objects:
    """Find the objects of one image.

    Objects are all places and classes above the threshold, except those suppressed by a better one.

    Args:
        logits: [P, classes].
        boxes: [P, 4] corners in pixels.
        score_threshold: Objects have a higher score.
        iou_threshold: See `non_maximum_suppression`.
        nms: `soft` for `soft_suppression`.

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
    corners = boxes[places]
    limits: dict[str, Any] = {"iou_threshold": iou_threshold, "most": MOST_KEPT}
    if nms == "soft":
        best, best_scores = soft_suppression(
            corners, scores, classes, least_score=score_threshold, **limits
        )
    else:
        best = non_maximum_suppression(corners, scores, classes, **limits)
        best_scores = scores[best]
    return {"boxes": corners[best], "scores": best_scores, "classes": classes[best]}
