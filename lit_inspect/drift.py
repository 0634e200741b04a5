"""Drift of inputs, and the bounds that it withdraws: `lit_data.risk.drift` in NumPy alone."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lit_inspect.bounds import Text
from lit_inspect.tiles import Rows

Floats = NDArray[np.float64]

WITHDRAWN = "withdrawn"
FEATURES = ("grey level", "contrast", "sharpness")
BLOCK = 200
_TERMS = 20
_LEVEL = 0.01
_LOOKED_AT_PX = 1024  # side of the middle of an image by which it is described


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Bounds of verdicts, and the images that they were calibrated with.

    Attributes:
        promise: The bounds in words.
        features: [n][3] of the images of the calibration.
    """

    promise: Text
    features: Annotated[tuple[tuple[float, float, float], ...], Field(min_length=1)]

    def find_drift(self, features: Floats) -> str | None:
        """Return the feature in which images differ most from the calibration; None if alike.

        Args:
            features: [m, 3] of images in their order, see `describe`.
        """
        if not len(features):
            return None
        known = np.array(self.features)
        is_odd = ~np.isfinite(features).all(0)
        if is_odd.any():  # no image of the calibration has such a feature
            return FEATURES[int(is_odd.argmax())]
        blocks = np.array_split(features, max(1, len(features) // BLOCK))
        # All tests share the level (Bonferroni), so many blocks alarm no more often than one.
        least, name = _LEVEL / (len(blocks) * len(FEATURES)), None
        for block in blocks:
            for number, feature in enumerate(FEATURES):
                p = p_value_of_same(known[:, number], block[:, number])
                if p < least:
                    least, name = p, feature
        return name


def describe(image: Rows) -> Floats:
    """Return the `FEATURES` of an image by its middle, [3]."""
    height, width = image.shape[1:]
    top, left = max(0, height - _LOOKED_AT_PX) // 2, max(0, width - _LOOKED_AT_PX) // 2
    pixels = image.read(top, min(top + _LOOKED_AT_PX, height))[:, :, left : left + _LOOKED_AT_PX]
    values = pixels.astype(np.float32)
    if pixels.dtype.kind in "ui":
        values /= np.iinfo(pixels.dtype.name).max
    low, median, high = np.nanpercentile(values, (25, 50, 75))
    steps = np.abs(np.diff(values, axis=-1))
    sharpness = float(np.nanmean(steps)) if steps.size else 0.0
    return np.array([median, high - low, sharpness], np.float64)


def p_value_of_same(first: Floats, second: Floats) -> float:
    """Return the p-value of the hypothesis that two samples have one distribution.

    Args:
        first: [n].
        second: [m].
    """
    pooled = np.concatenate((first, second))
    below_first = np.searchsorted(np.sort(first), pooled, side="right") / len(first)
    below_second = np.searchsorted(np.sort(second), pooled, side="right") / len(second)
    distance = float(np.abs(below_first - below_second).max())
    root = math.sqrt(len(first) * len(second) / len(pooled))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.3:  # where the series converges slowly, to 1
        return 1.0
    terms = np.arange(1, _TERMS + 1)
    return float(2 * ((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2)).sum())
