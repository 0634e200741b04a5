"""Targets: labeled defects of known size, and which of them a model finds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lit_data.core.types import IGNORED, Array, Bools
from lit_data.predict.maps import VerdictWriter
from lit_data.predict.options import PredictOptions
from lit_inspect.verdicts import GOOD

_REACH_PX = 3  # distance from a defect at which it still counts as found


class Target(NamedTuple):
    """A labeled defect and whether the model found it.

    Attributes:
        kind: Kind of the image, such as the name of its folder; ``defect`` if it has none.
        image: Path relative to the root.
        y: Position of its center in the image, px.
        x: As `y`.
        size_px: Longer side of its box.
        hit: True if it was found.
    """

    kind: str
    image: str
    y: float
    x: float
    size_px: float
    hit: bool


class Defect(NamedTuple):
    """A connected part of a mask.

    Attributes:
        y: Position of its center in the image, px.
        x: As `y`.
        size_px: Longer side of its box.
        box: Rows and columns of the image around it.
        near: [rows, columns] mask of the pixels at which it counts as found.
    """

    y: float
    x: float
    size_px: float
    box: tuple[slice, slice]
    near: Bools


def separate_defects(mask: Array) -> list[Defect]:
    """Return the connected parts of a mask [H, W], without ignored pixels."""
    import cv2

    around = np.ones((2 * _REACH_PX + 1,) * 2, np.uint8)
    is_defect = (mask > 0) & (mask != IGNORED)
    # As regions of maps, parts that touch at a corner are one.
    count, labels, boxes, centres = cv2.connectedComponentsWithStats(
        is_defect.astype(np.uint8), connectivity=8
    )
    defects = []
    for number in range(1, count):  # 0 is the background
        left, top, width, height, _ = boxes[number].tolist()
        rows = slice(max(0, top - _REACH_PX), top + height + _REACH_PX)
        columns = slice(max(0, left - _REACH_PX), left + width + _REACH_PX)
        piece = (labels[rows, columns] == number).astype(np.uint8)
        x, y = centres[number].tolist()
        near = cv2.dilate(piece, around) > 0
        defects.append(Defect(y, x, float(max(width, height)), (rows, columns), near))
    return defects


def judge_defects(
    defects: Mapping[int, Sequence[Defect]],
    verdicts: Mapping[int, str],
    kinds: Sequence[str],
    writer: VerdictWriter,
    options: PredictOptions,
) -> list[Target]:
    """Return all defects, with whether each was found.

    A defect is found if its image is not called good, and enough pixels within 3 px of the defect
    reach the threshold of pixels.

    Args:
        defects: Defects of each image, by the number of the image.
        verdicts: Verdict of each predicted image, by its number.
        kinds: Kind of each image; empty if kinds are unknown.
        writer: Has the names and the predicted maps of the images.
        options: Threshold of pixels, and the smallest area.
    """
    # `predict` drops smaller regions.
    least_px = max(1, options.min_area_px)
    targets = []
    # Bad images have no verdict.
    for number in sorted(defects.keys() & verdicts.keys()):
        name = writer.names[number]
        kind = (kinds[number] if kinds else "") or "defect"
        marked = writer.read_map(name) >= options.least_score
        for defect in defects[number]:
            is_marked = int(marked[defect.box][defect.near].sum()) >= least_px
            # A good image has no defects in any table.
            hit = is_marked and verdicts[number] != GOOD
            targets.append(Target(kind, name, defect.y, defect.x, defect.size_px, hit))
    return targets
