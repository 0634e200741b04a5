"""Which voxels of a slab are occupied: one comparison, one search, no list of coordinates."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.io.volumes.volume import Volume
from lit_data.types import Array

GROUP: Final = 8
MAX_SHARE: Final = 0.4
"""With more groups occupied than this, searching all voxels at once is faster."""


def value_dtype(volume: Volume) -> "np.dtype[Any]":
    """Dtype of the values of its occupied voxels before whole numbers are told: uint8, int16 or float32."""
    return np.dtype(np.uint8) if volume.dtype == np.bool_ else volume.dtype


def find_true(mask: NDArray[np.bool_], levels: int = 2) -> NDArray[np.intp]:
    """Places where a flat mask is true, ascending: what ``flatnonzero`` gives, eight voxels at a time.

    Most groups of eight are empty and cost one comparison; only the others are searched voxel by voxel.

    Args:
        mask: [n].
        levels: Groups are found by groups of groups, so many times.
    """
    if not levels:
        return np.flatnonzero(mask)
    words = mask[: len(mask) // GROUP * GROUP].view(np.uint64)
    groups = find_true(words != 0, levels - 1)
    if len(groups) > MAX_SHARE * len(words):
        return np.flatnonzero(mask)
    inside = np.flatnonzero(words.take(groups).view(np.bool_))
    places = groups.take(inside >> 3)
    places <<= 3
    places |= inside & 7
    rest = np.flatnonzero(mask[words.nbytes :])
    return np.concatenate([places, rest + words.nbytes]) if len(rest) else places


class OccupiedFinder:
    """Compares slabs with the range into a buffer that is used again; whole numbers are compared as such.

    A mask of booleans needs no comparing: it is the result.

    Args:
        dtype: Of the slabs: bool, uint8, int16 or float32.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and with this one; None for no limit.
    """

    def __init__(self, dtype: "np.dtype[Any]", low_hu: float, high_hu: float | None) -> None:
        self._is_mask = dtype == np.bool_ and 0 <= low_hu < 1 and (high_hu is None or high_hu >= 1)
        self._dtype, self._low, self._high = dtype, low_hu, high_hu
        self._mask = self._more = np.zeros(0, np.bool_)

    def find(self, slab: Array) -> NDArray[np.intp]:
        """Places of the occupied voxels in a flat slab."""
        if self._is_mask:
            return find_true(slab)
        if slab.dtype == np.bool_:
            slab = slab.view(np.uint8)
        if len(self._mask) < len(slab):
            self._mask, self._more = np.empty(len(slab), np.bool_), np.empty(len(slab), np.bool_)
        mask = self._mask[: len(slab)]
        self._compare(np.greater, slab, self._low, mask)
        if self._high is not None:
            more = self._more[: len(slab)]
            self._compare(np.less_equal, slab, self._high, more)
            mask &= more
        return find_true(mask)

    def take(self, slab: Array, places: NDArray[np.intp]) -> Array:
        """Values at these places."""
        return (slab.view(np.uint8) if slab.dtype == np.bool_ else slab).take(places)

    @staticmethod
    def _compare(operation: np.ufunc, slab: Array, edge: float, out: NDArray[np.bool_]) -> None:
        # For whole numbers ``> 2.5`` is ``> 2``: with the edge rounded down both ``>`` and ``<=`` stay right.
        if slab.dtype.kind == "f":
            operation(slab, np.float32(edge), out=out)
            return
        limits = np.iinfo(slab.dtype)
        whole = math.floor(edge)
        if limits.min <= whole <= limits.max:
            operation(slab, slab.dtype.type(whole), out=out)
        else:  # every value lies on one side of an edge outside the range of the dtype
            out[:] = operation(limits.max, whole)
