"""Defects of a probability map: connected regions above a threshold."""

from lit_data.types import Bytes, Floats
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
        min_area_px: Smaller regions are left out.
        kinds: [H, W] number of the class of each pixel.

    Returns:
        The regions by falling score.
    """
    return regions.find_defects(
        [(probability, kinds)],
        threshold=threshold,
        min_area_px=min_area_px,
        classes=0 if kinds is None else int(kinds.max()),
    )
