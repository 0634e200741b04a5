"""Defects of a probability map: connected regions above a threshold."""

from dataclasses import dataclass

import numpy as np

from lit_data.types import Bytes, Floats


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
        kind: Number of the class of most of its pixels; 0 where there are no classes.
    """

    y: float
    x: float
    height_px: int
    width_px: int
    area_px: int
    score: float
    kind: int = 0


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
    most_frequent = np.zeros(count, np.int64)  # kind of each region
    if kinds is not None:
        pixels_of_kind = np.zeros((count, int(kinds.max()) + 1), np.int32)
        np.add.at(pixels_of_kind, (labels.ravel(), kinds.ravel()), 1)
        most_frequent = pixels_of_kind.argmax(axis=1)
    regions = []
    for number in range(1, count):  # 0 is the background
        area_px = int(stats[number][cv2.CC_STAT_AREA])
        if area_px < min_area_px:
            continue
        centre_x, centre_y = centres[number]
        region = Defect(
            y=float(centre_y),
            x=float(centre_x),
            height_px=int(stats[number][cv2.CC_STAT_HEIGHT]),
            width_px=int(stats[number][cv2.CC_STAT_WIDTH]),
            area_px=area_px,
            score=float(scores[number]),
            kind=int(most_frequent[number]),
        )
        regions.append(region)
    return sorted(regions, key=lambda region: -region.score)
