"""What a detector learns at its places: the box of an object, and for its class the quality of that box as score."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.modules.boxes import generalised_iou
from lit_data.modules.detector_net import Predictions
from lit_data.modules.detector_targets import Targets, Truths, assign


def detection_loss(predictions: Predictions, truths: Truths, *, box_weight: float = 2.0) -> Tensor:
    """Cross entropy of scores plus `box_weight` times 1 - GIoU of boxes, in float32.

    Both are summed over the places of one image and divided by what its objects weigh there (the sum of the qualities,
    at least 1); the loss is the mean over the images. Dividing by the objects of the batch, as is common, would make
    each image's gradient depend on its neighbours; so no image changes the weight of another, and a batch gives the
    same gradient when it is worked off in micro-batches or on several ranks, each weighted by its images.

    The cross entropy is that of soft targets (Li et al., "Generalized focal loss", NeurIPS 2020) less their entropy,
    a constant: a net that says exactly what it is to say has loss 0.

    Args:
        predictions: Of the net, for B images.
        truths: Objects of the same images.
        box_weight: Weight of the boxes' term.

    Returns:
        A scalar.

    Raises:
        ConfigError: A class is not one of the net's.
    """
    with torch.autocast(predictions.logits.device.type, enabled=False):
        targets = assign(predictions, truths)
        images, places_in_image = predictions.logits.shape[:2]
        rows = targets.places // places_in_image
        weight = predictions.logits.new_zeros(images).index_add(0, rows, targets.quality).clamp(min=1)
        entropy = F.softplus(predictions.logits).flatten(1).sum(1)
        entropy = entropy.index_add(0, rows, _entropy_of_objects(predictions, truths, targets))
        found = predictions.boxes.flatten(0, 1)[targets.places]
        misses = targets.quality * (1 - generalised_iou(found, truths.boxes[targets.truths]))
        boxes = torch.zeros_like(weight).index_add(0, rows, misses)
        return ((entropy + box_weight * boxes) / weight).mean()


def _entropy_of_objects(predictions: Predictions, truths: Truths, targets: Targets) -> Tensor:
    """[T]: what the cross entropy of a place with an object has beyond softplus(logit), which every place has."""
    logits = predictions.logits.flatten(0, 1)[targets.places, truths.classes[targets.truths]]
    own: Tensor = torch.special.entr(targets.quality) + torch.special.entr(1 - targets.quality)
    return -targets.quality * logits - own
