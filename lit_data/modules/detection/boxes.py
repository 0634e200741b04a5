"""Boxes as tensors of four numbers: their forms, overlap, suppression, and mean average precision.

A box is either ``corners`` (left, top, right, bottom) or ``centres`` (centre x, centre y, width,
height), its four numbers in the last dimension.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.devices import constant

_SMALLEST: Final = 1e-9  # of an area; a box without one overlaps nothing, and 0 / 0 is no number
_THRESHOLDS: Final = tuple(0.5 + 0.05 * step for step in range(10))
_RECALLS: Final = 101
_NO_CLASS: Final = -1

Objects = dict[str, Tensor]
"""Of one image: ``boxes`` [n, 4] corners, ``classes`` [n] int64, and for found ones ``scores`` [n], highest first."""


def to_corners(centres: Tensor) -> Tensor:
    """(cx, cy, w, h) to (left, top, right, bottom), [..., 4]."""
    middle = centres[..., :2]
    half = centres[..., 2:] / 2
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
        scores: [n]; of equal ones the first counts as higher.
        classes: [n]; boxes of different classes never drop each other.
        iou_threshold: Boxes that overlap more are dropped.
        most: Boxes to keep at most.

    Returns:
        [kept] int64: numbers of boxes, the highest score first.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    classes = classes[order]
    drops = (box_iou(boxes[:, None], boxes) > iou_threshold) & (classes[:, None] == classes)
    stays = settle_drops(torch.ones_like(classes, dtype=torch.bool), drops.triu(1).nonzero().T)
    return order[stays][:most]


def settle_drops(alive: Tensor, edges: Tensor) -> Tensor:
    """Return which boxes stay where some drop others.

    The greedy rule is the one solution of ``stays[j] = no i that stays drops j``. Put in over and
    over, the answer for the first t boxes is right after t rounds, and it has settled when a round
    changes nothing: that takes as many rounds as the longest chain of boxes that drop each other, a
    handful, instead of one step for each box.

    Args:
        alive: [n] bool, boxes that take part.
        edges: [2, E] numbers of boxes, the first of which drops the second if it stays. They form
            no circle, as where the one with the higher score comes first.

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


def _areas(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., 2:], other[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area, other_area = ((boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other))
    union = area + other_area - shared
    return shared, union.clamp(min=_SMALLEST)


class BoxScores(Metric):
    """Average precision of boxes at IoU 0.5, and over IoU 0.5, 0.55 .. 0.95.

    Both are means over the classes. The numbers are those of COCO (Lin et al., "Microsoft COCO",
    ECCV 2014, in the detail of ``pycocotools.cocoeval``) for boxes of all sizes and no crowds;
    torchmetrics' own `MeanAveragePrecision` needs torchvision and a package of COCO.

    In each image, from the highest score down, a found box takes the true box of its class that it
    overlaps most and that no other has taken; it is right if their IoU reaches the threshold.
    Precision at recall r is the highest at any recall from r on, read at r = 0, 0.01 .. 1. Classes
    without a true box count for nothing.
    """

    full_state_update = False
    higher_is_better = True
    scores: list[Tensor]
    classes: list[Tensor]
    right: list[Tensor]
    true_classes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("scores", "classes", "right", "true_classes"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(self, predicted: Sequence[Objects], true: Sequence[Objects]) -> None:
        """Match the boxes of a batch of images.

        Args:
            predicted: Of each image, the highest score first; COCO counts up to 100 of each class.
            true: Of the same images.
        """
        classes = pad_sequence([image["classes"] for image in predicted], True, _NO_CLASS)
        true_classes = pad_sequence([image["classes"] for image in true], True, _NO_CLASS - 1)
        boxes = pad_sequence([image["boxes"] for image in predicted], True)
        true_boxes = pad_sequence([image["boxes"] for image in true], True)
        overlap = box_iou(boxes[:, :, None], true_boxes[:, None])
        overlap = overlap.masked_fill(classes[:, :, None] != true_classes[:, None], -1)
        real = classes != _NO_CLASS
        self.right.append(_match(overlap)[real])
        self.classes.append(classes[real])
        self.scores.append(torch.cat([image["scores"] for image in predicted]).float())
        self.true_classes.append(torch.cat([image["classes"] for image in true]))

    @override
    def compute(self) -> dict[str, Tensor]:
        """``map50`` and ``map``; both 0 where there are no true boxes."""
        scores = dim_zero_cat(self.scores)
        classes = dim_zero_cat(self.classes)
        right = dim_zero_cat(self.right)
        true_classes = dim_zero_cat(self.true_classes)
        order = scores.argsort(descending=True, stable=True)
        known, counts = torch.unique(true_classes, return_counts=True)
        right = right[order]
        classes = classes[order]
        curves = []
        for number, count in zip(known.tolist(), counts.tolist(), strict=True):
            curves.append(_average_precision(right[classes == number], count))
        mean = torch.stack(curves).mean(0) if curves else scores.new_zeros(len(_THRESHOLDS))
        return {"map50": mean[0], "map": mean.mean()}


def _match(overlap: Tensor) -> Tensor:
    """Mark the predicted boxes that are right.

    Args:
        overlap: [B, found, true] IoU; -1 where classes differ.

    Returns:
        [B, found, thresholds] bool.
    """
    images, predicted_count, true = overlap.shape
    thresholds = constant(tuple(_THRESHOLDS), overlap.device, overlap.dtype)[:, None]
    free = torch.ones(images, len(_THRESHOLDS), true, dtype=torch.bool, device=overlap.device)
    right = torch.zeros(
        images, predicted_count, len(_THRESHOLDS), dtype=torch.bool, device=overlap.device
    )
    for number in range(predicted_count if true else 0):
        open_overlap = overlap[:, None, number].masked_fill(~free, -1)
        best, taken = open_overlap.max(-1, keepdim=True)
        matches = best >= thresholds
        right[:, number] = matches[..., 0]
        free &= ~(torch.zeros_like(free).scatter(-1, taken, True) & matches)
    return right


def _average_precision(right: Tensor, true: int) -> Tensor:
    """[thresholds] from [found, thresholds], the highest score first, and the number of true boxes."""
    right = right.cpu()  # a few numbers, once an epoch: float64, and the same on every device
    hits = right.cumsum(0).double()
    recall = hits / true
    precision = hits / torch.arange(1, len(right) + 1, device=right.device)[:, None]
    highest = precision.flip(0).cummax(0).values.flip(0) if len(right) else precision
    # Recalls that are never reached.
    highest = torch.cat((highest, highest.new_zeros(1, right.shape[1])))
    # Rounded as COCO's.
    levels = torch.arange(_RECALLS, dtype=torch.float64, device=right.device) * 0.01
    first = torch.searchsorted(recall.T.contiguous(), levels.repeat(right.shape[1], 1))
    return highest.T.gather(1, first).mean(1).float()
