"""Boxes as tensors of four numbers: their forms, their overlap, and suppression.

A box is either ``corners`` (left, top, right, bottom) or ``centres`` (centre x, centre y, width,
height), its four numbers in the last dimension.
"""

import torch
from torch import Tensor

_SMALLEST = 1e-9  # of an area; a box without one overlaps nothing, and 0 / 0 is no number


def to_corners(centres: Tensor) -> Tensor:
    """(cx, cy, w, h) to (left, top, right, bottom), [..., 4]."""
    middle, half = centres[..., :2], centres[..., 2:] / 2
    return torch.cat((middle - half, middle + half), dim=-1)


def box_iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of pairs.

    ``box_iou(a[:, None], b)`` compares all of `a` with all of `b`.

    Args:
        one: [..., 4] corners.
        other: [..., 4] corners; the leading dimensions broadcast.

    Returns:
        [...] in 0..1; 0 where both boxes have no area.
    """
    shared, union = _areas(one, other)
    return shared / union


def generalised_iou(one: Tensor, other: Tensor) -> Tensor:
    """IoU minus the empty fraction of the smallest box around both.

    It has a slope for boxes that do not meet.

    Rezatofighi et al., "Generalized intersection over union", CVPR 2019.

    Args:
        one: [..., 4] corners.
        other: [..., 4] corners; the leading dimensions broadcast.

    Returns:
        [...] in -1..1.
    """
    shared, union = _areas(one, other)
    low, high = (
        torch.minimum(one[..., :2], other[..., :2]),
        torch.maximum(one[..., 2:], other[..., 2:]),
    )
    around = (high - low).prod(-1).clamp(min=_SMALLEST)
    return shared / union - (around - union) / around


def non_maximum_suppression(
    boxes: Tensor, scores: Tensor, classes: Tensor, *, iou_threshold: float, most: int
) -> Tensor:
    """Suppress boxes that overlap one of their class with a higher score.

    Boxes are taken from the highest score down.

    The greedy rule is the one solution of ``kept[j] = no kept i before j drops j``. Put in over and
    over, the answer for the first t boxes is right after t rounds, and it has settled when a round
    changes nothing: that takes as many rounds as the longest chain of boxes that drop each other, a
    handful, instead of one step for each box. Time and memory grow with the square of n.

    Args:
        boxes: [n, 4] corners.
        scores: [n]; of equal ones the first counts as higher.
        classes: [n]; boxes of different classes never drop each other.
        iou_threshold: Boxes that overlap more are dropped.
        most: Boxes to keep at most.

    Returns:
        [kept] int64: numbers of boxes, the highest score first.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, classes = boxes[order], classes[order]
    drops = (box_iou(boxes[:, None], boxes) > iou_threshold) & (classes[:, None] == classes)
    drops = drops.triu(1)
    stays = torch.ones_like(classes, dtype=torch.bool)
    while not torch.equal(stays, settled := ~(drops & stays[:, None]).any(0)):
        stays = settled
    return order[stays][:most]


def _areas(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (
        torch.maximum(one[..., :2], other[..., :2]),
        torch.minimum(one[..., 2:], other[..., 2:]),
    )
    shared = (high - low).clamp(min=0).prod(-1)
    union = (
        (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - shared
    )
    return shared, union.clamp(min=_SMALLEST)
