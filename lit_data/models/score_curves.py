"""Curves of the scores of a stage, which reports draw."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_POINTS = 200  # of a curve
_BINS = 24
_EPS = 1e-9  # logits go up to 20.7


class Curve(NamedTuple):
    """Recall and precision at falling thresholds, sorted by rising recall."""

    recall: list[float]
    precision: list[float]


class ImageScores(NamedTuple):
    """Histogram of the scores of images.

    Attributes:
        edges: Edges of the bins; their logits are evenly spaced.
        good: Number of good images in each bin; one bin less than edges.
        defective: Number of defective images in each bin.
        threshold: Score from which an image counts as defective.
    """

    edges: list[float]
    good: list[int]
    defective: list[int]
    threshold: float


class ScoreCurves(NamedTuple):
    """Curves of a stage.

    Attributes:
        precision_recall: Curves of ``images``, ``pixels``, ``objects``.
        image_scores: None without both good and defective images.
    """

    precision_recall: Mapping[str, Curve]
    image_scores: ImageScores | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the curves as plain data."""
        curves = {name: curve._asdict() for name, curve in self.precision_recall.items()}
        images = self.image_scores and self.image_scores._asdict()
        return {"precision_recall": curves, "image_scores": images}


def trace_curve(true: Tensor, false: Tensor, count: float) -> Curve:
    """Return recall and precision at falling thresholds, for at most 200 levels of recall.

    Args:
        true: [N] number of right detections above each threshold.
        false: [N] number of wrong detections above it.
        count: Number of things to find, at least 1.
    """
    recall = (true.cpu().double() / count).contiguous()
    precision = true.cpu().double() / (true + false).cpu().clamp(min=1)
    levels = torch.arange(1, _POINTS + 1, dtype=torch.float64) / _POINTS * recall[-1]
    # The first threshold that reaches a level, as average precision counts.
    firsts = torch.searchsorted(recall, levels).clamp(max=len(recall) - 1)
    firsts = torch.unique_consecutive(firsts)
    return Curve(recall[firsts].tolist(), precision[firsts].tolist())


def rank_curve(scores: Tensor, is_true: Tensor) -> Curve:
    """Return the curve of things from their scores, both [n]; at least one thing must be true."""
    ranked, order = scores.cpu().sort(descending=True)
    hits = is_true.cpu().bool()[order].long()
    # Equal scores are above a threshold together.
    is_last = torch.cat((ranked[1:] < ranked[:-1], torch.ones(1, dtype=torch.bool)))
    true, false = hits.cumsum(0)[is_last], (1 - hits).cumsum(0)[is_last]
    return trace_curve(true, false, int(hits.sum()))


def count_images(scores: Tensor, is_defective: Tensor, threshold: float) -> ImageScores:
    """Return the histogram of the scores of good and defective images.

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
