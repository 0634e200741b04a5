"""`ScoredModule`: the hooks that our modules share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.core.batch_form import count_samples
from lit_data.core.checks import check_choice
from lit_data.core.devices import widest_float
from lit_data.core.errors import ConfigError
from lit_data.core.types import IGNORED, Batch
from lit_data.models.schedule import (
    OptimizerFactory,
    Schedule,
    make_optimizer,
    schedule_optimizer,
)
from lit_data.models.score_curves import Curve, ScoreCurves, trace_curve

BINS = 8192  # of the scores of pixels
_PEAKS = 32


class PixelScores(Metric):
    """Average precision and Dice of pixels, from a histogram of scores.

    The state is two counts for each of 8192 bins, whatever the number of pixels: torchmetrics' own
    average precision keeps all pixels, or in its binned form compares every pixel with every
    threshold. Average precision is ``sum((R_k - R_(k-1)) * P_k)`` over falling thresholds (Zhu,
    "Recall, precision and average precision", 2004). Dice is ``2 TP / (2 TP + FP + FN)``, at
    `threshold` or at the threshold where it is largest.

    Args:
        threshold: Score from which a pixel counts as a defect, for Dice; None uses the best one,
            which is optimistic.

    Attributes:
        curve: Recall and precision of the last `compute`; None without defect pixels.
    """

    full_state_update = False
    higher_is_better = True
    histogram: Tensor

    def __init__(self, *, threshold: float | None = 0.5) -> None:
        super().__init__()
        self.threshold = threshold
        self.curve: Curve | None = None
        self.add_state("histogram", torch.zeros(2, BINS, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, masks: Tensor) -> None:
        """Count pixels.

        Args:
            scores: Any shape, in 0..1.
            masks: The same shape, in {0, 1}; 255 where pixels are ignored.
        """
        truth = masks.flatten()
        # One histogram of both kinds of pixels, one after the other; ignored ones go to a last bin.
        bins = (find_bins(scores) + BINS * (truth > 0.5)).masked_fill(truth == IGNORED, 2 * BINS)
        self.histogram += torch.bincount(bins, minlength=2 * BINS + 1)[:-1].view(2, BINS)

    def compute(self) -> dict[str, Tensor]:
        """Return ``average_precision`` and ``dice``; both NaN if there are no defect pixels."""
        false, true = self.count_above()
        precision = true / (true + false).clamp(min=1)
        recall = true / true[-1].clamp(min=1)
        steps = torch.diff(recall, prepend=recall.new_zeros(1))
        self.curve = trace_curve(true, false, float(true[-1])) if true[-1] else None
        dice_curve = self.dice_curve()
        if self.threshold is None:
            dice = dice_curve.max()
        else:
            # Thresholds fall, bins rise.
            dice = dice_curve[BINS - 1 - int(find_bins(torch.tensor([self.threshold])))]
        values = {"average_precision": (steps * precision).sum().float(), "dice": dice.float()}
        return {name: where_counted(value, true[-1]) for name, value in values.items()}

    def count_above(self) -> Tensor:
        """Count pixels without and with a defect above each of the descending thresholds, [2, 8192]."""
        return self.histogram.flip(1).cumsum(1).to(widest_float(self.histogram.device))

    def dice_curve(self) -> Tensor:
        """Return Dice at each of the descending thresholds, [8192]."""
        false, true = self.count_above()
        dice: Tensor = 2 * true / (true + false + true[-1]).clamp(min=1)
        return dice


class DefectRecall(Metric):
    """Fraction of defects found at a fixed number of false alarms per patch.

    A defect is a connected region (8 neighbors) of the mask; its score is the highest in it. A
    false alarm is a local maximum of the score (the highest within 5 x 5 px, the first of equal
    ones) farther than 3 px from any mask. A defect is found when its score is above a threshold,
    the lowest above which there are no more than `false_alarms_per_patch` false alarms on average:
    one point of the FROC curve (Chakraborty, "Maximum likelihood analysis of free-response ROC
    data", 1989). Of each patch the 32 highest alarms are kept, which bounds the state; the recall
    is exact unless a single patch has more of them above the threshold.

    Args:
        false_alarms_per_patch: The allowed rate.
    """

    full_state_update = False
    higher_is_better = True
    alarms: list[Tensor]
    defects: list[Tensor]
    patches: Tensor

    def __init__(self, *, false_alarms_per_patch: float = 0.1) -> None:
        super().__init__()
        self.false_alarms_per_patch = false_alarms_per_patch
        self.add_state("alarms", [], dist_reduce_fx="cat")
        self.add_state("defects", [], dist_reduce_fx="cat")
        self.add_state("patches", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, masks: Tensor) -> None:
        """Collect alarms and defects.

        Args:
            scores: [B, 1, H, W] float.
            masks: [B, 1, H, W] in {0, 1}; 255 where pixels are ignored.
        """
        # A local maximum is the place that wins its own window of 5 x 5 px.
        far = F.max_pool2d(masks.float(), 7, 1, 3) == 0
        _, highest = F.max_pool2d(scores, 5, 1, 2, return_indices=True)
        numbers = torch.arange(scores[0].numel(), device=scores.device).view(scores[0].shape)
        peaks = scores.masked_fill((highest != numbers) | ~far, -torch.inf).flatten(1)
        append_rows(self.alarms, peaks.topk(min(_PEAKS, peaks.shape[1])).values.flatten().float())
        append_rows(self.defects, _score_defects(scores, masks))
        self.patches += len(scores)

    def compute(self) -> Tensor:
        """Return the recall, 0 to 1; NaN if there are no defects."""
        defects = dim_zero_cat(self.defects)
        alarms = dim_zero_cat(self.alarms)
        allowed = int(self.false_alarms_per_patch * int(self.patches))
        ranked = alarms.sort(descending=True).values
        threshold = ranked[allowed] if allowed < len(ranked) else ranked.new_tensor(-torch.inf)
        return (defects > threshold).float().mean()


def where_counted(score: Tensor, count: Tensor | float) -> Tensor:
    """Return a score, or NaN if there is nothing that it is measured on.

    Args:
        score: Score of any shape.
        count: Number of things that it is measured on.
    """
    return score if count > 0 else torch.full_like(score, torch.nan)


def append_rows(parts: list[Tensor], rows: Tensor) -> None:
    """Append rows to a metric's state of a few tensors, each longer than the ones after it.

    A tensor for each batch would fragment the memory between the large ones of its step: 6 MB for
    each image of 1024 x 1024 px. No tensor is written into, so a copy of the list can undo the
    change.

    Args:
        parts: The state.
        rows: [m, ...].
    """
    parts.append(rows.detach())
    while len(parts) > 1 and len(parts[-1]) >= len(parts[-2]):
        last = parts.pop()
        parts[-1] = torch.cat((parts[-1], last))


def find_bins(scores: Tensor) -> Tensor:
    """Return the bins of `PixelScores`, which are narrow near 0 and 1 for scores of rare defects.

    Args:
        scores: Any shape, in 0..1.

    Returns:
        [N] int64 in 0..8191.
    """
    exact = scores.flatten().to(widest_float(scores.device))
    logit = torch.logit(exact, eps=max(1e-9, torch.finfo(exact.dtype).eps / 2))
    return ((logit / 42 + 0.5) * BINS).long().clamp(0, BINS - 1)  # logit(1e-9) is -20.7


def is_marked(masks: Tensor) -> Tensor:
    """Return True where masks are marked and not ignored, bool of the same shape."""
    return (masks > 0.5) & (masks != IGNORED)


def bin_edge(number: int) -> Tensor:
    """Return the lowest score of a bin of `find_bins`, a scalar."""
    return torch.tensor((number / BINS - 0.5) * 42).sigmoid()


def find_best_f1(
    scores: Tensor, hits: Tensor, true_count: int, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the largest F1, and its threshold.

    The threshold is halfway, in logits, between the lowest score that counts and the next lower one.

    Args:
        scores: [n] float64 in 0..1, the highest first.
        hits: [n] number of correct items up to each score.
        true_count: Number of items to find.
        eps: Smallest distance of scores from 0 and 1, to which they are clipped.
    """
    f1 = 2 * hits / (torch.arange(1, len(scores) + 1) + true_count)
    # Of equal scores.
    is_last = torch.cat((scores[1:] < scores[:-1], torch.ones(1, dtype=torch.bool)))
    levels = scores[is_last]
    f1 = f1[is_last]
    best = int(f1.argmax())
    neighbours = levels[[best, min(best + 1, len(levels) - 1)]]
    middle = torch.logit(neighbours, eps=eps).mean().sigmoid()
    return f1[best], torch.minimum(middle, levels[best])


def _score_defects(scores: Tensor, masks: Tensor) -> Tensor:
    """Return the highest score in each connected region of the masks, [defects]."""
    import cv2
    import numpy as np

    best_scores: list[float] = []
    marked = is_marked(masks)
    for row in torch.nonzero(marked.flatten(1).any(1)).flatten().tolist():
        mask = marked[row, 0].cpu().numpy().astype(np.uint8)
        count, labels = cv2.connectedComponents(mask, connectivity=8)
        row_scores = scores[row, 0].detach().float().cpu().numpy()
        best = np.full(count, -np.inf, dtype=np.float32)
        np.maximum.at(best, labels.ravel(), row_scores.ravel())
        best_scores += best[1:].tolist()  # 0 is the background
    return torch.tensor(best_scores, dtype=torch.float32, device=scores.device)


def _lay_state_like_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded state the memory format of its weight, as a fused step on the CPU requires."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            is_like_weight = isinstance(value, Tensor) and value.shape == weight.shape
            if is_like_weight and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def refuse_true_precision(module: LightningModule) -> None:
    """Refuse a Trainer that gives a module weights of another dtype than float32.

    Raises:
        ConfigError: The Trainer does.
    """
    precision = module.trainer.precision
    if precision.endswith("-true") and precision != "32-true":
        raise ConfigError(
            f"trainer.precision={precision}: {type(module).__name__} needs float32 weights; use "
            "bf16-mixed, or let callbacks.amp choose the precision"
        )


def balance_classes(trainer: Trainer) -> Tensor:
    """Return the weights [K] with which all classes have equal weight in the training split.

    Raises:
        ConfigError: The datamodule does not count its classes.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    if not hasattr(datamodule, "count_classes"):
        raise ConfigError(
            "class_weights=balanced needs a datamodule that counts the classes: give the "
            "weights as a list"
        )
    counts = torch.as_tensor(datamodule.count_classes("train").sum(0))
    return counts.sum() / (len(counts) * counts.clamp(min=1))


def check_class_weights(weights: Sequence[float] | str | None, classes: Sequence[str]) -> None:
    """Refuse weights that are not one for each class.

    Args:
        weights: Weights of the loss, or `balanced`; None for equal weights.
        classes: Names in the order of the weights.

    Raises:
        ConfigError: The number of weights is not that of the classes, or a weight is below 0.
    """
    if weights is None:
        return
    if isinstance(weights, str):
        check_choice("class_weights", weights, ("balanced",))
        return
    if len(weights) != len(classes) or not all(weight >= 0 for weight in weights):
        raise ConfigError(
            f"class_weights={list(weights)}: give one number of at least 0 for each of "
            f"{', '.join(classes)}"
        )


class Confusion(NamedTuple):
    """Number of images of each class by predicted class.

    Attributes:
        classes: Names of the classes.
        counts: A row for each true class, a column for each predicted class.
        is_drawn: True if the defects are synthetic.
        verdicts: Good and defective images (rows) by their verdicts (columns), if the classes are
            different ones.
    """

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]
    is_drawn: bool = False
    verdicts: Sequence[Sequence[int]] | None = None


class ScoredModule(LightningModule):
    """A net that learns from one loss and is scored on whole stages.

    It logs ``train/loss`` in each step, ``val/loss`` after each validation of a training, and the
    scores of `take_scores` after validation and test, with the prefix ``val/`` or ``test/``. Names
    that contain one of `not_in_bar` are not in the progress bar.

    Args:
        net: The net.
        optimizer: Function that makes the optimizer from the parameters.
        schedule: Learning rate over the run, see `learning_rate_factor`.

    Attributes:
        exported_as: Task of the exported files that the module can score; None if there is none.
        confusion: Images by true and predicted class in the last ``val`` and ``test``, if there are
            any.
        curves: Precision over recall, and scores of images, of the last ``val`` and ``test``.

    Raises:
        ConfigError: The schedule is unknown.
    """

    not_in_bar: ClassVar[tuple[str, ...]] = ("_baseline",)
    exported_as: ClassVar[str | None] = None
    notes_loss: ClassVar[bool] = False
    """True if `score` passes its outputs to `note_loss`, so that no batch goes through the net twice."""

    def __init__(self, net: nn.Module, *, optimizer: OptimizerFactory, schedule: Schedule) -> None:
        super().__init__()
        check_choice("schedule", schedule, get_args(Schedule))
        self.net = net
        self.optimizer_factory = optimizer
        self.schedule = schedule
        self.confusion: dict[str, Confusion] = {}
        self.curves: dict[str, ScoreCurves] = {}
        self.losses = MeanMetric(nan_strategy="disable")  # of a validation
        parameter_count = sum(weight.numel() for weight in net.parameters())
        self.save_hyperparameters({"num_parameters": parameter_count})

    @abstractmethod
    def find_loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar."""

    @abstractmethod
    def score(self, batch: Batch, stage: str) -> None:
        """Add a batch to the scores of ``val`` or ``test``."""

    @abstractmethod
    def take_scores(self, stage: str) -> Mapping[str, Tensor]:
        """Return the scores of a stage, the same on all ranks, and reset them.

        Scores without anything to score are NaN: a recall of no defects is neither 0 nor 1.
        """

    def note_loss(self, batch: Batch, find: Callable[[], Tensor]) -> None:
        """Add the loss of a batch to ``val/loss``; do nothing outside the validation of a training.

        Args:
            batch: Batch of a validation.
            find: Function that returns the scalar loss of the batch from existing outputs.
        """
        if self._is_validating:
            # Once for each sample, as weights count nothing where NaN is kept.
            self.losses.update(find().detach().float().expand(count_samples(batch)))

    @property
    def _is_validating(self) -> bool:
        trainer = self._trainer
        return (
            trainer is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.training
        )

    def invert(self, answers: Tensor, images: Tensor) -> Any:  # noqa: ANN401 - as `forward` gives it
        """Return what `forward` gives for images, from the outputs of an exported file.

        Args:
            answers: Outputs of the file's graph.
            images: Images [B, C, H, W].
        """
        raise NotImplementedError

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.find_loss(batch)
        # Not in the progress bar, which would wait for the device after each step.
        self.log("train/loss", loss, batch_size=count_samples(batch))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.score(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.score(batch, "test")

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.optimizer_factory, self)
        optimizer.register_load_state_dict_post_hook(_lay_state_like_weights)
        return schedule_optimizer(optimizer, self.schedule, self.trainer)

    @override
    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: Any) -> None:
        """Keep the learning rate if its metric is NaN, which compares as no worse than any."""
        if metric is None or not torch.isnan(torch.as_tensor(metric)):
            super().lr_scheduler_step(scheduler, metric)

    def _log_scores(self, stage: str) -> None:
        if self.notes_loss and self._is_validating:
            # So that a rank without a batch takes part.
            self.losses.update(torch.zeros(0, device=self.device))
            # The mean over all ranks already; Lightning warns without `sync_dist`.
            self.log(f"{stage}/loss", self.losses.compute(), batch_size=1, sync_dist=True)
            self.losses.reset()
        for name, value in self.take_scores(stage).items():
            in_bar = not any(part in name for part in self.not_in_bar)
            self.log(f"{stage}/{name}", value, prog_bar=in_bar, batch_size=1, sync_dist=True)
