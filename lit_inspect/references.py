"""Fit of references to their target, to detect wrong, shifted and missing references."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

MEASURED_PX = 1024
"""Side of the center of an image that is compared."""
SEARCH_PX = 2
"""Largest shift of a reference that nets with alignment are trained to tolerate."""
_STEP_PX = 3  # between compared rows, because neighboring rows are similar
_SLACK = 0.5  # in units of Fisher's z, whose spread does not depend on the correlation
_SURE = 1.0  # correlation of 0.76: above it with a large defect, below it for another part
_HIGHEST = 0.9999
_LEAST_OVERLAP = 4  # shifts of up to a quarter of a side, because small parts match by chance


class Fit(NamedTuple):
    """Fit of a reference, in units of Fisher's z of the correlation with its target.

    Attributes:
        near: Fit at the best shift of up to `SEARCH_PX`.
        gain: Improvement by the shift of the highest phase correlation; 0 if that shift is small.
        down: Vertical part of that shift, px.
        right: Horizontal part of that shift, px.
    """

    near: float
    gain: float
    down: int = 0
    right: int = 0


def measure_fit(target: Array, reference: Array) -> Fit:
    """Measure how well a reference fits its target, without and with the most likely shift.

    Args:
        target: [H, W] pixels.
        reference: [H, W] pixels.
    """
    near = _correlate_near(target, reference)
    down, right = _find_shift(target, reference)
    is_far = _LEAST_OVERLAP * max(abs(down) / target.shape[0], abs(right) / target.shape[1]) > 1
    if is_far or max(abs(down), abs(right)) <= SEARCH_PX:
        return Fit(near, 0.0)
    slipped = _correlate_near(*_overlap(target, reference, down, right))
    return Fit(near, max(0.0, slipped - near), down, right)


def find_limits(fits: Iterable[Fit]) -> tuple[float, float]:
    """Return the least ``near`` and the largest ``gain`` of correct references."""
    rows = list(fits)
    return min(fit.near for fit in rows), max(fit.gain for fit in rows)


def describe_misfits(image: Array, names: Sequence[str], limits: Sequence[float]) -> str:
    """Return the references of an image that do not fit its target, with reasons; empty if all fit.

    Args:
        image: [1 + references, H, W], the target first.
        names: Names of the channels.
        limits: Result of `find_limits`.
    """
    faults = []
    for name, reference in zip(names[1:], image[1:], strict=False):
        fault = _find_fault(image[0], reference, limits)
        if fault:
            faults.append(f"{name} {fault}")
    return ", ".join(faults)


def _find_fault(target: Array, reference: Array, limits: Sequence[float]) -> str:
    if target.min() == target.max():
        return ""
    if reference.min() == reference.max():
        return "is empty"
    least, largest_gain = limits
    fit = measure_fit(target, reference)
    limit = min(least - _SLACK, _SURE)
    if fit.gain > largest_gain + _SLACK and fit.near + fit.gain >= limit:
        return f"is shifted by {fit.down} px down and {fit.right} px right"
    return "does not fit" if fit.near < limit else ""


def _correlate_near(target: Array, reference: Array) -> float:
    """Return the highest correlation at shifts of up to `SEARCH_PX`, as Fisher's z."""
    height, width = target.shape
    reach = max(0, min(SEARCH_PX, (height - 1) // 2, (width - 1) // 2))
    rows = slice(reach, height - reach, _STEP_PX)
    inner = target[rows, reach : width - reach].astype(np.float32)
    inner = inner - inner.mean()
    best = -1.0
    for y, x in product(range(2 * reach + 1), repeat=2):
        part = reference[y : height - 2 * reach + y : _STEP_PX, x : width - 2 * reach + x]
        best = max(best, _correlate(inner, part.astype(np.float32)))
    return math.atanh(min(max(best, -_HIGHEST), _HIGHEST))


def _correlate(centred: Floats, other: Floats) -> float:
    deviation = other - other.mean()
    scale = math.sqrt(float(np.vdot(centred, centred)) * float(np.vdot(deviation, deviation)))
    return float(np.vdot(centred, deviation)) / scale if scale > 0 else 0.0


def _find_shift(target: Array, reference: Array) -> tuple[int, int]:
    """Return the shift (down, right) of a reference from its target by phase correlation, px.

    Half the resolution is enough, because `_correlate_near` searches around the result.
    """
    import cv2

    height, width = target.shape
    size = max(2, width // 2), max(2, height // 2)
    window = cv2.createHanningWindow(size, cv2.CV_32F)
    first = cv2.resize(target.astype(np.float32), size, interpolation=cv2.INTER_AREA)
    second = cv2.resize(reference.astype(np.float32), size, interpolation=cv2.INTER_AREA)
    (right, down), _ = cv2.phaseCorrelate(first, second, window)
    return round(2 * down), round(2 * right)


def _overlap(target: Array, reference: Array, down: int, right: int) -> tuple[Array, Array]:
    """Return the overlapping parts of target and reference for a shift."""
    height, width = target.shape
    moved = reference[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    still = target[max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)]
    return still, moved
