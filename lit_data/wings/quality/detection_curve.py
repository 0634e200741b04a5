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

Floats = NDArray[np.float64]

_MOST_STEPS = 50
_CONVERGED = 1e-9
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
        # The likelihood of the fractions themselves, where 0 log 0 is 0.
        saturated = counts.trials * (_entropy(fractions) + _entropy(1 - fractions))
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
        estimate = (logit - self.intercept) / self.slope

        def is_beyond(x: float) -> bool:
            return best - _profile(self.counts, logit, x, self.slope) > most_loss

        bound = _find_first(is_beyond, estimate, step=0.02)
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
    """Return intercept and slope of the highest likelihood, by Newton's method."""
    design = np.stack((np.ones_like(counts.x), counts.x))
    weights = np.zeros(2)
    best = counts.likelihood(weights @ design)
    for _ in range(_MOST_STEPS):
        logits = weights @ design
        probability = 1 / (1 + np.exp(-logits))
        gradient = design @ (counts.hits - counts.trials * probability)
        curvature = (design * (counts.trials * probability * (1 - probability))) @ design.T
        # A trace of curvature where hits and misses are separated, and the slope has no limit.
        step = np.linalg.solve(curvature + _CONVERGED * np.eye(2), gradient)
        scale = 1.0
        while counts.likelihood((weights + scale * step) @ design) < best and scale > _CONVERGED:
            scale /= 2
        if abs(weights[1] + scale * step[1]) > _STEEPEST:
            break
        weights = weights + scale * step
        before, best = best, counts.likelihood(weights @ design)
        if best - before < _CONVERGED:
            break
    return float(weights[0]), float(weights[1])


def _profile(counts: _Counts, logit: float, x: float, slope: float) -> float:
    """Return the highest likelihood of curves that have a logit at x, over all rising slopes."""
    distance = counts.x - x
    likelihood = counts.likelihood(logit + slope * distance)
    for _ in range(_MOST_STEPS):
        probability = 1 / (1 + np.exp(-(logit + slope * distance)))
        gradient = float((distance * (counts.hits - counts.trials * probability)).sum())
        curvature = counts.trials * probability * (1 - probability) * distance**2
        # Newton's step, halved below until it gains; a slope that falls is no detection.
        step = gradient / (float(curvature.sum()) + _CONVERGED)
        moved = min(max(slope + step, 0.0), _STEEPEST)
        after = counts.likelihood(logit + moved * distance)
        while after < likelihood and abs(moved - slope) > _CONVERGED:
            moved = (moved + slope) / 2
            after = counts.likelihood(logit + moved * distance)
        gain = after - likelihood
        slope, likelihood = moved, max(after, likelihood)
        if gain < _CONVERGED:
            break
    return likelihood


def _find_first(is_beyond: Callable[[float], bool], start: float, step: float) -> float | None:
    """Return the first point behind a start that is beyond a limit, by doubling and halving."""
    low, high = start, start + step
    # Few targets leave the bound open: the likelihood hardly falls, however far one goes.
    while not is_beyond(high):
        low, step = high, 2 * step
        high += step
        if step > _WIDEST:
            return None
    for _ in range(_MOST_STEPS):
        middle = (low + high) / 2
        if is_beyond(middle):
            high = middle
        else:
            low = middle
    return high


def _entropy(fractions: Floats) -> Floats:
    """Return p log p, 0 for p = 0."""
    product: Floats = fractions * np.log(np.maximum(fractions, _CONVERGED))
    return product


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
