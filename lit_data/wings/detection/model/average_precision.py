"""Average precision of boxes as defined by COCO, computed by faster-coco-eval."""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import Doubles, Ints

log = logging.getLogger(__name__)

IOU_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
TRUE, IGNORED = -1.0, -2.0
"""Value instead of a score for a true box and for an ignored region."""

_CLASS, _SCORE = 4, 5
_LARGEST_PX2 = 1e10  # as in COCO


def find_precisions(
    rows: Doubles, counts: Ints, area_limits: Sequence[float]
) -> tuple[list[int], Tensor]:
    """Return average precisions of classes.

    Args:
        rows: [n, 6] boxes, image after image: left, top, right, bottom, class, and score, `TRUE` or
            `IGNORED`.
        counts: [images] number of rows of each image.
        area_limits: Areas that separate small, medium and large boxes.

    Returns:
        The K classes that have true boxes, and average precisions [T, K, R] for each of
        `IOU_THRESHOLDS`, each of these classes, and all sizes, small, medium and large boxes; NaN
        without a true box.
    """
    classes: list[int] = np.unique(rows[rows[:, _SCORE] == TRUE, _CLASS]).astype(int).tolist()
    if not classes:
        return [], torch.full((len(IOU_THRESHOLDS), 1, 2 + len(area_limits)), torch.nan)
    # This imports slowly, because it reads pictures too.
    from faster_coco_eval import COCO, COCOeval_faster

    image = np.repeat(np.arange(1, len(counts) + 1), counts)
    is_counted = np.isin(rows[:, _CLASS], classes)
    table = np.hstack((image[:, None], rows)).astype(np.float64)[is_counted]
    table[:, 3:5] -= table[:, 1:3]  # right and bottom become width and height
    is_found = table[:, 1 + _SCORE] >= 0
    truth = COCO(
        {
            "images": [{"id": number} for number in range(1, len(counts) + 1)],
            "categories": [{"id": number} for number in classes],
            "annotations": list(_list_annotations(table[~is_found])),
        }
    )
    detections = truth.loadRes(table[is_found][:, [0, 1, 2, 3, 4, 1 + _SCORE, 1 + _CLASS]])
    evaluator: Any = COCOeval_faster(truth, detections, "bbox", print_function=log.debug)
    evaluator.params.iouThrs = np.array(IOU_THRESHOLDS)
    evaluator.params.maxDets = [max(1, len(detections.anns))]
    edges = [0.0, *area_limits, _LARGEST_PX2]
    evaluator.params.areaRng = [[0.0, _LARGEST_PX2], *pairwise(edges)]
    evaluator.evaluate()
    evaluator.accumulate()
    precision = torch.from_numpy(np.asarray(evaluator.eval["precision"]))[..., 0]
    return classes, torch.where(precision < 0, torch.nan, precision).mean(1)


def _list_annotations(rows: Doubles) -> Iterator[dict[str, Any]]:
    """Yield true boxes and ignored regions; the latter are COCO's crowds."""
    for number, (image, *box, kind, score) in enumerate(rows.tolist(), 1):
        yield {
            "id": number,
            "image_id": int(image),
            "category_id": int(kind),
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": int(score == IGNORED),
        }
