"""How far a quantised net is from the one it was made of."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two nets on the same images.

    Attributes:
        mean_difference: Mean absolute difference of the probabilities, 0 to 1.
        max_difference: The largest.
        dice: Of both masks together: 2 * shared pixels / (pixels of one + pixels of the other); NaN if neither marks a
            pixel.
        marked_share: Share of the pixels that the first net marks, without which Dice says little.
    """

    mean_difference: float
    max_difference: float
    dice: float
    marked_share: float


def measure_agreement(
    net: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], batches: Iterable[Tensor], *, threshold: float
) -> Agreement:
    """Hold the probabilities of a net against those of another.

    Args:
        net: From [B, C, h, w] to probability [B, K, h, w]: the one to be measured by.
        other: The same with fewer bits.
        batches: [B, C, h, w] each, float32 in 0..1.
        threshold: Least probability of a marked pixel.
    """
    with torch.inference_mode():
        return compare_values(((net(images), other(images)) for images in batches), threshold=threshold)


def compare_values(pairs: Iterable[tuple[Tensor, Tensor]], *, threshold: float) -> Agreement:
    """Hold probabilities against others.

    Args:
        pairs: Two tensors of one shape each; those to be measured by come first.
        threshold: Least probability of a marked pixel.
    """
    total = largest = 0.0
    pixels = shared = marked = marked_by_other = 0
    for one, two in pairs:
        difference = (one.float() - two.float()).abs()
        total, largest = total + float(difference.sum(dtype=torch.float64)), max(largest, float(difference.max()))
        masks = one >= threshold, two >= threshold
        pixels += one.numel()
        shared += int((masks[0] & masks[1]).sum())
        marked, marked_by_other = marked + int(masks[0].sum()), marked_by_other + int(masks[1].sum())
    both = marked + marked_by_other
    return Agreement(total / pixels, largest, 2 * shared / both if both else math.nan, marked / pixels)
