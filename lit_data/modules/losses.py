"""Losses of masks: for those in which nearly all pixels are background, and for others."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
