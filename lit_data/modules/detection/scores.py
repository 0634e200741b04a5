"""Scores of found boxes: average precision as COCO has it, and hits against false alarms."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.devices import constant
from lit_data.modules.detection.boxes import Objects, box_iou, find_covered
from lit_data.modules.score_curves import Curve, trace_curve
from lit_data.modules.scored import find_best_f1, where_counted

IOU_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
SIZES = ("small", "medium", "large")
SIZE_LIMITS_PX = (32.0, 96.0)
"""Sides of squares that part the sizes, as COCO's (``pycocotools.cocoeval``, `areaRng`)."""
ALARM_RATES = (0.1, 1.0, 10.0)
"""False alarms per image at which the found fraction of the objects is logged."""

_RECALLS = 101
_NO_CLASS = -1
_EPS = 1e-6
_STATES = ("scores", "classes", "outcomes", "true_classes", "in_range")


class Matches(NamedTuple):
    """Fates of the boxes of B images, for each range R of sizes, the first of which is all, and each IoU T.

    Attributes:
        outcomes: [B, found, R, T] int8: 1 right, 0 false, -1 counts for nothing.
        missed: [B, true, R, T] bool: true boxes that none has taken.
    """

    outcomes: Tensor
    missed: Tensor


class BoxScores(Metric):
    """Average precision of boxes, by class and by size, and hits against false alarms.

    The numbers are those of COCO (Lin et al., "Microsoft COCO", ECCV 2014, in the detail of
    ``pycocotools.cocoeval``); torchmetrics' own `MeanAveragePrecision` needs torchvision and a
    package of COCO.

    In each image, from the highest score down, a found box takes the true box of its class that it
    overlaps most and that no other has taken; it is right if their IoU reaches the threshold.
    Precision at recall r is the highest at any recall from r on, read at r = 0, 0.01 .. 1. Classes
    without a true box count for nothing. Neither does a found box that is not right and that an
    ignored region of its class covers to the threshold, as COCO's crowds; nor, in the score of a
    size, a box of another size.

    Hits against false alarms are points of the FROC curve (Chakraborty, "Maximum likelihood
    analysis of free-response ROC data", 1989) at IoU 0.5.

    Args:
        size_limits_px: Sides of squares whose areas part small, medium and large boxes.

    Attributes:
        names: Names of the classes; empty leaves their own scores out.
        curve: Recall and precision at IoU 0.5, as of the last `compute`; None where no box is right.
    """

    full_state_update = False
    higher_is_better = True
    scores: list[Tensor]
    classes: list[Tensor]
    outcomes: list[Tensor]
    true_classes: list[Tensor]
    in_range: list[Tensor]
    images: Tensor

    def __init__(self, size_limits_px: Sequence[float] = SIZE_LIMITS_PX) -> None:
        super().__init__()
        self.names: Sequence[str] = ()
        self.curve: Curve | None = None
        self.area_limits = tuple(float(side) ** 2 for side in size_limits_px)
        for name in _STATES:
            self.add_state(name, [], dist_reduce_fx="cat")
        self.add_state("images", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(
        self,
        predicted: Sequence[Objects],
        true: Sequence[Objects],
        ignored: Sequence[Objects] | None = None,
        scales: Sequence[float] | None = None,
    ) -> None:
        """Match the boxes of a batch of images; without an image a rank only takes part.

        Args:
            predicted: Of each image, the highest score first; COCO counts up to 100 of each class.
            true: Of the same images.
            ignored: Regions of them in which no box of their class is wrong.
            scales: For each image the px of its sizes for one px of its boxes, by default 1.
        """
        if not predicted:
            self._add_nothing()
            return
        classes = pad_sequence([image["classes"] for image in predicted], True, _NO_CLASS)
        true_classes = pad_sequence([image["classes"] for image in true], True, _NO_CLASS - 1)
        boxes = pad_sequence([image["boxes"] for image in predicted], True)
        true_boxes = pad_sequence([image["boxes"] for image in true], True)
        overlap = box_iou(boxes[:, :, None], true_boxes[:, None])
        overlap = overlap.masked_fill(classes[:, :, None] != true_classes[:, None], -1)
        squares = boxes.new_tensor(scales or [1.0] * len(boxes))[:, None] ** 2
        found_in_range = self._find_ranges(boxes, squares)
        true_in_range = self._find_ranges(true_boxes, squares)
        covered = _cover(boxes, classes, ignored or ())
        matches = match_boxes(overlap, true_in_range, found_in_range, covered)
        is_found = classes != _NO_CLASS
        is_true = true_classes != _NO_CLASS - 1
        self.outcomes.append(matches.outcomes[is_found])
        self.classes.append(classes[is_found])
        self.scores.append(torch.cat([image["scores"] for image in predicted]).float())
        self.true_classes.append(true_classes[is_true])
        self.in_range.append(true_in_range[is_true])
        self.images += len(predicted)

    def _add_nothing(self) -> None:
        ranges = 1 + len(SIZES)
        shape = (0, ranges, len(IOU_THRESHOLDS))
        self.scores.append(torch.zeros(0, device=self.device))
        self.outcomes.append(torch.zeros(shape, dtype=torch.int8, device=self.device))
        self.in_range.append(torch.zeros(0, ranges, dtype=torch.bool, device=self.device))
        for classes in (self.classes, self.true_classes):
            classes.append(torch.zeros(0, dtype=torch.int64, device=self.device))

    def _find_ranges(self, boxes: Tensor, squares: Tensor) -> Tensor:
        """Mark in which ranges of sizes boxes [B, n, 4] lie: [B, n, R] bool."""
        areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1) * squares
        small, large = self.area_limits
        is_any = torch.ones_like(areas, dtype=torch.bool)
        # A box on a limit belongs to both sides, as COCO has it.
        is_medium = (areas >= small) & (areas <= large)
        return torch.stack((is_any, areas <= small, is_medium, areas >= large), dim=-1)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all images.

        Returns:
            ``map50`` and ``map``, the mean over IoU 0.5, 0.55 .. 0.95; ``map_small`` and so on of
            the sizes; ``ap50_NAME`` and ``ap_NAME`` of the classes; ``froc_1`` and so on, the
            fraction of the true boxes found at so many false alarms per image; the largest F1 at IoU
            0.5 and over all classes, ``object_f1_max``, with ``object_f1_max_threshold``, its score.
            NaN are those of which there are no true boxes, and a threshold where no box is right.
        """
        scores = dim_zero_cat(self.scores)
        order = scores.argsort(descending=True, stable=True)
        scores = scores[order].cpu()  # a few numbers, once an epoch: the same on every device
        classes = dim_zero_cat(self.classes)[order].cpu()
        outcomes = dim_zero_cat(self.outcomes)[order].cpu()
        true_classes = dim_zero_cat(self.true_classes).cpu()
        in_range = dim_zero_cat(self.in_range).cpu()
        values = self._score_classes(classes, outcomes, true_classes, in_range)
        true_count = len(true_classes)
        for rate in ALARM_RATES:
            allowed = int(rate * int(self.images))
            hits = count_hits(scores, outcomes[:, 0, 0], allowed)
            values[f"froc_{rate:g}"] = torch.tensor(float(hits)) / true_count
        values |= choose_threshold(scores, outcomes[:, 0, 0], true_count)
        right, wrong = ((outcomes[:, 0, 0] == kind).cumsum(0) for kind in (1, 0))
        is_any_right = len(right) > 0 and bool(right[-1])
        self.curve = trace_curve(right, wrong, true_count) if is_any_right else None
        return {name: value.to(self.device) for name, value in values.items()}

    def _score_classes(
        self, classes: Tensor, outcomes: Tensor, true_classes: Tensor, in_range: Tensor
    ) -> dict[str, Tensor]:
        curves: list[list[Tensor]] = [[] for _ in range(1 + len(SIZES))]
        undefined = torch.full((1,), torch.nan)
        of_classes: dict[str, Tensor] = {}
        for name in self.names:
            of_classes |= {f"ap50_{name}": undefined[0], f"ap_{name}": undefined[0]}
        for number in sorted(set(true_classes.tolist())):
            counts = in_range[true_classes == number].sum(0).tolist()
            of_class = outcomes[classes == number]
            for size, count in enumerate(counts):
                if count:
                    curves[size].append(_average_precision(of_class[:, size], count))
            if number < len(self.names):
                name = self.names[number]
                of_classes[f"ap50_{name}"] = curves[0][-1][0]
                of_classes[f"ap_{name}"] = curves[0][-1].mean()
        means = []
        for of_size in curves:
            means.append(torch.stack(of_size).mean(0) if of_size else undefined)
        values = {"map50": means[0][0], "map": means[0].mean()}
        for size, name in enumerate(SIZES, 1):
            values[f"map_{name}"] = means[size].mean()
        return values | of_classes


def match_objects(predicted: Objects, true: Objects, ignored: Objects) -> tuple[Tensor, Tensor]:
    """Return which true boxes of an image are missed, and which found ones are false, at IoU 0.5.

    Args:
        predicted: The highest score first.
        true: Of the same image.
        ignored: Its regions in which no box of their class is wrong.

    Returns:
        [true] and [found] bool.
    """
    boxes = predicted["boxes"][None]
    classes = predicted["classes"][None]
    overlap = box_iou(boxes[:, :, None], true["boxes"])
    overlap = overlap.masked_fill(classes[:, :, None] != true["classes"], -1)
    true_in_range = torch.ones(1, len(true["classes"]), 1, dtype=torch.bool)
    found_in_range = torch.ones(1, classes.shape[1], 1, dtype=torch.bool)
    covered = _cover(boxes, classes, [ignored])
    matches = match_boxes(overlap, true_in_range, found_in_range, covered)
    return matches.missed[0, :, 0, 0], matches.outcomes[0, :, 0, 0] == 0


def match_boxes(
    overlap: Tensor, true_in_range: Tensor, found_in_range: Tensor, covered: Tensor
) -> Matches:
    """Match found boxes with true ones.

    Args:
        overlap: [B, found, true] IoU, the highest score first; -1 where classes differ.
        true_in_range: [B, true, R] bool, sizes that a true box belongs to.
        found_in_range: [B, found, R] bool.
        covered: [B, found] largest fraction that an ignored region of the class covers.
    """
    images, found_count, true_count = overlap.shape
    thresholds = constant(tuple(IOU_THRESHOLDS), overlap.device, overlap.dtype)[:, None]
    # A column that no box takes, so that there is one where nothing is true.
    overlap = F.pad(overlap, (0, 1), value=-1.0)
    counts = F.pad(true_in_range, (0, 0, 0, 1)).transpose(1, 2)[:, :, None]  # [B, R, 1, true]
    ranges = counts.shape[1]
    free = counts.new_ones(images, ranges, len(thresholds), true_count + 1)
    outcomes = torch.zeros(
        *(images, found_count, ranges, len(thresholds)), dtype=torch.int8, device=overlap.device
    )
    for number in range(found_count):
        of_box = overlap[:, number, None, None]
        best, taken = of_box.masked_fill(~(free & counts), -1).max(-1, keepdim=True)
        is_right = best >= thresholds
        # What matches a box of another size alone counts for nothing.
        other, other_taken = of_box.masked_fill(~free | counts, -1).max(-1, keepdim=True)
        is_other = (other >= thresholds) & ~is_right
        target = torch.where(is_right, taken, other_taken)
        takes = is_right | is_other
        free &= ~(torch.zeros_like(free).scatter(-1, target, True) & takes)
        is_nothing = ~found_in_range[:, number, :, None, None]
        is_nothing = is_nothing | is_other
        is_nothing = is_nothing | (covered[:, number, None, None, None] >= thresholds)
        is_nothing &= ~is_right
        outcome = is_right.to(torch.int8) - is_nothing.to(torch.int8)
        outcomes[:, number] = outcome[..., 0]
    return Matches(outcomes, free[..., :-1].permute(0, 3, 1, 2))


def _cover(boxes: Tensor, classes: Tensor, ignored: Sequence[Objects]) -> Tensor:
    """Return the largest fraction of boxes [B, n, 4] that an ignored region of their class covers: [B, n]."""
    covered = boxes.new_full(classes.shape, -1)
    for row, regions in enumerate(ignored):
        if len(regions["classes"]):
            fractions = find_covered(boxes[row, :, None], regions["boxes"])
            is_same = classes[row, :, None] == regions["classes"]
            covered[row] = fractions.masked_fill(~is_same, -1).amax(1)
    return covered


def count_hits(scores: Tensor, outcomes: Tensor, allowed: int) -> int:
    """Count right boxes above the score at which there are more than so many false ones.

    Args:
        scores: [n], the highest first.
        outcomes: [n] of `Matches`.
        allowed: False boxes.
    """
    alarms = scores[outcomes == 0]
    limit = float(alarms[allowed]) if allowed < len(alarms) else -torch.inf
    return int(((outcomes == 1) & (scores > limit)).sum())


def choose_threshold(scores: Tensor, outcomes: Tensor, true_count: int) -> dict[str, Tensor]:
    """Choose the score from which boxes count, so that their F1 is largest.

    Args:
        scores: [n] in 0..1, the highest first.
        outcomes: [n] of `Matches`.
        true_count: True boxes.

    Returns:
        ``object_f1_max`` and ``object_f1_max_threshold``; NaN without a true box, and the threshold
        where no box is right.
    """
    counts = outcomes >= 0
    levels = scores[counts].double()
    hits = outcomes[counts].cumsum(0)
    if not len(levels) or not hits[-1]:
        none_right = where_counted(torch.tensor(0.0), true_count)
        return {"object_f1_max": none_right, "object_f1_max_threshold": torch.tensor(torch.nan)}
    f1, threshold = find_best_f1(levels, hits, true_count, eps=_EPS)
    return {"object_f1_max": f1, "object_f1_max_threshold": threshold.float()}


def _average_precision(outcomes: Tensor, true: int) -> Tensor:
    """[T] from the outcomes of a class [found, T], the highest score first, and the number of true boxes."""
    hits = (outcomes == 1).cumsum(0).double()
    alarms = (outcomes == 0).cumsum(0)
    recall = hits / true
    precision = hits / (hits + alarms).clamp(min=1)
    highest = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
    # Recalls that are never reached.
    highest = torch.cat((highest, highest.new_zeros(1, hits.shape[1])))
    # Rounded as COCO's.
    levels = torch.arange(_RECALLS, dtype=torch.float64) * 0.01
    first = torch.searchsorted(recall.T.contiguous(), levels.repeat(hits.shape[1], 1))
    return highest.T.gather(1, first).mean(1).float()
