"""Masks and overlays of watermarks."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_TINT = np.array([255, 59, 48], np.float32)
_OPACITY = 0.6  # opacity of the tint at probability 1


def tint(pixels: NDArray[Any], probability: Floats, threshold: float) -> NDArray[np.uint8]:
    """Tint the marked pixels of an image red; the tint increases with the probability.

    Args:
        pixels: [3, H, W] uint8.
        probability: [H, W] float32 in 0..1.
        threshold: Least probability of a marked pixel.

    Returns:
        [H, W, 3] uint8.
    """
    tinted = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    is_marked = probability >= threshold
    weight = (_OPACITY * probability[is_marked])[:, None]
    blended = tinted[is_marked] * (1 - weight) + _TINT * weight
    tinted[is_marked] = np.rint(blended).astype(np.uint8)
    return tinted


def measure_marked(parts: Iterable[Floats], threshold: float) -> tuple[int, float]:
    """Return the number of marked pixels, and their mean probability."""
    count = 0
    total = 0.0
    for part in parts:
        marked = part[part >= threshold]
        count += marked.size
        total += float(marked.sum(dtype=np.float64))
    return count, total / count if count else 0.0
