"""Defects of a probability map: connected regions above a threshold."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Defect:
    """One connected region.

    Args:
        y: Row of its centre of gravity, px.
        x: Column of its centre of gravity, px.
        height_px: Height of its bounding box.
        width_px: Width of its bounding box.
        area_px: Pixels.
        score: Highest probability in it.
        kind: Number of the class of most of its pixels; 0 where none are told apart.
    """

    y: float
    x: float
    height_px: int
    width_px: int
    area_px: int
    score: float
    kind: int = 0


def find_defects(
    probability: NDArray[np.float32],
    *,
    threshold: float = 0.5,
    min_area_px: int = 1,
    kinds: NDArray[np.uint8] | None = None,
) -> list[Defect]:
    """Regions of pixels (8-connected) that reach a threshold, the surest first.

    Args:
        probability: [H, W] float32 in 0..1.
        threshold: Least probability of a pixel.
        min_area_px: Smaller regions are left out.
        kinds: [H, W] number of the class of each pixel.

    Returns:
        The regions by falling score.
    """
    import cv2

    count, labels, stats, centres = cv2.connectedComponentsWithStats(
        (probability >= threshold).astype(np.uint8), connectivity=8
    )
    scores = np.zeros(count, dtype=np.float32)
    np.maximum.at(scores, labels.ravel(), probability.ravel())
    counts = np.zeros((count, 1 if kinds is None else int(kinds.max()) + 1), np.int32)
    if kinds is not None:
        np.add.at(counts, (labels.ravel(), kinds.ravel()), 1)
    regions = [
        Defect(
            y=float(centres[number][1]),
            x=float(centres[number][0]),
            height_px=int(stats[number][cv2.CC_STAT_HEIGHT]),
            width_px=int(stats[number][cv2.CC_STAT_WIDTH]),
            area_px=int(stats[number][cv2.CC_STAT_AREA]),
            score=float(scores[number]),
            kind=int(counts[number].argmax()),
        )
        for number in range(1, count)
        if stats[number][cv2.CC_STAT_AREA] >= min_area_px
    ]
    return sorted(regions, key=lambda region: -region.score)
