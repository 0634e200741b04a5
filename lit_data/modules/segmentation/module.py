"""`SegmentationModule`: learn to mark the pixels of true defects."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.modules.schedule import OptimizerFactory, Schedule
from lit_data.modules.scored import DefectRecall, PixelScores, ScoredModule
from lit_data.modules.segmentation.anomaly_scores import ANOMALY_SCORES, AnomalyScores
from lit_data.modules.segmentation.compare_net import CompareNet
from lit_data.types import Batch

_DEFECT_PX = 10.0  # a small defect; the mean over all pixels would drown it in background that is right already
_SMOOTH_PX = 2.0  # makes Dice finite, and an empty answer right, where a sample has no defect
_SETTLED = 30.0


def rare_pixel_loss(logits: Tensor, masks: Tensor, *, dice_weight: float = 1.0) -> Tensor:
    """Cross entropy in units of a small defect plus soft Dice, in float32 whatever the precision of the run.

    For each sample the sum of the cross entropy over the pixels, divided by 10, plus `dice_weight` times soft Dice
    (Milletari et al., "V-Net", 3DV 2016), ``1 - (2 sum(p m) + 2) / (sum(p) + sum(m) + 2)``. The loss is the mean over
    the samples. No sample changes the weight of another, so a batch gives the same gradient when it is worked off in
    micro-batches or on several ranks, each weighted by its samples.

    Args:
        logits: [B, 1, H, W].
        masks: [B, 1, H, W] in {0, 1}.
        dice_weight: Weight of the Dice term.

    Returns:
        A scalar.
    """
    masks = masks.float().flatten(1)
    entropy, dice = _compare(logits, masks)
    return (entropy.sum(1) / _DEFECT_PX + dice_weight * dice).mean()


def mean_pixel_loss(logits: Tensor, masks: Tensor, *, dice_weight: float = 1.0) -> Tensor:
    """Mean cross entropy of the pixels plus soft Dice, in float32 whatever the precision of the run.

    As `rare_pixel_loss`, but with the mean over the pixels in place of the sum over 10: for masks that fill a part of
    the image that can be seen from afar.

    Args:
        logits: [B, 1, H, W].
        masks: [B, 1, H, W] in 0..1.
        dice_weight: Weight of the Dice term.

    Returns:
        A scalar.
    """
    masks = masks.float().flatten(1)
    entropy, dice = _compare(logits, masks)
    return (entropy.mean(1) + dice_weight * dice).mean()


def _compare(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each pixel [B, H * W] and soft Dice [B], where masks are [B, H * W]."""
    logits = _settle(logits.float().flatten(1), masks)
    entropy = F.binary_cross_entropy_with_logits(logits, masks, reduction="none")
    probability = logits.sigmoid()
    overlap = 2 * (probability * masks).sum(1)
    return entropy, 1 - (overlap + _SMOOTH_PX) / (probability.sum(1) + masks.sum(1) + _SMOOTH_PX)


def _settle(logits: Tensor, masks: Tensor) -> Tensor:
    """Stop the gradient of pixels that are right beyond 30: below about 1e-38 it makes CPUs ten times slower."""
    return torch.where(masks > 0, logits.clamp(max=_SETTLED), logits.clamp(min=-_SETTLED))


_LOSSES: Final = {"rare": rare_pixel_loss, "mean": mean_pixel_loss}


class SegmentationModule(ScoredModule):
    """A net, a loss for rare pixels, and scores beside those of the plain difference.

    Takes batches with ``image`` [B, 3, H, W] float32 in 0..1 and ``mask`` [B, 1, H, W] in {0, 1}.

    Logs ``train/loss`` in each step, and after validation and test, with ``val/`` or ``test/`` before it:

    - ``average_precision``: of pixels;
    - ``dice``: of pixels, at probability 0.5;
    - ``defect_recall``: share of defects found at 0.1 false alarms per patch;
    - with `baseline` each with ``_baseline`` behind it: the same for the score |target - mean(ref)|, its Dice at the
      best threshold;
    - with `anomaly_scores` those of `AnomalyScores`; checkpoints then hold ``predict_threshold``, where the F1 of the
      last validation is largest, and ``predict`` takes it.

    `load_from_checkpoint(path)` restores the plain arguments; a `net` or `optimizer` of your own is given again:
    ``SegmentationModule.load_from_checkpoint(path, net=CompareNet(width=32))``.

    Args:
        net: From [B, 3, H, W] images to [B, 1, H, W] logits; `CompareNet` by default.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the optimizer has it.
        loss: `rare` for defects of a few pixels, see `rare_pixel_loss`; `mean` for masks that fill more.
        dice_weight: Weight of the Dice term of the loss.
        false_alarms_per_patch: Rate at which ``defect_recall`` is taken; none leaves it out.
        baseline: Channel 0 is a target and the others are its references: score their difference too.
        anomaly_scores: Log what methods of anomaly detection are compared by; ``image_index`` [B] tells whose patches
            they are.

    Raises:
        ConfigError: The schedule or the loss is unknown.
    """

    predict_threshold: Tensor
    not_in_bar: ClassVar[tuple[str, ...]] = ("_baseline", *ANOMALY_SCORES)

    def __init__(
        self,
        net: nn.Module | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        loss: Literal["rare", "mean"] = "rare",
        dice_weight: float = 1.0,
        false_alarms_per_patch: float | None = 0.1,
        baseline: bool = True,
        anomaly_scores: bool = False,
    ) -> None:
        super().__init__(net or CompareNet(), optimizer=optimizer or _make_adamw, schedule=schedule)
        check_choice("loss", loss, tuple(_LOSSES))
        self.loss, self.dice_weight = _LOSSES[loss], dice_weight
        self.suffixes = ("", "_baseline") if baseline else ("",)
        if anomaly_scores:
            self.register_buffer("predict_threshold", torch.tensor(0.5))
        self.scores = nn.ModuleDict(_make_scores(self.suffixes, false_alarms_per_patch, anomaly_scores))
        # Plain values only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters(
            "schedule", "loss", "dice_weight", "false_alarms_per_patch", "baseline", "anomaly_scores"
        )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 1, H, W] of images [B, 3, H, W]."""
        logits: Tensor = self.net(images)
        return logits

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        return self.loss(self(batch["image"]), batch["mask"], dice_weight=self.dice_weight)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Probabilities, with what is needed to put them back into their image.

        Returns:
            ``probability`` [B, 1, H, W] float32 in 0..1, and ``index``, ``image_index``, ``position`` of the batch.
        """
        places: dict[str, Tensor] = {key: batch[key] for key in ("index", "image_index", "position") if key in batch}
        return {"probability": self(batch["image"]).float().sigmoid(), **places}

    @override
    def score(self, batch: Batch, stage: str) -> None:
        images, masks = batch["image"], batch["mask"]
        logits = self(images).float()
        # Probabilities close to 1 are equal in float32, logits are not.
        self._update(stage, logits.sigmoid(), logits, masks, batch.get("image_index"))
        if "_baseline" in self.suffixes:
            difference = plain_difference(images)
            self._update(f"{stage}_baseline", difference, difference, masks)

    def _update(self, name: str, scores: Tensor, ranks: Tensor, masks: Tensor, images: Tensor | None = None) -> None:
        metrics: Any = self.scores[name]
        known = {"images": images} if isinstance(metrics["pixels"], AnomalyScores) else {}
        metrics["pixels"].update(scores, masks, **known)
        if "defects" in metrics:
            metrics["defects"].update(ranks, masks)

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for suffix in self.suffixes:
            metrics: Any = self.scores[stage + suffix]
            found = dict(metrics["pixels"].compute())
            if stage == "val" and found.get("f1_max", 0) > 0:
                self.predict_threshold.fill_(found["f1_max_threshold"])
            if "defects" in metrics:
                found["defect_recall"] = metrics["defects"].compute()
            named |= {f"{name}{suffix}": value for name, value in found.items()}
            for metric in metrics.values():
                metric.reset()
        return named


def plain_difference(images: Tensor) -> Tensor:
    """The score that any engineer would try first: |target - mean(references)|.

    Args:
        images: [B, C, H, W]; channel 0 is the target.

    Returns:
        [B, 1, H, W] float32.
    """
    return (images[:, :1] - images[:, 1:].mean(1, keepdim=True)).abs().float()


def _make_scores(
    suffixes: Sequence[str], false_alarms_per_patch: float | None, anomaly_scores: bool
) -> dict[str, nn.ModuleDict]:
    scores: dict[str, nn.ModuleDict] = {}
    for stage, suffix in product(("val", "test"), suffixes):
        plain = bool(suffix) or not anomaly_scores
        pixels = PixelScores(threshold=None if suffix else 0.5) if plain else AnomalyScores()
        metrics: dict[str, Metric] = {"pixels": pixels}
        if false_alarms_per_patch is not None:
            metrics["defects"] = DefectRecall(false_alarms_per_patch=false_alarms_per_patch)
        scores[stage + suffix] = nn.ModuleDict(metrics)
    return scores


def _make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-2, weight_decay=1e-2)
