"""Curves of the scores of a stage, which reports draw."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_POINTS = 200  # of a curve
_BINS = 24
_EPS = 1e-9  # logits go up to 20.7


class Curve(NamedTuple):
    """Recall and precision at falling thresholds, which the recall rises with."""

    recall: list[float]
    precision: list[float]


class ImageScores(NamedTuple):
    """Images by their scores.

    Attributes:
        edges: Of the bins, scores whose logits lie equally far from each other.
        good: Good images in each bin, one less than edges.
        defective: Defective images in each bin.
        threshold: Score from which an image counts as defective.
    """

    edges: list[float]
    good: list[int]
    defective: list[int]
    threshold: float


class ScoreCurves(NamedTuple):
    """Curves of a stage.

    Attributes:
        precision_recall: By what they are of: ``images``, ``pixels``, ``objects``.
        image_scores: None where not both good and defective images are there.
    """

    precision_recall: Mapping[str, Curve]
    image_scores: ImageScores | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        curves = {name: curve._asdict() for name, curve in self.precision_recall.items()}
        images = self.image_scores and self.image_scores._asdict()
        return {"precision_recall": curves, "image_scores": images}


def trace_curve(true: Tensor, false: Tensor, count: float) -> Curve:
    """Return the curve of what lies above falling thresholds, at 200 levels of the recall at most.

    Args:
        true: [N] how many lie above each threshold and are right.
        false: [N] how many lie above it and are wrong.
        count: How many there are to find, at least 1.
    """
    recall = (true.cpu().double() / count).contiguous()
    precision = true.cpu().double() / (true + false).cpu().clamp(min=1)
    levels = torch.arange(1, _POINTS + 1, dtype=torch.float64) / _POINTS * recall[-1]
    # The first threshold that reaches a level, as average precision counts.
    firsts = torch.searchsorted(recall, levels).clamp(max=len(recall) - 1)
    firsts = torch.unique_consecutive(firsts)
    return Curve(recall[firsts].tolist(), precision[firsts].tolist())


def rank_curve(scores: Tensor, is_true: Tensor) -> Curve:
    """Return the curve of things by their scores, both [n], of which one at least is true."""
    ranked, order = scores.cpu().sort(descending=True)
    hits = is_true.cpu().bool()[order].long()
    # Equal scores are above a threshold together.
    is_last = torch.cat((ranked[1:] < ranked[:-1], torch.ones(1, dtype=torch.bool)))
    true, false = hits.cumsum(0)[is_last], (1 - hits).cumsum(0)[is_last]
    return trace_curve(true, false, int(hits.sum()))


def count_images(scores: Tensor, is_defective: Tensor, threshold: float) -> ImageScores:
    """Count good and defective images by their scores.

    Args:
        scores: [images] in 0..1.
        is_defective: [images] bool or {0, 1}.
        threshold: Score from which an image counts as defective.
    """
    levels = torch.cat((scores.cpu().double(), torch.tensor([threshold], dtype=torch.float64)))
    logits = torch.logit(levels.nan_to_num(), eps=_EPS)  # of a net that has gone wrong
    low, high = float(logits.min()) - 0.1, float(logits.max()) + 0.1
    edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64)
    rows = is_defective.cpu().bool()
    counts = []
    for of_kind in (logits[:-1][~rows], logits[:-1][rows]):
        counts.append(torch.histogram(of_kind, edges).hist.long().tolist())
    return ImageScores(edges.sigmoid().tolist(), counts[0], counts[1], threshold)
