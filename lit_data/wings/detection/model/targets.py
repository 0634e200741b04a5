"""Assignment of a detector's places to the objects that they learn.

Center sampling (Tian et al., "FCOS", ICCV 2019) selects the places near an object's center. Of
these, the places that already do best in both class and box are taken (Feng et al., "TOOD:
Task-aligned one-stage object detection", ICCV 2021). All objects of a batch are processed at once,
and no object is compared with every place of its image.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.core.devices import constant
from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX, Batch
from lit_data.wings.detection.model.boxes import box_iou, generalised_iou, to_corners
from lit_data.wings.detection.model.net import Level, Predictions, place_centres

_REACH = 2  # places to each side of the one that holds the center; FCOS has 1.5
_PLACES = 10  # most places that learn one object; ultralytics has the same
# TOOD has 6, for runs of many thousand steps. While boxes are still rough, 6 leaves an object one
# learning place of any weight; 2 leaves it several.
_IOU_POWER = 2
# The best place of an object learns at least this score. A lower one makes the first steps learn
# that objects are rare.
_LEAST_QUALITY = 0.5
# Decides only among places whose boxes do not overlap the object.
_CLOSENESS = 1e-12


class Truths(NamedTuple):
    """The N objects of a batch.

    Attributes:
        rows: [N] int64, image in the batch.
        classes: [N] int64.
        boxes: [N, 4] float32, corners in pixels of the batch image.
    """

    rows: Tensor
    classes: Tensor
    boxes: Tensor

    def of(self, row: int) -> "Truths":
        """Return the objects of one image."""
        is_of_image = self.rows == row
        return Truths(*(part[is_of_image] for part in self))


class Targets(NamedTuple):
    """The T places that learn an object; all others learn that there is none.

    Attributes:
        places: [T] int64, row * P + place.
        truths: [T] int64, number of the object.
        quality: [T] float32 in 0..1, the score to learn: for the best place of an object its best
            IoU, but at least 0.5; less for the others.
    """

    places: Tensor
    truths: Tensor
    quality: Tensor


def read_truths(batch: Batch, key: str = "boxes") -> Truths:
    """Read objects in pixels from the flat boxes of a batch.

    Args:
        batch: ``image`` [B, C, H, W] and ``boxes`` [N, 6] (row, class, cx, cy, w, h), the last four
            in fractions of the image. If the batch has ``boxes_count`` [B], this gives the row of
            each box, because a micro-batch still has the row numbers of the whole batch.
        key: Key of the boxes.
    """
    boxes = batch[key]
    height_px, width_px = batch["image"].shape[-2:]
    scale = constant((width_px, height_px) * 2, boxes.device)
    rows = boxes[:, 0].long()
    counts = batch.get(f"{key}{COUNT_SUFFIX}")
    if counts is not None:
        numbers = torch.arange(len(counts), device=counts.device)
        rows = numbers.repeat_interleave(counts, output_size=len(boxes))
    return Truths(rows, boxes[:, 1].long(), to_corners(boxes[:, 2:].float() * scale))


@torch.no_grad()
def assign(predictions: Predictions, truths: Truths) -> Targets:
    """Choose up to ten places for each object.

    Candidates are the 5 x 5 places around an object's center at each level whose own centers are
    inside its box, and always the middle one, so that even the smallest box has one at each level.
    They are ranked by ``sqrt(score) * IoU^2`` of the net's current predictions. A place wanted by
    several objects learns the one that its box overlaps most.

    Args:
        predictions: Predictions of the net.
        truths: Objects of the same images.

    Raises:
        ConfigError: The net does not have a class of an object.
    """
    places_in_image, classes = predictions.logits.shape[1:]
    candidates, distance, valid = find_candidates(truths.boxes, predictions.levels)
    candidates = candidates + (truths.rows * places_in_image)[:, None]
    overlap = box_iou(predictions.boxes.flatten(0, 1)[candidates], truths.boxes[:, None])
    known_classes = truths.classes.clamp(max=classes - 1)  # an unknown one is refused below
    score = predictions.logits.flatten(0, 1)[candidates, known_classes[:, None]].sigmoid()
    rank = score.sqrt() * overlap**_IOU_POWER + _CLOSENESS / (1 + distance)
    chosen_rank, chosen = rank.masked_fill(~valid, 0).topk(min(_PLACES, rank.shape[1]))
    places, overlap = (values.gather(1, chosen).flatten() for values in (candidates, overlap))
    overlap = overlap.masked_fill(chosen_rank.flatten() == 0, -1)  # no claim
    wins = _settle_conflicts(places, overlap, predictions.logits.shape[0] * places_in_image)
    # Winning claims come first, in their order; only their number makes the host wait.
    by_success = wins.logical_not().to(torch.uint8).argsort(stable=True)
    assigned = by_success[: _count(wins, truths.classes, classes)]
    numbers = assigned // chosen.shape[1]
    return _rate(
        places[assigned],
        numbers,
        overlap[assigned],
        chosen_rank.flatten()[assigned],
        len(truths.boxes),
    )


def find_candidates(boxes: Tensor, levels: Sequence[Level]) -> tuple[Tensor, Tensor, Tensor]:
    """Find the places near the center of each box.

    Args:
        boxes: [N, 4] corners in pixels.
        levels: Grids of the places.

    Returns:
        Numbers of places in their image [N, 25 * levels] int64, squared distances from the center
        of the box in strides, and a mask of the valid places.
    """
    parts = [_find_in_level(boxes, level) for level in levels]
    first = [0]
    for level in levels:
        first.append(first[-1] + level.rows * level.columns)
    numbers, distances, valid = zip(*parts, strict=True)
    shifted = [part + start for part, start in zip(numbers, first, strict=False)]
    return torch.cat(shifted, dim=1), torch.cat(distances, dim=1), torch.cat(valid, dim=1)


def _find_in_level(boxes: Tensor, level: Level) -> tuple[Tensor, Tensor, Tensor]:
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    last = constant((level.columns - 1, level.rows - 1), boxes.device, torch.int64)
    cell = torch.minimum((middle / level.stride_px).floor().long().clamp(min=0), last)
    steps = torch.arange(-_REACH, _REACH + 1, device=boxes.device)
    offsets = torch.cartesian_prod(steps, steps)
    cells = cell[:, None] + offsets
    centres = (cells + 0.5) * level.stride_px
    inside = ((centres > boxes[:, None, :2]) & (centres < boxes[:, None, 2:])).all(-1)
    inside |= (offsets == 0).all(-1)  # the middle counts however small the box is
    on_map = ((cells >= 0) & (cells <= last)).all(-1)
    distance = ((centres - middle[:, None]) / level.stride_px).square().sum(-1)
    x, y = cells.minimum(last).clamp(min=0).unbind(-1)
    return y * level.columns + x, distance, inside & on_map


def _settle_conflicts(places: Tensor, overlap: Tensor, count: int) -> Tensor:
    """Mark the claims on a place that have the largest overlap there, the first of equal ones: [T] bool."""
    best = overlap.new_zeros(count).scatter_reduce(0, places, overlap, "amax")
    order = torch.arange(len(places), device=places.device)
    order = order.masked_fill(overlap < best[places], len(places))
    nobody = torch.full((count,), len(places), device=places.device)
    first = nobody.scatter_reduce(0, places, order, "amin")
    return (order < len(places)) & (order == first[places])


def _rate(places: Tensor, truths: Tensor, overlap: Tensor, rank: Tensor, count: int) -> Targets:
    """Scale the ranks of each object so that its best place gets its best IoU, or the least quality."""
    best_rank = rank.new_zeros(count).scatter_reduce(0, truths, rank, "amax")
    best_overlap = rank.new_zeros(count).scatter_reduce(0, truths, overlap, "amax")
    quality = rank / best_rank[truths] * best_overlap.clamp(min=_LEAST_QUALITY)[truths]
    return Targets(places, truths, quality.clamp(max=1))


def _count(wins: Tensor, classes: Tensor, known: int) -> int:
    """Count the places that learn an object, the only number of a step that the host waits for."""
    if not len(classes):
        return 0
    count, highest = torch.stack((wins.sum(), classes.max())).tolist()
    if highest >= known:
        raise ConfigError(
            f"a box has class {highest}, but the net has {known}, from 0: set model.net.classes"
        )
    return int(count)


def detection_loss(
    predictions: Predictions,
    truths: Truths,
    ignored: Truths | None = None,
    *,
    box_weight: float = 2.0,
) -> Tensor:
    """Return the cross entropy of scores plus `box_weight` times 1 - GIoU of boxes, in float32.

    Both are summed over the places of one image and divided by the weight of its objects (the sum
    of the qualities, at least 1); the loss is the mean over the images. Dividing by the objects of
    the batch, as is common, would make each image's gradient depend on its neighbors. Here no image
    changes the weight of another, so a batch gives the same gradient when it is processed in
    micro-batches or on several ranks, each weighted by its images. The cross entropy is that of
    soft targets (Li et al., "Generalized focal loss", NeurIPS 2020) less their entropy, a constant:
    a net that predicts exactly its targets has loss 0.

    Args:
        predictions: Predictions of the net for B images.
        truths: Objects of the same images.
        ignored: Regions of the images. Places with their center in one do not learn its class,
            unless they learn an object of this class.
        box_weight: Weight of the boxes' term.

    Returns:
        A scalar.

    Raises:
        ConfigError: The net does not have a class of an object.
    """
    with torch.autocast(predictions.logits.device.type, enabled=False):
        targets = assign(predictions, truths)
        images, places_in_image = predictions.logits.shape[:2]
        rows = targets.places // places_in_image
        weight = predictions.logits.new_zeros(images).index_add(0, rows, targets.quality)
        weight = weight.clamp(min=1)
        of_places = F.softplus(predictions.logits)
        if ignored is not None:
            of_places = of_places.masked_fill(
                _find_ignored(predictions, ignored, truths, targets), 0
            )
        entropy = of_places.flatten(1).sum(1)
        entropy = entropy.index_add(0, rows, _entropy_of_objects(predictions, truths, targets))
        predicted_boxes = predictions.boxes.flatten(0, 1)[targets.places]
        overlap = generalised_iou(predicted_boxes, truths.boxes[targets.truths])
        misses = targets.quality * (1 - overlap)
        boxes = torch.zeros_like(weight).index_add(0, rows, misses)
        return ((entropy + box_weight * boxes) / weight).mean()


def _entropy_of_objects(predictions: Predictions, truths: Truths, targets: Targets) -> Tensor:
    """Return the cross entropy of each place with an object minus softplus(logit), which all places have: [T]."""
    logits = predictions.logits.flatten(0, 1)[targets.places, truths.classes[targets.truths]]
    least: Tensor = torch.special.entr(targets.quality) + torch.special.entr(1 - targets.quality)
    return -targets.quality * logits - least


def _find_ignored(
    predictions: Predictions, ignored: Truths, truths: Truths, targets: Targets
) -> Tensor:
    """Mark the logits that learn nothing, [B, P, classes] bool."""
    is_ignored = torch.zeros_like(predictions.logits, dtype=torch.bool)
    centres = place_centres(predictions.levels, predictions.logits.device)[0]
    corners = ignored.boxes[:, None]
    is_inside = ((centres > corners[..., :2]) & (centres < corners[..., 2:])).all(-1)
    region, inner = is_inside.nonzero(as_tuple=True)
    rows = ignored.rows[region]
    classes = ignored.classes[region]
    is_ignored[rows, inner, classes] = True
    # A place that learns an object still learns the class of it.
    is_ignored.flatten(0, 1)[targets.places, truths.classes[targets.truths]] = False
    return is_ignored
