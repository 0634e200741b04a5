"""Draw a mosaic plan into rows of a batch, on the host: each tile once, straight to where it is seen."""

from typing import Final

import numpy as np

from lit_data.io.bank import ImageBank
from lit_data.mosaic import MosaicPlan
from lit_data.types import Array

FILL: Final = 114
"""Grey of what no tile covers, as in ultralytics (``data/augment.py``)."""


def draw_tiles(rows: Array, plan: MosaicPlan, bank: ImageBank) -> None:
    """Fill samples with their tiles; what none covers becomes grey.

    Args:
        rows: [M, C, H, W] uint8, written.
        plan: The tiles.
        bank: The images, [C, h, w] uint8 each.
    """
    import cv2

    rows[...] = FILL
    for tile, (top, left, bottom, right) in enumerate(plan.window.tolist()):
        if bottom <= top or right <= left:
            continue
        step = 1 / float(plan.scale[tile])
        first_y = (top + 0.5) * step - float(plan.origin[tile, 0]) - 0.5
        first_x = (left + 0.5) * step - float(plan.origin[tile, 1]) - 0.5
        target, image = rows[plan.row[tile], :, top:bottom, left:right], bank[int(plan.image[tile])]
        if step == 1 and first_y == round(first_y) and first_x == round(first_x):
            y, x = round(first_y), round(first_x)
            target[...] = image[:, y : y + bottom - top, x : x + right - left]
            continue
        matrix = np.array([[step, 0, first_x], [0, step, first_y]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        for plane, source in zip(target, image, strict=True):
            cv2.warpAffine(source, matrix, (right - left, bottom - top), plane, flags, cv2.BORDER_REPLICATE)
