"""A loss for masks in which nearly all pixels are background."""

import torch.nn.functional as F
from torch import Tensor

_SMOOTH_PX = 64.0


def rare_pixel_loss(logits: Tensor, masks: Tensor, *, dice_weight: float = 1.0) -> Tensor:
    """Cross entropy per defect pixel plus soft Dice, in float32 whatever the precision of the run.

    The mean over all pixels would be dominated by background that is right already. The sum of the cross entropy is
    therefore divided by the number of defect pixels of the batch (plus 64, so that a batch without defects is finite
    and still punishes false alarms). Soft Dice (Milletari et al., "V-Net", 3DV 2016) is taken over the whole batch,
    where single samples often have no defect.

    Args:
        logits: [B, 1, H, W].
        masks: [B, 1, H, W] in {0, 1}.
        dice_weight: Weight of the Dice term.

    Returns:
        A scalar.
    """
    logits, masks = logits.float(), masks.float()
    count = masks.sum()
    entropy = F.binary_cross_entropy_with_logits(logits, masks, reduction="sum") / (count + _SMOOTH_PX)
    probability = logits.sigmoid()
    dice = (2 * (probability * masks).sum() + 1) / (probability.sum() + count + 1)
    return entropy + dice_weight * (1 - dice)
