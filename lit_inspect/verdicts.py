"""`Judge`: the rule for verdicts of images, the same for maps, boxes and labels."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_inspect.counts import counted

GOOD = "good"
DEFECT = "defect"
REVIEW = "review"
UNSURE = "unsure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Rule that returns the verdict of an image from its score.

    Args:
        threshold: Lowest score of a ``defect``; with None an image is a ``defect`` if one was found
            in it.
        review: Lowest and highest score for ``review``, instead of the threshold; if the first one
            is higher, no score is for ``review``.
        is_unsure: The model is not reliable, so the verdict is always ``unsure``.
    """

    threshold: float | None = None
    review: tuple[float, float] | None = None
    is_unsure: bool = False

    def __call__(self, score: float, *, is_found: bool = False, fits: bool = True) -> str:
        """Return ``good``, ``defect``, ``review`` or ``unsure``.

        Args:
            score: Score of the image, as in the tables.
            is_found: True if a defect is found in it.
            fits: False if references do not fit, so that differences may not be defects.
        """
        if self.is_unsure:
            return UNSURE
        if not fits or math.isnan(score):
            return REVIEW
        if self.review is not None:
            good_below, defect_above = self.review
            if good_below <= score <= defect_above:
                return REVIEW
            return GOOD if score < good_below else DEFECT
        is_defective = is_found if self.threshold is None else score >= self.threshold
        return DEFECT if is_defective else GOOD

    @property
    def goes_by_score(self) -> bool:
        """Return True if the score decides, and not the found defects."""
        return self.threshold is not None or self.review is not None


def score_labels(probabilities: NDArray[Any], good: Collection[int]) -> float:
    """Return the score of an image: the probability that it belongs to no good class.

    Args:
        probabilities: [classes].
        good: Numbers of the good classes.
    """
    others = [number for number in range(len(probabilities)) if number not in good]
    return min(1.0, float(probabilities[others].sum(dtype=np.float64)))


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe the number of images with each verdict: ``180 images: 111 defect, 69 good``."""
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    total = sum(counts.values())
    return f"{counted(total, 'image')}: {listed}"
