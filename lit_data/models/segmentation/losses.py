"""`PixelLoss`: cross entropy of pixels and overlap of regions, for two or more classes."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.types import IGNORED

# Size of a small defect, which a mean over all pixels would hide among correct background.
_DEFECT_PX = 10.0
# Makes overlap finite, and an empty answer correct, if a sample has no defect.
_SMOOTH_PX = 2.0
_SETTLED = 30.0


class PixelLoss(nn.Module):
    """Cross entropy of pixels plus the overlap of regions.

    It is computed in float32, regardless of the precision of the run.

    The loss of a sample is the sum of the cross entropy over its pixels divided by 10, the size of
    a small defect (`rare`), or the mean (`mean`), plus `dice_weight` times soft Dice (Milletari et
    al., "V-Net", 3DV 2016), ``1 - (2 sum(p m) + 2) / (sum(p) + sum(m) + 2)``. With `mean`, only
    samples with a defect have a Dice term: that of the others would be large for a few wrong
    pixels, and outweigh the defects. With more classes, Dice is the mean of that of any defect and
    those of the classes in the sample: if most samples lack most classes, the terms of absent
    classes would dominate. The loss is the mean over the samples. No sample changes the weight of
    another, so a batch gives the same gradient in micro-batches or on several ranks, each weighted
    by its samples.

    Args:
        unit: `rare` for defects of a few pixels; `mean` for masks that fill a large part of the
            image.
        dice_weight: Weight of the overlap.
        focal_gamma: Exponent of the factor ``(1 - p)^gamma`` on the cross entropy of a pixel, with
            the probability p of the true class (Lin et al., "Focal loss for dense object
            detection", ICCV 2017); 0 has no effect.
        tversky: Weights of false alarms and of misses in the overlap (Salehi et al., "Tversky loss
            function", MLMI 2017); 0.5 each is Dice.
        class_weights: [K] factors on the cross entropy of pixels by their true class, the
            background first.

    Raises:
        ConfigError: A value is out of its range.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        unit: Literal["rare", "mean"] = "rare",
        *,
        dice_weight: float = 1.0,
        focal_gamma: float = 0.0,
        tversky: Sequence[float] = (0.5, 0.5),
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_choice("loss", unit, ("rare", "mean"))
        if len(tversky) != 2 or min(*tversky, dice_weight, focal_gamma) < 0:
            raise ConfigError(
                f"tversky={list(tversky)}, dice_weight={dice_weight}, focal_gamma={focal_gamma}: "
                "need two weights of false alarms and misses, and nothing below 0"
            )
        self.unit = unit
        self.dice_weight = dice_weight
        self.focal_gamma = focal_gamma
        self.tversky = tuple(tversky)
        weights = None if class_weights is None else torch.tensor(list(class_weights))
        # The options repeat them.
        self.register_buffer("class_weights", weights, persistent=False)

    @override
    def forward(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            logits: [B, 1, H, W] for a defect, or [B, K, H, W] for the background and each kind of
                defect.
            masks: [B, 1, H, W] in 0..1, or class numbers; 255 where pixels are ignored.
        """
        logits = logits.float().flatten(2)
        truth = masks.float().flatten(2)
        known = truth != IGNORED
        truth = truth.masked_fill(~known, 0)
        if logits.shape[1] == 1:
            entropy, probability, target = _compare_two(logits, truth)
        else:
            entropy, probability, target = _compare_classes(logits, truth)
        if self.focal_gamma:
            entropy = entropy * (1 - torch.exp(-entropy)).clamp(min=1e-6) ** self.focal_gamma
        if self.class_weights is not None:
            entropy = entropy * self.class_weights.float()[truth[:, 0].round().long()]
        entropy = entropy * known[:, 0]
        unit_px: Tensor | float = _DEFECT_PX
        if self.unit == "mean":
            unit_px = known[:, 0].sum(1).clamp(min=1)
        pixels = entropy.sum(1) / unit_px
        missed = self._miss_regions(probability * known, target * known)
        if self.unit == "mean":
            missed = missed * (target * known).flatten(1).any(1)
        return (pixels + self.dice_weight * missed).mean()

    def _miss_regions(self, probability: Tensor, target: Tensor) -> Tensor:
        """Return the missing overlap, [B], of tensors [B, classes after the background, H * W]."""
        if target.shape[1] == 1:
            return self._miss_overlap(probability, target)[:, 0]
        any_defect = probability.sum(1, keepdim=True)
        true_defect = target.sum(1, keepdim=True)
        union = self._miss_overlap(any_defect, true_defect)[:, 0]
        present = target.any(2)
        of_present = (self._miss_overlap(probability, target) * present).sum(1)
        by_class = of_present / present.sum(1).clamp(min=1)
        return torch.where(present.any(1), (union + by_class) / 2, union)

    def _miss_overlap(self, probability: Tensor, target: Tensor) -> Tensor:
        """Return the missing overlap of each class, [B, classes]."""
        false_alarms, misses = self.tversky
        both = 2 * (probability * target).sum(2)
        either = 2 * false_alarms * probability.sum(2) + 2 * misses * target.sum(2)
        either = either + (1 - false_alarms - misses) * both
        return 1 - (both + _SMOOTH_PX) / (either + _SMOOTH_PX)


def choose_loss(loss: Literal["rare", "mean"] | nn.Module, **options: Any) -> nn.Module:  # noqa: ANN401 - of `PixelLoss`
    """Return a loss of your own unchanged, or the `PixelLoss` of that name.

    Raises:
        ConfigError: Your loss would ignore an option that is not at its default.
    """
    if not isinstance(loss, nn.Module):
        return PixelLoss(loss, **options)
    parameters = inspect.signature(PixelLoss).parameters
    for name, value in options.items():
        plain = tuple(value) if isinstance(value, list) else value
        if plain != parameters[name].default:
            raise ConfigError(
                f"{name}={value!r} is an option of loss=rare and loss=mean, which your "
                f"{type(loss).__name__} does not have: remove it"
            )
    return loss


def _compare_two(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropy [B, H * W], and probability and truth of a defect [B, 1, H * W]."""
    # The gradient of pixels that are correct beyond a logit of 30 is stopped, because CPUs are ten
    # times slower with gradients below about 1e-38.
    settled = torch.where(truth > 0, logits.clamp(max=_SETTLED), logits.clamp(min=-_SETTLED))
    entropy = F.binary_cross_entropy_with_logits(settled, truth, reduction="none")[:, 0]
    return entropy, settled.sigmoid(), truth


def _compare_classes(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropy [B, H * W], and each class's probability and truth [B, K - 1, H * W]."""
    numbers = truth[:, 0].long()
    scores = logits.log_softmax(1).clamp(min=-_SETTLED)
    entropy = -scores.gather(1, numbers[:, None])[:, 0]
    classes = torch.arange(1, logits.shape[1], device=logits.device)[:, None]
    return entropy, scores[:, 1:].exp(), (numbers[:, None] == classes).float()
