"""Drift of inputs: detection of images that differ from those of a calibration, so that its bounds do not hold.

Source: the test of Kolmogorov and Smirnov for two samples, with the approximation of its p-value by
M. A. Stephens, "Use of the Kolmogorov-Smirnov, Cramér-Von Mises and related statistics without
extensive tables", Journal of the Royal Statistical Society B 32 (1970).

The test assumes independent images. Images of one lot are similar, so drift is reported slightly
too often, and a guarantee for each image does not hold for them anyway.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lit_inspect.bounds import Text
from lit_inspect.tiles import Rows, read_middle

Floats = NDArray[np.float64]

WITHDRAWN = "withdrawn"
FEATURES = ("gray level", "contrast", "sharpness")
BLOCK = 200
"""Least number of images to compare at a time, so that earlier images do not hide drift that begins late."""
_TERMS = 20
_DECIMALS = 6
_LEVEL = 0.01  # probability of a false alarm over all blocks and features
LOOKED_AT_PX = 1024
"""Side of the center of an image from which its features are computed."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Bounds of verdicts, and the images that they were calibrated with.

    Attributes:
        promise: The bounds in words.
        features: [n][3] features of the calibration images.
    """

    promise: Text
    features: Annotated[tuple[tuple[float, float, float], ...], Field(min_length=1)]

    def find_drift(self, features: Floats) -> str | None:
        """Return the feature in which images differ most from the calibration; None if none differs.

        Args:
            features: [m, 3] features of images in their order, see `describe`.
        """
        return find_drift(np.array(self.features), features)


def find_drift(reference: Floats, features: Floats) -> str | None:
    """Return the feature in which images differ most from a reference; None if none differs.

    The images are compared in order, in blocks of equal length of `BLOCK` images or slightly more. A
    short last block would often have only one kind or lot.

    Args:
        reference: [n, F] features of the calibration.
        features: [m, F] features of new images.
    """
    if not len(features):
        return None
    is_odd = ~np.isfinite(features).all(0)
    if is_odd.any():  # no calibration image has such a value
        return FEATURES[int(is_odd.argmax())]
    blocks = np.array_split(features, max(1, len(features) // BLOCK))
    # All tests share the level (Bonferroni), so many blocks cause no more alarms than one.
    least, name = _LEVEL / (len(blocks) * len(FEATURES)), None
    for block in blocks:
        for number, feature in enumerate(FEATURES):
            p = p_value_of_same(reference[:, number], block[:, number])
            if p < least:
                least, name = p, feature
    return name


def describe(image: Rows) -> Floats:
    """Return the `FEATURES` of the center of an image, see `describe_pixels`."""
    return describe_pixels(read_middle(image, LOOKED_AT_PX))


def describe_pixels(pixels: NDArray[Any]) -> Floats:
    """Return the `FEATURES` of an image; a defect of a few pixels does not change them.

    Args:
        pixels: [C, H, W]; integers are divided by the range of their dtype.

    Returns:
        [3] median, interquartile range, and mean difference between adjacent pixels, rounded to the
            decimals of files: integers have few medians, so the test compares equal values.
    """
    values = pixels.astype(np.float32)
    if pixels.dtype.kind in "ui":
        values /= np.iinfo(pixels.dtype.name).max
    low, median, high = np.nanpercentile(values, (25, 50, 75))
    steps = np.abs(np.diff(values, axis=-1))
    sharpness = float(np.nanmean(steps)) if steps.size else 0.0
    return np.array([median, high - low, sharpness], np.float64).round(_DECIMALS)


def p_value_of_same(first: Floats, second: Floats) -> float:
    """Return the p-value of the hypothesis that two samples have the same distribution.

    Args:
        first: [n] values.
        second: [m] values.
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
