"""Bounds on error rates, and thresholds that keep below them, for any distribution of scores.

Sources:

- C. J. Clopper, E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case
  of the binomial", Biometrika 26 (1934): `upper_rate` and `lower_rate`.
- A. N. Angelopoulos, S. Bates, E. J. Candès, M. I. Jordan, L. Lei, "Learn then Test: Calibrating
  predictive algorithms to achieve risk control", arXiv:2110.01052 (2021): `find_limit`, by
  fixed-sequence testing.
- S. Bates, A. Angelopoulos, L. Lei, J. Malik, M. I. Jordan, "Distribution-free, risk-controlling
  prediction sets", Journal of the ACM 68 (2021): the p-value of Hoeffding and Bentkus for losses
  between 0 and 1.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HALVINGS = 50
_ROUNDING = 1e-9


def find_tail(errors: int, trials: int, rate: float) -> float:
    """Return the probability of at most this many errors.

    Args:
        errors: Number of errors in the trials.
        trials: Number of independent trials.
        rate: Probability of an error, above 0 and below 1.

    Raises:
        ConfigError: SciPy is not installed.
    """
    return float(import_scipy().bdtr(errors, trials, rate))


def upper_rate(errors: int, trials: int, confidence: float) -> float:
    """Return an upper bound of an error rate, after Clopper and Pearson.

    Args:
        errors: Number of errors in the trials.
        trials: Number of independent trials.
        confidence: Probability that the bound holds, such as 0.95.

    Raises:
        ConfigError: SciPy is not installed.
    """
    if errors >= trials:
        return 1.0
    return float(import_scipy().betaincinv(errors + 1, trials - errors, confidence))


def lower_rate(hits: int, trials: int, confidence: float) -> float:
    """Return a lower bound of a hit rate; see `upper_rate`."""
    return 1 - upper_rate(trials - hits, trials, confidence)


def count_needed(rate: float, confidence: float) -> int:
    """Return the number of trials without an error that proves a rate: 149 for 2 % at 95 %."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-rate) - _ROUNDING)


def upper_mean(losses: Floats, confidence: float) -> float:
    """Return an upper bound of the mean of a loss, by the p-value of `p_value_of_mean`."""
    return _find_rate(lambda rate: p_value_of_mean(losses, rate), 1 - confidence)


def p_value_of_mean(losses: Floats, rate: float) -> float:
    """Return a p-value of the hypothesis that the mean of a loss is above a rate.

    It is the smaller one of those of Hoeffding's and Bentkus' inequalities (Bates et al. 2021,
    section 3.1).

    Args:
        losses: [n] losses of independent units, each from 0 to 1.
        rate: Rate, above 0 and below 1.
    """
    units = len(losses)
    mean = min(float(losses.mean()), rate)
    divergence = (1 - mean) * math.log((1 - mean) / (1 - rate))
    if mean > 0:
        divergence += mean * math.log(mean / rate)
    errors = math.ceil(float(losses.sum()) - _ROUNDING)
    bentkus = math.e * find_tail(errors, units, rate)
    return min(math.exp(-units * divergence), bentkus, 1.0)


def import_scipy(name: str = "special") -> Any:  # noqa: ANN401 - a module without types
    """Import a module of SciPy, which is an optional dependency.

    Raises:
        ConfigError: SciPy is not installed.
    """
    try:
        return import_module(f"scipy.{name}")
    except ImportError as error:
        raise ConfigError("bounds of error rates need SciPy: pip install scipy") from error


def _find_rate(find_p: Callable[[float], float], level: float) -> float:
    """Return the rate at which a p-value, which falls as the rate rises, reaches a level."""
    low, high = 0.0, 1.0
    # The upper end is returned, so that rounding never makes a bound too small.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if find_p(middle) > level:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Limit:
    """A threshold whose rate of errors is bounded.

    Attributes:
        threshold: Lower scores are called good.
        errors: Number of images of the calibration below it.
        upper_rate: Bound of the rate, at the confidence of the search.
    """

    threshold: float
    errors: int
    upper_rate: float


def find_limit(
    scores: Floats, rate: float, confidence: float, lots: Ints | None = None
) -> Limit | None:
    """Return the highest threshold that new scores fall below at no more than a given rate.

    Thresholds are tested from the lowest score upward. The search ends at the first threshold whose
    hypothesis "more scores fall below" is not rejected, so no correction for their number is needed
    (Angelopoulos et al. 2021, section 2.3). The p-value is that of the exact binomial test. For
    lots it is that of the fraction below in each lot, so that a lot counts once, whatever its size.

    Args:
        scores: [n] scores of images that must not be called good.
        rate: Fraction of such images below the threshold, above 0 and below 1.
        confidence: Probability, over calibrations, that the threshold keeps this rate.
        lots: [n] number of the lot of each image; None if images are independent of each other.

    Returns:
        The threshold; None if there are fewer images, or lots, than `count_needed`.
    """
    losses = _Losses(scores, lots)
    candidates = np.unique(scores)
    level = (1 - confidence) * (1 + _ROUNDING)

    def is_accepted(number: int) -> bool:
        return losses.find_p(candidates[number], rate) > level

    # P-values rise with the threshold, so bisection finds the end of the sequence.
    rejected = bisect_left(range(len(candidates)), True, key=is_accepted)
    if rejected == 0:
        return None
    threshold = float(candidates[rejected - 1])
    return Limit(threshold, int((scores < threshold).sum()), losses.bound(threshold, confidence))


class _Losses:
    """Fractions of the images of each lot below a threshold."""

    def __init__(self, scores: Floats, lots: Ints | None) -> None:
        self._scores = scores
        self._lots, self._sizes = lots, np.zeros(0, np.int64)
        if lots is not None:
            _, self._lots, self._sizes = np.unique(lots, return_inverse=True, return_counts=True)

    def find_p(self, threshold: float, rate: float) -> float:
        is_below = self._scores < threshold
        if self._lots is None:
            return find_tail(int(is_below.sum()), len(is_below), rate)
        return p_value_of_mean(self._average(is_below), rate)

    def bound(self, threshold: float, confidence: float) -> float:
        is_below = self._scores < threshold
        if self._lots is None:
            return upper_rate(int(is_below.sum()), len(is_below), confidence)
        return upper_mean(self._average(is_below), confidence)

    def _average(self, is_below: NDArray[np.bool_]) -> Floats:
        counts = np.bincount(self._lots, is_below)  # type: ignore[arg-type]  # only called with lots
        averages: Floats = counts / self._sizes
        return averages
