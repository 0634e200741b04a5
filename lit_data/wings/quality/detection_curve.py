"""Probability of detection over the size of a defect, from hits and misses.

Sources: MIL-HDBK-1823A, "Nondestructive evaluation system reliability assessment" (2009), appendix
G, and ASTM E2862, "Standard practice for probability of detection analysis for hit/miss data".
The curve is logistic over the logarithm of the size, fitted by maximum likelihood, with bounds
by the likelihood ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lit_data.wings.quality.bounds import import_scipy

Floats = NDArray[np.float64]

_CONVERGED = 1e-9
_CLOSE = 1e-5  # of a slope, and of a size in units of their range
_STEEPEST = 200.0
"""Largest change of the logit over the range of sizes; beyond it, hits and misses are separated."""
_WIDEST = 20.0  # ranges of sizes beyond the largest in which a bound is searched


@dataclass(frozen=True)
class DetectionCurve:
    """Logistic curve of hits over the logarithm of the size.

    Attributes:
        intercept: Logit at the smallest size.
        slope: Change of the logit from the smallest to the largest size.
        lowest: Logarithm of the smallest size.
        span: Range of the logarithms.
        x: Tested sizes, as (logarithm - lowest) / span.
        hits: Number of hits at each of these sizes.
        trials: Number of trials at each of these sizes.
    """

    intercept: float
    slope: float
    lowest: float
    span: float
    x: Floats
    hits: Floats
    trials: Floats

    def at(self, sizes: Floats) -> Floats:
        """Return the probability of detection at each size."""
        x = (np.log(sizes) - self.lowest) / self.span
        probability: Floats = 1 / (1 + np.exp(-(self.intercept + self.slope * x)))
        return probability

    def size_at(self, probability: float) -> float | None:
        """Return the size that is found with a probability; None if larger defects are not found more often."""
        if self.slope <= 0:
            return None
        return self._to_size((_logit(probability) - self.intercept) / self.slope)

    def bound_at(self, probability: float, confidence: float = 0.95) -> float | None:
        """Return an upper bound of `size_at` at a confidence, by the profile likelihood.

        Args:
            probability: Probability of detection, 0.9 for a90/95.
            confidence: One-sided confidence of the bound.

        Returns:
            The size; None if hits do not show that there is one.
        """
        if self.slope <= 0:
            return None
        # One side of an interval at 2 * confidence - 1, whose chi-square is a squared normal.
        most_loss = NormalDist().inv_cdf(confidence) ** 2 / 2
        best = self._find_best()
        logit = _logit(probability)
        bound = _find_root(
            lambda x: best - self._profile(logit, x) - most_loss,
            (logit - self.intercept) / self.slope,
        )
        return None if bound is None else self._to_size(bound)

    def _find_best(self) -> float:
        return _likelihood(self.intercept + self.slope * self.x, self.hits, self.trials)

    def _profile(self, logit: float, x: float) -> float:
        """Return the highest likelihood of curves with this logit at x, over all rising slopes."""

        def lose(slope: float) -> float:
            return -_likelihood(logit + slope * (self.x - x), self.hits, self.trials)

        # A falling slope is no detection.
        fitted = import_scipy("optimize").minimize_scalar(
            lose, bounds=(0, _STEEPEST), method="bounded", options={"xatol": _CLOSE}
        )
        return -float(fitted.fun)

    def _to_size(self, x: float) -> float | None:
        size = self.lowest + x * self.span
        return math.exp(size) if size < _STEEPEST else None


def fit_curve(sizes: Floats, hits: NDArray[np.bool_]) -> DetectionCurve | None:
    """Fit the probability of detection by maximum likelihood.

    Args:
        sizes: [n] sizes above 0.
        hits: [n] True for defects that were found.

    Returns:
        The curve; None if all were found, none was found, or all have one size.
    """
    if hits.all() or not hits.any() or np.ptp(sizes) == 0:
        return None
    values, group = np.unique(np.log(sizes), return_inverse=True)
    lowest, span = float(values[0]), float(values[-1] - values[0])
    x = (values - lowest) / span
    counts = np.bincount(group, hits).astype(np.float64), np.bincount(group).astype(np.float64)
    return DetectionCurve(*_maximise(x, *counts), lowest, span, x, *counts)


def _maximise(x: Floats, hits: Floats, trials: Floats) -> tuple[float, float]:
    """Return intercept and slope of the highest likelihood."""

    def lose(weights: Floats) -> tuple[float, Floats]:
        logits = weights[0] + weights[1] * x
        missing = hits - trials * expit(logits)
        return -_likelihood(logits, hits, trials), -np.array((missing.sum(), missing @ x))

    expit, optimize = import_scipy().expit, import_scipy("optimize")
    # If hits and misses are separated, the slope has no limit.
    bounds = (None, None), (-_STEEPEST, _STEEPEST)
    fitted = optimize.minimize(lose, np.zeros(2), jac=True, bounds=bounds, tol=_CONVERGED)
    return float(fitted.x[0]), float(fitted.x[1])


def _likelihood(logits: Floats, hits: Floats, trials: Floats) -> float:
    return float((hits * logits - trials * np.logaddexp(0, logits)).sum())


def _find_root(excess: Callable[[float], float], start: float) -> float | None:
    """Return where an excess rises above 0, at or after a start; None if that is too far."""
    if excess(start) >= 0:  # of a curve that does not rise
        return start
    low, step = start, 0.02
    # Few targets leave the bound open: the likelihood hardly falls at any distance.
    while excess(low + step) <= 0:
        low, step = low + step, 2 * step
        if step > _WIDEST:
            return None
    return float(import_scipy("optimize").brentq(excess, low, low + step, xtol=_CLOSE))


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
