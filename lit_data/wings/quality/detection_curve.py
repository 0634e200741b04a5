"""Probability of detection over the size of a defect, from hits and misses.

Sources: MIL-HDBK-1823A, "Nondestructive evaluation system reliability assessment" (2009), appendix
G, and ASTM E2862, "Standard practice for probability of detection analysis for hit/miss data": a
logistic curve over the size or its logarithm, fitted by maximum likelihood, with bounds by the
ratio of likelihoods.
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
"""Largest change of the logit over the range of sizes: hits and misses are separated then."""
_POOR = 4.0  # standard deviations of the deviance that a curve is given up at
_WIDEST = 20.0  # ranges of sizes beyond the largest in which a bound is looked for


@dataclass(frozen=True)
class _Counts:
    """Hits and trials at each size, with sizes as x = (size - lowest) / range."""

    x: Floats
    hits: Floats
    trials: Floats

    def likelihood(self, logits: Floats) -> float:
        return float((self.hits * logits - self.trials * np.logaddexp(0, logits)).sum())


@dataclass(frozen=True)
class DetectionCurve:
    """Logistic curve of hits over sizes.

    Attributes:
        intercept: Logit at the smallest size.
        slope: Change of the logit up to the largest one.
        is_log: Sizes are taken by their logarithms.
        lowest: The smallest size, or its logarithm.
        span: Range of the sizes, or of their logarithms.
    """

    intercept: float
    slope: float
    is_log: bool
    lowest: float
    span: float
    counts: _Counts

    @property
    def is_poor(self) -> bool:
        """True if hits differ from the curve by more than chance, by its deviance."""
        counts = self.counts
        fractions = counts.hits / counts.trials
        # The likelihood of the fractions themselves.
        entropy = import_scipy().entr
        saturated = -counts.trials * (entropy(fractions) + entropy(1 - fractions))
        likelihood = counts.likelihood(self.intercept + self.slope * counts.x)
        deviance = 2 * (float(saturated.sum()) - likelihood)
        freedom = max(1, len(counts.x) - 2)
        return deviance > freedom + _POOR * math.sqrt(2 * freedom)

    def at(self, sizes: Floats) -> Floats:
        """Return the probability of detection at some sizes."""
        x = ((np.log(sizes) if self.is_log else sizes) - self.lowest) / self.span
        probability: Floats = 1 / (1 + np.exp(-(self.intercept + self.slope * x)))
        return probability

    def size_at(self, probability: float) -> float | None:
        """Return the size that is found with a probability; None if more size does not help."""
        if self.slope <= 0:
            return None
        return self._to_size((_logit(probability) - self.intercept) / self.slope)

    def bound_at(self, probability: float, confidence: float = 0.95) -> float | None:
        """Return the size that `size_at` lies below at a confidence, by the profile likelihood.

        Args:
            probability: Of detection, 0.9 for a90/95.
            confidence: Of the bound, on one side.

        Returns:
            The size; None if hits do not show that there is one.
        """
        if self.slope <= 0:
            return None
        # One side of an interval at 2 * confidence - 1, whose chi-square is a squared normal.
        most_loss = NormalDist().inv_cdf(confidence) ** 2 / 2
        best = self.counts.likelihood(self.intercept + self.slope * self.counts.x)
        logit = _logit(probability)
        bound = _find_root(
            lambda x: best - _profile(self.counts, logit, x) - most_loss,
            (logit - self.intercept) / self.slope,
        )
        return None if bound is None else self._to_size(bound)

    def _to_size(self, x: float) -> float | None:
        size = self.lowest + x * self.span
        if not self.is_log:
            return size
        return math.exp(size) if size < _STEEPEST else None


def fit_curve(sizes: Floats, hits: NDArray[np.bool_]) -> DetectionCurve | None:
    """Fit the probability of detection by maximum likelihood.

    Of the size and its logarithm the one is taken that the hits are more likely with.

    Args:
        sizes: [n] above 0.
        hits: [n] True where the defect was found.

    Returns:
        The curve; None if all were found, or none was, or all have one size.
    """
    if hits.all() or not hits.any() or np.ptp(sizes) == 0:
        return None
    curves = [_fit(sizes, hits, is_log=is_log) for is_log in (True, False)]
    return max(curves, key=lambda curve: curve[0])[1]


def _fit(sizes: Floats, hits: NDArray[np.bool_], *, is_log: bool) -> tuple[float, DetectionCurve]:
    values, group = np.unique(np.log(sizes) if is_log else sizes, return_inverse=True)
    lowest, span = float(values[0]), float(values[-1] - values[0])
    counts = _Counts(
        x=(values - lowest) / span,
        hits=np.bincount(group, hits).astype(np.float64),
        trials=np.bincount(group).astype(np.float64),
    )
    intercept, slope = _maximise(counts)
    likelihood = counts.likelihood(intercept + slope * counts.x)
    return likelihood, DetectionCurve(intercept, slope, is_log, lowest, span, counts)


def _maximise(counts: _Counts) -> tuple[float, float]:
    """Return intercept and slope of the highest likelihood."""

    def lose(weights: Floats) -> tuple[float, Floats]:
        logits = weights[0] + weights[1] * counts.x
        missing = counts.hits - counts.trials * expit(logits)
        return -counts.likelihood(logits), -np.array((missing.sum(), missing @ counts.x))

    expit, optimize = import_scipy().expit, import_scipy("optimize")
    # Where hits and misses are separated the slope has no limit.
    bounds = (None, None), (-_STEEPEST, _STEEPEST)
    fitted = optimize.minimize(lose, np.zeros(2), jac=True, bounds=bounds, tol=_CONVERGED)
    return float(fitted.x[0]), float(fitted.x[1])


def _profile(counts: _Counts, logit: float, x: float) -> float:
    """Return the highest likelihood of curves that have a logit at x, over all rising slopes."""
    distance = counts.x - x

    def lose(slope: float) -> float:
        return -counts.likelihood(logit + slope * distance)

    # A slope that falls is no detection.
    fitted = import_scipy("optimize").minimize_scalar(
        lose, bounds=(0, _STEEPEST), method="bounded", options={"xatol": _CLOSE}
    )
    return -float(fitted.fun)


def _find_root(excess: Callable[[float], float], start: float) -> float | None:
    """Return where an excess rises above 0, at a start or behind it; None where that is too far."""
    if excess(start) >= 0:  # of a curve that does not rise
        return start
    low, step = start, 0.02
    # Few targets leave the bound open: the likelihood hardly falls, however far one goes.
    while excess(low + step) <= 0:
        low, step = low + step, 2 * step
        if step > _WIDEST:
            return None
    return float(import_scipy("optimize").brentq(excess, low, low + step, xtol=_CLOSE))


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
