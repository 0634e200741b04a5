"""`BoxScores`: mean average precision of boxes, as a torchmetric.

torchmetrics' own `MeanAveragePrecision` refuses to work without torchvision and a COCO package. The
number here is the same as theirs: Lin et al., "Microsoft COCO", ECCV 2014, in the detail of
``pycocotools.cocoeval``, for boxes of all sizes and no crowds.
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
from lit_data.modules.detection.boxes import box_iou

_THRESHOLDS: Final = tuple(0.5 + 0.05 * step for step in range(10))
_RECALLS: Final = 101
_NO_CLASS: Final = -1

Objects = dict[str, Tensor]
"""Of one image: ``boxes`` [n, 4] corners, ``classes`` [n] int64, and for found ones ``scores`` [n], highest first."""


class BoxScores(Metric):
    """Average precision of boxes at IoU 0.5, and over IoU 0.5, 0.55 .. 0.95.

    Both are means over the classes.

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
        scores, classes = dim_zero_cat(self.scores), dim_zero_cat(self.classes)
        right, true_classes = dim_zero_cat(self.right), dim_zero_cat(self.true_classes)
        order = scores.argsort(descending=True, stable=True)
        known, counts = torch.unique(true_classes, return_counts=True)
        curves = [
            _average_precision(right[order][classes[order] == name], int(count))
            for name, count in zip(known.tolist(), counts, strict=True)
        ]
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
