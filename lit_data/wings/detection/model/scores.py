"""Scores of predicted boxes: average precision as defined by COCO, and hits against false alarms."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.models.score_curves import Curve, trace_curve
from lit_data.models.scored import find_best_f1, where_counted
from lit_data.wings.detection.model.average_precision import IGNORED, TRUE, find_precisions
from lit_data.wings.detection.model.boxes import Objects, box_iou, find_covered

SIZES = ("small", "medium", "large")
SIZE_LIMITS_PX = (32.0, 96.0)
"""Sides of squares that separate the sizes, as in COCO (``pycocotools.cocoeval``, `areaRng`)."""
ALARM_RATES = (0.1, 1.0, 10.0)
"""False alarms per image at which the found fraction of the objects is logged."""

_LEAST_IOU = 0.5  # of hits
_NO_CLASS = -1
_EPS = 1e-6
_COLUMNS = 7  # see `_tabulate`


class Matches(NamedTuple):
    """Outcomes of the boxes of B images at IoU 0.5.

    Attributes:
        outcomes: [B, found] int8: 1 right, 0 false, -1 not counted.
        missed: [B, true] bool: true boxes that no predicted box has taken.
    """

    outcomes: Tensor
    missed: Tensor


class BoxScores(Metric):
    """Average precision of boxes, by class and by size, and hits against false alarms.

    Average precision is that of COCO (Lin et al., "Microsoft COCO", ECCV 2014), see
    `lit_data.wings.detection.model.average_precision`. torchmetrics' own `MeanAveragePrecision`
    needs torchvision, and supports neither other limits of sizes nor the precision of a class at
    IoU 0.5. Classes without a true box are not counted. A predicted box is not counted if it is not
    right and an ignored region of its class covers it up to the threshold, as with COCO's crowds.
    The score of a size does not count boxes of another size.

    Hits against false alarms are points of the FROC curve (Chakraborty, "Maximum likelihood
    analysis of free-response ROC data", 1989) at IoU 0.5: in each image, from the highest score
    down, a predicted box takes the true box of its class that it overlaps most and that no other
    has taken; it is right if their IoU reaches 0.5.

    Args:
        size_limits_px: Sides of squares whose areas separate small, medium and large boxes.

    Attributes:
        names: Names of the classes; if empty, there are no scores of single classes.
        curve: Recall and precision at IoU 0.5, from the last `compute`; None if no box is right.
    """

    full_state_update = False
    higher_is_better = True
    rows: list[Tensor]
    counts: list[Tensor]

    def __init__(self, size_limits_px: Sequence[float] = SIZE_LIMITS_PX) -> None:
        super().__init__()
        self.names: Sequence[str] = ()
        self.curve: Curve | None = None
        self.area_limits = tuple(float(side) ** 2 for side in size_limits_px)
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("counts", [], dist_reduce_fx="cat")

    @override
    def update(
        self,
        predicted: Sequence[Objects],
        true: Sequence[Objects],
        ignored: Sequence[Objects] | None = None,
        scales: Sequence[float] | None = None,
    ) -> None:
        """Match the boxes of a batch of images; a rank without an image must call it too.

        Args:
            predicted: Boxes of each image, by descending score; COCO counts up to 100 of each
                class.
            true: True boxes of the same images.
            ignored: Regions of the images in which no box of their class is false.
            scales: Px of the sizes per px of the boxes, for each image; 1 by default.
        """
        if not predicted:
            self.rows.append(torch.zeros(0, _COLUMNS, device=self.device))
            self.counts.append(torch.zeros(0, dtype=torch.int64, device=self.device))
            return
        outcomes = _match_images(predicted, true, ignored or ()).outcomes
        tables, counts = [], []
        for number, objects in enumerate(predicted):
            scale = scales[number] if scales else 1.0
            parts = [_tabulate(objects, scale, objects["scores"], outcomes[number])]
            parts.append(_tabulate(true[number], scale, TRUE))
            if ignored is not None:
                parts.append(_tabulate(ignored[number], scale, IGNORED))
            tables += parts
            counts.append(sum(map(len, parts)))
        self.rows.append(torch.cat(tables))
        self.counts.append(torch.tensor(counts, device=self.device))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all images.

        Returns:
            ``map50``, and ``map``, the mean over IoU 0.5, 0.55 .. 0.95; ``map_small`` and so on for
            the sizes; ``ap50_NAME`` and ``ap_NAME`` for the classes; ``froc_1`` and so on, the
            fraction of the true boxes found at this many false alarms per image; ``object_f1_max``,
            the largest F1 at IoU 0.5 over all classes, and ``object_f1_max_threshold``, its score.
            A score without true boxes is NaN, and so is a threshold if no box is right.
        """
        # A few numbers, once an epoch: the same on every device.
        rows, counts = dim_zero_cat(self.rows).cpu(), dim_zero_cat(self.counts).cpu()
        values = self._score_classes(rows, counts)
        found_rows = rows[rows[:, 5] >= 0]
        found_rows = found_rows[found_rows[:, 5].argsort(descending=True, stable=True)]
        scores, outcomes = found_rows[:, 5], found_rows[:, 6].to(torch.int8)
        true_count = int((rows[:, 5] == TRUE).sum())
        for rate in ALARM_RATES:
            hits = count_hits(scores, outcomes, int(rate * len(counts)))
            values[f"froc_{rate:g}"] = torch.tensor(float(hits)) / true_count
        values |= choose_threshold(scores, outcomes, true_count)
        right, wrong = ((outcomes == kind).cumsum(0) for kind in (1, 0))
        is_any_right = len(right) > 0 and bool(right[-1])
        self.curve = trace_curve(right, wrong, true_count) if is_any_right else None
        return {name: value.to(self.device) for name, value in values.items()}

    def _score_classes(self, rows: Tensor, counts: Tensor) -> dict[str, Tensor]:
        boxes = rows[:, :6].double().numpy()
        classes, precisions = find_precisions(boxes, counts.numpy(), self.area_limits)
        precisions = precisions.float()
        means = precisions.nanmean(1)
        values = {"map50": means[0, 0], "map": means[:, 0].mean()}
        for size, name in enumerate(SIZES, 1):
            values[f"map_{name}"] = means[:, size].mean()
        undefined = torch.full((len(precisions),), torch.nan)
        for number, name in enumerate(self.names):
            of_class = undefined
            if number in classes:
                of_class = precisions[:, classes.index(number), 0]
            values |= {f"ap50_{name}": of_class[0], f"ap_{name}": of_class.mean()}
        return values


def match_objects(predicted: Objects, true: Objects, ignored: Objects) -> tuple[Tensor, Tensor]:
    """Return which true boxes of an image are missed, and which predicted ones are false, at IoU 0.5.

    Args:
        predicted: Boxes by descending score.
        true: True boxes of the same image.
        ignored: Regions of the image in which no box of their class is false.

    Returns:
        [true] and [found] bool.
    """
    matches = _match_images([predicted], [true], [ignored])
    return matches.missed[0], matches.outcomes[0] == 0


def _match_images(
    predicted: Sequence[Objects], true: Sequence[Objects], ignored: Sequence[Objects]
) -> Matches:
    """Match the boxes of some images, padded to the largest number of boxes."""
    classes = pad_sequence([image["classes"] for image in predicted], True, _NO_CLASS)
    true_classes = pad_sequence([image["classes"] for image in true], True, _NO_CLASS - 1)
    boxes = pad_sequence([image["boxes"] for image in predicted], True)
    true_boxes = pad_sequence([image["boxes"] for image in true], True)
    overlap = box_iou(boxes[:, :, None], true_boxes[:, None])
    overlap = overlap.masked_fill(classes[:, :, None] != true_classes[:, None], -1)
    return match_boxes(overlap, _cover(boxes, classes, ignored))


def match_boxes(overlap: Tensor, covered: Tensor) -> Matches:
    """Match predicted boxes with true ones.

    Args:
        overlap: [B, found, true] IoU, by descending score; -1 if the classes differ.
        covered: [B, found] largest fraction that an ignored region of the class covers.
    """
    # A column that no box takes, so that there is one even without a true box.
    overlap = F.pad(overlap, (0, 1), value=-1.0)
    is_free = overlap.new_ones(len(overlap), overlap.shape[2], dtype=torch.bool)
    is_right = torch.zeros_like(covered, dtype=torch.bool)
    for number in range(overlap.shape[1]):
        best, taken = overlap[:, number].masked_fill(~is_free, -1).max(1, keepdim=True)
        takes = best >= _LEAST_IOU
        is_free &= ~torch.zeros_like(is_free).scatter(1, taken, takes)
        is_right[:, number] = takes[:, 0]
    is_nothing = (covered >= _LEAST_IOU) & ~is_right
    return Matches(is_right.to(torch.int8) - is_nothing.to(torch.int8), is_free[:, :-1])


def _tabulate(
    objects: Objects, scale: float, score: Tensor | float, outcomes: Tensor | None = None
) -> Tensor:
    """Return objects [n, 7]: scaled box, class, score or its stand-in, and outcome of `Matches`."""
    count = len(objects["classes"])
    rows = torch.zeros(count, _COLUMNS, device=objects["boxes"].device)
    rows[:, :4] = objects["boxes"] * scale
    rows[:, 4] = objects["classes"]
    rows[:, 5] = score
    if outcomes is not None:
        rows[:, 6] = outcomes[:count]
    return rows


def _cover(boxes: Tensor, classes: Tensor, ignored: Sequence[Objects]) -> Tensor:
    """Return the largest fraction of boxes [B, n, 4] covered by an ignored region of their class: [B, n]."""
    covered = boxes.new_full(classes.shape, -1)
    for row, regions in enumerate(ignored):
        if len(regions["classes"]):
            fractions = find_covered(boxes[row, :, None], regions["boxes"])
            is_same = classes[row, :, None] == regions["classes"]
            covered[row] = fractions.masked_fill(~is_same, -1).amax(1)
    return covered


def count_hits(scores: Tensor, outcomes: Tensor, allowed: int) -> int:
    """Count right boxes with a score above that of the first false box beyond the allowed number.

    Args:
        scores: [n], descending.
        outcomes: [n] of `Matches`.
        allowed: Number of false boxes allowed.
    """
    alarms = scores[outcomes == 0]
    limit = float(alarms[allowed]) if allowed < len(alarms) else -torch.inf
    return int(((outcomes == 1) & (scores > limit)).sum())


def choose_threshold(scores: Tensor, outcomes: Tensor, true_count: int) -> dict[str, Tensor]:
    """Choose the lowest score of counted boxes that maximizes their F1.

    Args:
        scores: [n] in 0..1, descending.
        outcomes: [n] of `Matches`.
        true_count: Number of true boxes.

    Returns:
        ``object_f1_max`` and ``object_f1_max_threshold``; both NaN without a true box, the
        threshold also NaN if no box is right.
    """
    counts = outcomes >= 0
    levels = scores[counts].double()
    hits = outcomes[counts].cumsum(0)
    if not len(levels) or not hits[-1]:
        none_right = where_counted(torch.tensor(0.0), true_count)
        return {"object_f1_max": none_right, "object_f1_max_threshold": torch.tensor(torch.nan)}
    f1, threshold = find_best_f1(levels, hits, true_count, eps=_EPS)
    return {"object_f1_max": f1, "object_f1_max_threshold": threshold.float()}
