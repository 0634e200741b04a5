"""`SegmentationModule`: learns to mark the pixels of true defects."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from lit_data.core.checks import check_fraction, check_share
from lit_data.core.devices import widest_float
from lit_data.core.errors import ConfigError
from lit_data.core.types import IGNORED, Batch
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.scored import (
    DefectRecall,
    PixelScores,
    ScoredModule,
    balance_classes,
    check_class_weights,
)
from lit_data.models.segmentation.anomaly_metrics import (
    ANOMALY_METRICS,
    AnomalyMetrics,
    join_curves,
)
from lit_data.models.segmentation.losses import PixelLoss, choose_loss
from lit_data.models.segmentation.top_pixels import SCORE_FRACTION

log = logging.getLogger(__name__)

_STAGES = ("val", "test")
_SCORED_BY = {"fit": ("val",), "validate": ("val",), "test": ("test",)}
_HYPERPARAMETERS = (
    "schedule",
    "dice_weight",
    "focal_gamma",
    "tversky",
    "class_weights",
    "classes",
    "baseline",
    "false_alarms_per_patch",
    "anomaly_metrics",
    "image_score_fraction",
    "quantile",
    "margin",
)
_LEAST_PROBABILITY = 1e-12
_ANY_REFERENCE = (-10.0, 100.0)
_THRESHOLDS = {
    "predict_threshold": 0.5,
    "image_threshold": -1.0,
    "image_threshold_fraction": -1.0,
}


class SegmentationModule(ScoredModule):
    """A net with a loss for rare pixels, scored in comparison with the plain difference.

    It takes batches with ``image`` [B, 3, H, W] float32 in 0..1 and ``mask`` [B, 1, H, W] in
    {0, 1}, or numbers of `classes`; 255 where pixels are ignored.

    It logs ``train/loss`` in each step, ``val/loss`` in training, and after validation and test,
    with the prefix ``val/`` or ``test/``:

    - ``average_precision``: of pixels;
    - ``dice``: of pixels, at probability 0.5;
    - ``defect_recall``: fraction of defects found at 0.1 false alarms per patch;
    - with `baseline`, each of them with the suffix ``_baseline`` for the score ``|target -
      mean(ref)|``, with Dice at its best threshold;
    - with `classes`, ``iou_NAME`` and ``dice_NAME`` of each class, and ``mean_iou`` and
      ``mean_dice`` of the classes present; all other scores count every class as a defect;
    - with `anomaly_metrics`, those of `AnomalyMetrics` for whole images, or for those of the
      datamodule's ``draw_images`` if a split has them. With `baseline`, average precision and Dice
      stay those of patches. Checkpoints then hold the thresholds of the last validation for
      ``predict``: ``predict_threshold`` of pixels; ``image_threshold`` of images, or -1 unless good
      and defective images were validated, with ``image_threshold_fraction``, the fraction it is
      for; and with `baseline` ``reference_limits``, of matching references;
    - with `quantile`, the thresholds ``good_threshold`` and ``image_good_threshold``, only after
      validation.

    Scores of a split that has nothing to score, such as recall without a defect, are NaN.

    `load_from_checkpoint` restores the plain arguments; pass `net`, and your own `optimizer`,
    again: ``SegmentationModule.load_from_checkpoint(path, net=CompareNet(width=32))``.

    Args:
        net: Net from images [B, C, H, W] to logits [B, 1, H, W]; with `classes`, to one logit for
            the background and one for each class.
        optimizer: Function that makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` keeps that of the
            optimizer.
        loss: `rare` for defects of a few pixels, `mean` for masks that fill more, see `PixelLoss`;
            or a loss of your own for logits [B, 1, H, W] and masks of that shape, with `classes`
            for [B, K, H, W] and numbers [B, H, W] int64, with 255 where pixels are ignored.
        dice_weight: See `PixelLoss`, also for `focal_gamma` and `tversky`.
        class_weights: See `PixelLoss`; `balanced` is ``pixels / (K * pixels of the class)`` in the
            training images.
        classes: Names of the kinds of defects that are distinguished.
        false_alarms_per_patch: Rate at which ``defect_recall`` is measured; None leaves it out.
        baseline: Also score the difference between channel 0, a target, and the others, which are
            its references.
        anomaly_metrics: Log the metrics of anomaly detection; ``image_index`` [B] gives the image
            of each patch.
        image_score_fraction: Fraction of an image's pixels, the highest ones, whose mean scores it,
            at least 1 and at most 1024 pixels; 0 uses its highest pixel.
        quantile: Fraction of the good validation images below the thresholds, by the score of the
            image and by its highest pixel; 1 is the highest of them. None uses the thresholds of
            the largest F1, which require defective images.
        margin: Fraction by which the odds of the thresholds of `quantile` are raised, because a few
            images do not show the highest score.

    Raises:
        ConfigError: The schedule or the loss is unknown, a fraction is out of its range,
            `class_weights` are not one for each class, or `quantile` is given without
            `anomaly_metrics`; later, the net or the datamodule has other classes.
    """

    predict_threshold: Tensor
    image_threshold: Tensor
    image_threshold_fraction: Tensor
    reference_limits: Tensor
    not_in_bar: ClassVar[tuple[str, ...]] = ("_baseline", "iou_", "dice_", *ANOMALY_METRICS)
    exported_as = "maps"
    notes_loss = True

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        loss: Literal["rare", "mean"] | nn.Module = "rare",
        dice_weight: float = 1.0,
        focal_gamma: float = 0.0,
        tversky: Sequence[float] = (0.5, 0.5),
        class_weights: Literal["balanced"] | Sequence[float] | None = None,
        classes: Sequence[str] | None = None,
        false_alarms_per_patch: float | None = 0.1,
        baseline: bool = True,
        anomaly_metrics: bool = False,
        image_score_fraction: float = SCORE_FRACTION,
        quantile: float | None = None,
        margin: float = 0.05,
    ) -> None:
        check_fraction("image_score_fraction", image_score_fraction)
        _check_quantile(quantile, margin, anomaly_metrics=anomaly_metrics)
        optimizer = optimizer or partial(torch.optim.AdamW, lr=2e-2, weight_decay=1e-2)
        super().__init__(net, optimizer=optimizer, schedule=schedule)
        self.classes = tuple(map(str, classes or ()))
        self.class_weights = class_weights
        names = ("background", *(self.classes or ("defect",)))
        check_class_weights(class_weights, names)
        first_weights = class_weights
        if class_weights == "balanced":
            first_weights = [1.0] * len(names)  # until `on_fit_start` knows the data
        self.loss = choose_loss(
            loss,
            class_weights=first_weights,
            dice_weight=dice_weight,
            focal_gamma=focal_gamma,
            tversky=tversky,
        )
        self.suffixes = ("", "_baseline") if baseline else ("",)
        self.image_score_fraction = image_score_fraction
        if anomaly_metrics:
            for name, value in _THRESHOLDS.items():
                self.register_buffer(name, torch.tensor(value))
            if baseline:
                self.register_buffer("reference_limits", torch.tensor(_ANY_REFERENCE))
        fraction = image_score_fraction if anomaly_metrics else None
        self.scores = nn.ModuleDict(_make_scores(self.suffixes, false_alarms_per_patch, fraction))
        self.quantile, self.margin = quantile, margin
        self._is_drawn = dict.fromkeys(_STAGES, False)
        if self.classes:
            self.class_scores = nn.ModuleDict()
            for stage in _STAGES:
                self.class_scores[f"{stage}_classes"] = ClassScores(self.classes)
        # Plain values only, so that checkpoints load with weights_only=True.
        named_loss = ("loss",) if isinstance(loss, str) else ()
        self.save_hyperparameters(*_HYPERPARAMETERS, *named_loss)

    @override
    def setup(self, stage: str) -> None:
        """Refuse a datamodule with other classes, and take the kinds of its defects.

        Raises:
            ConfigError: The classes differ.
        """
        datamodule = self._datamodule
        known = tuple(getattr(datamodule, "classes", self.classes) or ())
        if stage != "predict" and known != self.classes:
            raise ConfigError(
                f"the datamodule has the classes {list(known) or 'none'} and the model "
                f"{list(self.classes) or 'none'}: set model.classes and the outputs of model.net "
                "to match data.classes"
            )
        draw_images = getattr(datamodule, "draw_images", _draw_none)
        for name in _SCORED_BY.get(stage, ()):
            metrics: Any = self.scores[name]
            if "images" in metrics:
                drawn = draw_images(name)
                self._is_drawn[name] = drawn is not None
                metrics["images"].look_at(drawn or datamodule)

    @override
    def on_fit_start(self) -> None:
        if self.class_weights == "balanced":
            weights: Any = self.loss.class_weights
            weights.copy_(balance_classes(self.trainer))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 1, H, W] of images [B, 3, H, W].

        With classes [B, K, H, W], the background first.

        Raises:
            ConfigError: The net gives logits of another shape.
        """
        logits: Tensor = self.net(images)
        logit_count = len(self.classes) + 1 if self.classes else 1
        if logits.ndim != 4 or logits.shape[1] != logit_count:
            names = f", for the background and {', '.join(self.classes)}" if self.classes else ""
            raise ConfigError(
                f"the net gives {list(logits.shape)} and {logit_count} logits for each pixel are "
                f"needed{names}: set model.net.classes={logit_count}, or the option of your net"
            )
        return logits

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        return self._compare(self(batch["image"]), batch)

    def _compare(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of logits."""
        masks = batch["mask"]
        takes_masks = isinstance(self.loss, PixelLoss) or not self.classes
        loss: Tensor = self.loss(logits, masks if takes_masks else masks[:, 0].long())
        return loss

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return probabilities with the positions needed to stitch them into images.

        Returns:
            ``probability`` [B, 1, H, W] float32 in 0..1 of a defect; with classes, that of each
            class under ``classes``, [B, K - 1, H, W]; and ``index``, ``image_index``, ``position``
            of the batch.
        """
        answers: dict[str, Tensor] = {
            key: batch[key] for key in ("index", "image_index", "position") if key in batch
        }
        logits = self(batch["image"]).float()
        answers["probability"] = _join_classes(logits).sigmoid()
        if self.classes:
            answers["classes"] = logits.softmax(1)[:, 1:]
        return answers

    @override
    def invert(self, answers: Tensor, images: Tensor) -> Tensor:
        """Return logits by probabilities [B, 1, H, W], or with those of the classes behind."""
        exact = answers.double()
        if not self.classes:
            return exact.logit(eps=_LEAST_PROBABILITY).float()
        probabilities = torch.cat((1 - exact[:, :1], exact[:, 1:]), 1)
        return probabilities.clamp(min=_LEAST_PROBABILITY).log().float()

    @override
    def score(self, batch: Batch, stage: str) -> None:
        masks = batch["mask"].float()
        answers = self(batch["image"])
        if "drawn" not in batch:
            self.note_loss(batch, lambda: self._compare(answers, batch))
        logits = answers.float()
        if self.classes:
            scores: Any = self.class_scores[f"{stage}_classes"]
            scores.update(logits, masks[:, 0].long())
            logits = _join_classes(logits)
            masks = torch.where(masks == IGNORED, masks, masks.clamp(max=1))
        probability = logits.sigmoid()
        if "drawn" in batch:
            # Without any, empty states remain, which all ranks need to gather theirs.
            drawn = batch["drawn"]
            places = {name: batch[name][drawn] for name in ("image_index", "position")}
            self._score_images(stage, probability[drawn], masks[drawn], places)
            return
        # Patches with drawn defects show no whole image.
        if not self._is_drawn[stage]:
            self._score_images(stage, probability, masks, batch)
        # Probabilities close to 1 are equal in float32, logits are not.
        self._score_pixels(stage, probability, logits, masks, batch.get("unmarked"))
        if "_baseline" in self.suffixes:
            difference = plain_difference(batch["image"])
            self._score_pixels(f"{stage}_baseline", difference, difference, masks)

    def _score_images(self, stage: str, scores: Tensor, masks: Tensor, batch: Batch) -> None:
        metrics: Any = self.scores[stage]
        if "images" in metrics:
            names = ("image_index", "position", "unmarked")
            metrics["images"].update(scores, masks, *map(batch.get, names))

    def _score_pixels(
        self,
        name: str,
        scores: Tensor,
        ranks: Tensor,
        masks: Tensor,
        unmarked: Tensor | None = None,
    ) -> None:
        metrics: Any = self.scores[name]
        if "pixels" in metrics:
            metrics["pixels"].update(scores, masks)
        if "defects" in metrics:
            if unmarked is not None:  # their patches would allow false alarms
                ranks, masks = ranks[~unmarked], masks[~unmarked]
            metrics["defects"].update(ranks, masks)

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        has_images = not self._is_drawn[stage] or self._score_drawn(stage)
        named: dict[str, Tensor] = {}
        for suffix in self.suffixes:
            metrics: Any = self.scores[stage + suffix]
            values: dict[str, Tensor] = {}
            if "images" in metrics and has_images:
                values |= self._take_images(metrics["images"], stage)
            if "pixels" in metrics:
                values |= metrics["pixels"].compute()
            if not suffix:
                self.curves[stage] = join_curves(dict(metrics.items()))
            if "defects" in metrics:
                values["defect_recall"] = metrics["defects"].compute()
            named |= {f"{name}{suffix}": value for name, value in values.items()}
            for metric in metrics.values():
                metric.reset()
        if self.classes:
            scores: Any = self.class_scores[f"{stage}_classes"]
            named |= scores.compute()
            scores.reset()
        return named

    def _take_images(self, images: AnomalyMetrics, stage: str) -> dict[str, Tensor]:
        """Return the scores of images; validation chooses the thresholds that a test uses."""
        if stage == "val":
            images.good_quantile, images.margin = self.quantile, self.margin
        elif self.image_threshold >= 0:
            images.image_threshold = float(self.image_threshold)
        scores = images.compute()
        if stage == "val":
            self._take_thresholds(scores)
            self._take_limits()
        if images.confusion is not None:
            self.confusion[stage] = images.confusion._replace(is_drawn=self._is_drawn[stage])
        return scores

    def _score_drawn(self, stage: str) -> bool:
        """Score this rank's whole images without changes and with synthetic defects.

        Returns:
            False in the sanity check before a training, in which none are scored.
        """
        trainer = self.trainer
        if trainer.sanity_checking:
            return False
        drawn = self._datamodule.draw_images(stage)
        is_validation = stage == "val"
        step = trainer.strategy.validation_step if is_validation else trainer.strategy.test_step
        limit = trainer.limit_val_batches if is_validation else trainer.limit_test_batches
        images, ranks = drawn.choose(limit), trainer.world_size
        shares = [images[rank::ranks] for rank in range(ranks)]
        for batch in drawn.batches(shares, trainer.global_rank, self._datamodule.batch_size):
            step({name: value.to(self.device) for name, value in batch.items()}, 0)
        return True

    def _take_thresholds(self, scores: Mapping[str, Tensor]) -> None:
        if "good_threshold" in scores:
            self.predict_threshold.fill_(scores["good_threshold"])
            self.image_threshold.fill_(scores["image_good_threshold"])
            self.image_threshold_fraction.fill_(self.image_score_fraction)
            return
        if self.quantile is not None:
            log.warning(
                "validation has no good image, so model.quantile=%g gives no threshold: the "
                "threshold of the best F1 is used, if there is one",
                self.quantile,
            )
        # Without a defect among the validated pixels, no threshold is better than another.
        if scores.get("f1_max", 0) > 0:
            self.predict_threshold.fill_(scores["f1_max_threshold"])
        if scores.get("image_f1_max", 0) > 0:
            self.image_threshold.fill_(scores["image_f1_max_threshold"])
            self.image_threshold_fraction.fill_(self.image_score_fraction)

    def _take_limits(self) -> None:
        find_limits = getattr(self._datamodule, "find_reference_limits", lambda: None)
        limits = find_limits() if hasattr(self, "reference_limits") else None
        if limits is not None:
            self.reference_limits.copy_(torch.tensor(limits))

    @property
    def _datamodule(self) -> Any:  # noqa: ANN401 - anybody's, or None
        return getattr(self.trainer, "datamodule", None)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the thresholds of the last validation, because weight averaging may average buffers."""
        for name, value in self.named_buffers():
            if name in _THRESHOLDS or name == "reference_limits":
                checkpoint["state_dict"][name] = value


class ClassScores(MulticlassConfusionMatrix):
    """IoU and Dice of each class after the background, and their means.

    All pixels count that are not ignored.

    Args:
        classes: Names of the classes.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__(len(classes) + 1, ignore_index=IGNORED)
        self.classes = classes

    @override
    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]  # the matrix is what these are made of
        """Return the scores; NaN for classes without pixels, and for means without classes."""
        counts = super().compute()
        matrix = counts.to(widest_float(counts.device))
        hits = matrix.diagonal()[1:]
        true_counts = matrix.sum(1)[1:]
        either = matrix.sum(0)[1:] + true_counts  # pixels of the prediction and of the mask
        absent = true_counts == 0
        iou = (hits / (either - hits)).masked_fill(absent, torch.nan).float()
        dice = (2 * hits / either).masked_fill(absent, torch.nan).float()
        scores = {f"iou_{name}": score for name, score in zip(self.classes, iou, strict=True)}
        scores |= {f"dice_{name}": score for name, score in zip(self.classes, dice, strict=True)}
        return scores | {"mean_iou": iou[~absent].mean(), "mean_dice": dice[~absent].mean()}


def _check_quantile(quantile: float | None, margin: float, *, anomaly_metrics: bool) -> None:
    if not 0 <= margin < math.inf:
        raise ConfigError(f"margin={margin}: give a finite number of 0 or more")
    if quantile is None:
        return
    check_share("quantile", quantile)
    if not anomaly_metrics:
        raise ConfigError(
            f"quantile={quantile} is of the scores of images: set anomaly_metrics=true"
        )


def _join_classes(logits: Tensor) -> Tensor:
    """Return the logit of any defect, [B, 1, H, W], from [B, 1, H, W] or from [B, K, H, W]."""
    if logits.shape[1] == 1:
        return logits
    return logits[:, 1:].logsumexp(1, keepdim=True) - logits[:, :1]


def plain_difference(images: Tensor) -> Tensor:
    """Return the simplest score, |target - mean(references)|.

    Args:
        images: [B, C, H, W]; channel 0 is the target.

    Returns:
        [B, 1, H, W] float32.
    """
    return (images[:, :1] - images[:, 1:].mean(1, keepdim=True)).abs().float()


def _draw_none(_: str) -> None:
    """Replace ``draw_images`` of a datamodule without it."""


def _make_scores(
    suffixes: Sequence[str],
    false_alarms_per_patch: float | None,
    image_score_fraction: float | None,
) -> dict[str, nn.ModuleDict]:
    scores: dict[str, nn.ModuleDict] = {}
    for stage, suffix in product(_STAGES, suffixes):
        # The plain difference is not a probability, so its Dice is that of its best threshold.
        metrics: dict[str, Metric] = {}
        if image_score_fraction is not None and not suffix:
            metrics["images"] = AnomalyMetrics(score_fraction=image_score_fraction)
        # Images also score their pixels, each once; with a baseline, the pixels of patches count.
        if "images" not in metrics or "_baseline" in suffixes:
            metrics["pixels"] = PixelScores(threshold=None if suffix else 0.5)
        if false_alarms_per_patch is not None:
            metrics["defects"] = DefectRecall(false_alarms_per_patch=false_alarms_per_patch)
        scores[stage + suffix] = nn.ModuleDict(metrics)
    return scores
