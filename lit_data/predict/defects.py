"""Defects in the map of an image: large enough regions of probable enough pixels."""

import numpy as np

from lit_data.core.types import Bytes, Floats
from lit_inspect import regions
from lit_inspect.regions import Defect


def find_defects(
    probability: Floats,
    *,
    threshold: float = 0.5,
    min_area_px: int = 1,
    kinds: Bytes | None = None,
) -> list[Defect]:
    """Find regions of pixels (8-connected) that reach a threshold.

    Args:
        probability: [H, W] float32 in 0..1.
        threshold: Least probability of a pixel.
        min_area_px: Smaller regions are skipped.
        kinds: [H, W] number of the class of each pixel.

    Returns:
        The regions, sorted by descending score.
    """
    return regions.find_defects(
        [(probability, kinds)],
        threshold=threshold,
        min_area_px=min_area_px,
        classes=0 if kinds is None else int(kinds.max()),
    )


def drop_small(classes: Bytes, least_px: int) -> Bytes:
    """Return class numbers [H, W] without the regions that have fewer pixels."""
    import cv2

    left, top, width, height = cv2.boundingRect(classes)
    part = slice(top, top + height), slice(left, left + width)
    large_ones = np.zeros_like(classes)
    if not width:
        return large_ones
    marked = classes[part]
    _, regions, stats, _ = cv2.connectedComponentsWithStats((marked > 0).astype(np.uint8))
    is_large = stats[:, cv2.CC_STAT_AREA] >= least_px
    large_ones[part] = marked * is_large[regions]
    return large_ones
