"""The score from which an image counts as defective, by those of good and of defective validation images."""

import torch
from torch import Tensor

LEAST_IMAGES = 5
"""Of each kind, that a balanced threshold needs: of fewer it is no better than one of good images alone."""


def can_balance(good: Tensor, defective: Tensor) -> bool:
    """Return True if scores [n] and [m] are enough for `balance`."""
    return min(len(good), len(defective)) >= LEAST_IMAGES


def balance(good: Tensor, defective: Tensor) -> Tensor:
    """Return the score at which misses are as frequent among defective images as false alarms among good ones.

    The largest F1 would go by how many of the validation images are defective, which is chance.

    Args:
        good: [n] scores of good images.
        defective: [m] scores of defective images.

    Returns:
        A scalar, halfway between two scores.
    """
    # One share falls and the other rises along the scores, so that they meet once.
    ranked = torch.cat([good, defective]).sort().values
    middles = (ranked[1:] + ranked[:-1]) / 2
    misses = torch.searchsorted(defective.sort().values, middles) / len(defective)
    false_alarms = 1 - torch.searchsorted(good.sort().values, middles) / len(good)
    return middles[(misses - false_alarms).abs().argmin()]
