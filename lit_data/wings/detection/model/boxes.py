"""Boxes as tensors of four numbers: conversion, overlap, and suppression.

A box is either ``corners`` (left, top, right, bottom) or ``centres`` (center x, center y, width,
height), with the four numbers in the last dimension.
"""

import torch
from torch import Tensor

_SMALLEST = 1e-9  # area, so that a box without one overlaps nothing instead of giving 0 / 0

Objects = dict[str, Tensor]
"""Objects of an image: ``boxes`` [n, 4] corners, ``classes`` [n] int64; detections have descending ``scores`` [n]."""


def to_corners(centres: Tensor) -> Tensor:
    """Convert (cx, cy, w, h) to (left, top, right, bottom): [..., 4]."""
    middle = centres[..., :2]
    half = centres[..., 2:] / 2
    return torch.cat((middle - half, middle + half), dim=-1)


def box_iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of pairs of boxes.

    ``box_iou(a[:, None], b)`` compares all of `a` with all of `b`.

    Args:
        one: [..., 4] corners.
        other: [..., 4] corners; the leading dimensions broadcast.

    Returns:
        [...] in 0..1; 0 if both boxes have no area.
    """
    shared, union = _areas(one, other)
    return shared / union


def generalised_iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the IoU minus the empty fraction of the smallest box around both.

    Unlike IoU, it has a gradient for boxes that do not overlap.

    Rezatofighi et al., "Generalized intersection over union", CVPR 2019.

    Args:
        one: [..., 4] corners.
        other: [..., 4] corners; the leading dimensions broadcast.

    Returns:
        [...] in -1..1.
    """
    shared, union = _areas(one, other)
    low = torch.minimum(one[..., :2], other[..., :2])
    high = torch.maximum(one[..., 2:], other[..., 2:])
    around = (high - low).prod(-1).clamp(min=_SMALLEST)
    return shared / union - (around - union) / around


def non_maximum_suppression(
    boxes: Tensor, scores: Tensor, classes: Tensor, *, iou_threshold: float, most: int
) -> Tensor:
    """Suppress boxes that overlap one of their class with a higher score.

    Boxes are taken from the highest score down. Time and memory grow with the square of n.

    Args:
        boxes: [n, 4] corners.
        scores: [n]; the first of equal scores counts as higher.
        classes: [n]; boxes of different classes never drop each other.
        iou_threshold: Boxes with a larger IoU are dropped.
        most: Maximum number of boxes to keep.

    Returns:
        [kept] int64: numbers of boxes, in order of descending score.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    classes = classes[order]
    drops = (box_iou(boxes[:, None], boxes) > iou_threshold) & (classes[:, None] == classes)
    stays = settle_drops(torch.ones_like(classes, dtype=torch.bool), drops.triu(1).nonzero().T)
    return order[stays][:most]


def soft_suppression(
    boxes: Tensor,
    scores: Tensor,
    classes: Tensor,
    *,
    iou_threshold: float,
    most: int,
    least_score: float,
) -> tuple[Tensor, Tensor]:
    """Lower the scores of boxes that overlap one of their class with a higher score.

    Linear Soft-NMS: Bodla et al., "Soft-NMS - improving object detection with one line of code",
    ICCV 2017. Boxes are taken from the highest score down; each multiplies the scores of later
    boxes that it overlaps by more than the threshold by 1 - IoU.

    Args:
        boxes: [n, 4] corners.
        scores: [n] in 0..1.
        classes: [n]; boxes of different classes never lower each other.
        iou_threshold: Scores of boxes with a larger IoU are lowered.
        most: Maximum number of boxes to keep.
        least_score: Boxes whose score stays above it are kept.

    Returns:
        [kept] int64 numbers of boxes, in order of descending score, and their scores [kept].
    """
    overlap = box_iou(boxes[:, None], boxes)
    is_lowered = (overlap > iou_threshold) & (classes[:, None] == classes)
    factors = torch.where(is_lowered, 1 - overlap, 1)
    scores_left = scores
    order: list[int] = []
    final_scores = [scores[:0]]
    while len(order) < min(most, len(scores)):
        best = int(scores_left.argmax())
        if scores_left[best] <= least_score:
            break
        order.append(best)
        final_scores.append(scores_left[best : best + 1])
        scores_left = scores_left * factors[best]
        scores_left[best] = -1  # taken
    return torch.tensor(order, dtype=torch.int64, device=boxes.device), torch.cat(final_scores)


def settle_drops(alive: Tensor, edges: Tensor) -> Tensor:
    """Return which boxes stay if some drop others.

    The greedy rule is the one solution of ``stays[j] = no i that stays drops j``. Applied
    repeatedly, it is right for the first t boxes after t rounds, and it has settled when a round
    changes nothing. That takes as many rounds as the longest chain of boxes that drop each other,
    usually a handful, instead of one step for each box.

    Args:
        alive: [n] bool, boxes that take part.
        edges: [2, E] numbers of boxes, the first of which drops the second if it stays. They form
            no cycle, for example because the box with the higher score comes first.

    Returns:
        [n] bool.
    """
    edges = edges[:, alive[edges].all(0)]
    stays = alive
    while True:
        settled = alive.clone()
        settled[edges[1, stays[edges[0]]]] = False
        if torch.equal(stays, settled):
            return stays
        stays = settled


def find_covered(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the fraction of each box that another covers; the leading dimensions broadcast."""
    low = torch.maximum(boxes[..., :2], others[..., :2])
    high = torch.minimum(boxes[..., 2:], others[..., 2:])
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return (high - low).clamp(min=0).prod(-1) / area.clamp(min=_SMALLEST)


def _areas(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., 2:], other[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area, other_area = ((boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other))
    union = area + other_area - shared
    return shared, union.clamp(min=_SMALLEST)
