"""Paths of SVG."""

import math

import numpy as np
from numpy.typing import NDArray


def trace(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """A path through the points that are there; it begins anew after each gap."""
    pieces, pen = [], "M"
    for px, py in zip(x, y, strict=True):
        if math.isfinite(py):
            pieces.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L" if math.isfinite(py) else "M"
    return "".join(pieces)


def trace_band(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> str:
    """An outline around what lies between two lines; one for each piece without a gap."""
    there = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8)))
    pieces = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        upper = [f"{px:.1f} {py:.1f}" for px, py in zip(x[first:end], high[first:end], strict=True)]
        lower = [f"{px:.1f} {py:.1f}" for px, py in zip(x[first:end], low[first:end], strict=True)]
        pieces.append(f"M{'L'.join([*upper, *lower[::-1]])}Z")
    return "".join(pieces)
