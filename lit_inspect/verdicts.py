"""`Judge`: the one rule by which images get verdicts, of maps, boxes and labels alike."""

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
    """Makes the verdict of an image of its score.

    Args:
        threshold: Least score of a ``defect``; None: an image is one in which a defect is found.
        review: Scores that are for ``review``, from and to, in the place of the threshold; none of
            them if the first one is higher.
        is_unsure: The model is of no use, and so is any verdict.
    """

    threshold: float | None = None
    review: tuple[float, float] | None = None
    is_unsure: bool = False

    def __call__(self, score: float, *, is_found: bool = False, fits: bool = True) -> str:
        """Return ``good``, ``defect``, ``review`` or ``unsure``.

        Args:
            score: Of the image, as tables have it.
            is_found: A defect is found in it.
            fits: False where references do not fit, so that what differs may be no defect.
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
        """Return True if it is the score that decides, and not what is found."""
        return self.threshold is not None or self.review is not None


def score_labels(probabilities: NDArray[Any], good: Collection[int]) -> float:
    """Return the score of an image: the probability that it is of no good class.

    Args:
        probabilities: [classes].
        good: Numbers of the good classes.
    """
    others = [number for number in range(len(probabilities)) if number not in good]
    return min(1.0, float(probabilities[others].sum(dtype=np.float64)))


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return images by their verdicts in words: ``180 images: 111 defect, 69 good``."""
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    total = sum(counts.values())
    return f"{counted(total, 'image')}: {listed}"
