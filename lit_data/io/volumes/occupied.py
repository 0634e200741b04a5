"""Search for the occupied voxels of a slab: one comparison, one search, no list of coordinates."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.source import naming
from lit_data.io.volumes.sparse import LABEL_DTYPES, LabelIndex, index_dtype
from lit_data.io.volumes.volume import Triple, Volume
from lit_data.types import Array

GROUP: Final = 8
MAX_SHARE: Final = 0.4
"""With more groups occupied than this, searching all voxels at once is faster."""


def value_dtype(volume: Volume) -> "np.dtype[Any]":
    """Return the dtype of the values of occupied voxels: uint8, int16 or float32.

    Floats that are all whole numbers may become int16 later.
    """
    return np.dtype(np.uint8) if volume.dtype == np.bool_ else volume.dtype


def find_true(mask: NDArray[np.bool_], levels: int = 2) -> NDArray[np.intp]:
    """Return the places where a flat mask is true, as ``flatnonzero`` does but sooner.

    Most groups of eight are empty and cost one comparison; only the others are searched voxel by
    voxel.

    Args:
        mask: [n].
        levels: Groups are found by groups of groups, so many times.

    Returns:
        [k] ascending.
    """
    if not levels:
        return np.flatnonzero(mask)
    # Eight booleans are one word, which is 0 if none of them is true.
    words = mask[: len(mask) // GROUP * GROUP].view(np.uint64)
    groups = find_true(words != 0, levels - 1)
    if len(groups) > MAX_SHARE * len(words):
        return np.flatnonzero(mask)
    inside = np.flatnonzero(words.take(groups).view(np.bool_))
    # Number of the group times 8, and place within it: bits that do not overlap.
    places = groups.take(inside >> 3)
    places <<= 3
    places |= inside & 7
    rest = np.flatnonzero(mask[words.nbytes :])
    return np.concatenate([places, rest + words.nbytes]) if len(rest) else places


class OccupiedFinder:
    """Compares slabs with a range of Hounsfield units, into a buffer that is used again.

    Whole numbers are compared as such. A mask of booleans needs no comparing: it is the result.

    Args:
        dtype: Of the slabs: bool, uint8, int16 or float32.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and with this one; None for no limit.
    """

    def __init__(self, dtype: "np.dtype[Any]", low_hu: float, high_hu: float | None) -> None:
        self._is_mask = dtype == np.bool_ and 0 <= low_hu < 1 and (high_hu is None or high_hu >= 1)
        self._low_hu, self._high_hu = low_hu, high_hu
        self._above_low = np.zeros(0, np.bool_)
        self._below_high = np.zeros(0, np.bool_)

    def find(self, slab: Array) -> NDArray[np.intp]:
        """Return the places of the occupied voxels in a flat slab."""
        if self._is_mask:
            return find_true(slab)
        if slab.dtype == np.bool_:
            slab = slab.view(np.uint8)
        if len(self._above_low) < len(slab):
            self._above_low = np.empty(len(slab), np.bool_)
            self._below_high = np.empty(len(slab), np.bool_)
        mask = self._above_low[: len(slab)]
        self._compare(np.greater, slab, self._low_hu, mask)
        if self._high_hu is not None:
            below_high = self._below_high[: len(slab)]
            self._compare(np.less_equal, slab, self._high_hu, below_high)
            mask &= below_high
        return find_true(mask)

    def take(self, slab: Array, places: NDArray[np.intp]) -> Array:
        """Return the values at these places; those of a mask as uint8."""
        if slab.dtype == np.bool_:
            slab = slab.view(np.uint8)
        return slab.take(places)

    @staticmethod
    def _compare(operation: np.ufunc, slab: Array, edge: float, out: NDArray[np.bool_]) -> None:
        # For whole numbers ``> 2.5`` is ``> 2``: with the edge rounded down both ``>`` and ``<=``
        # stay right.
        if slab.dtype.kind == "f":
            operation(slab, np.float32(edge), out=out)
            return
        limits = np.iinfo(slab.dtype)
        whole_edge = math.floor(edge)
        if limits.min <= whole_edge <= limits.max:
            operation(slab, slab.dtype.type(whole_edge), out=out)
        else:  # every value lies on one side of an edge outside the range of the dtype
            out[:] = operation(limits.max, whole_edge)


T = TypeVar("T")


def read_labels(labels: Volume, begin: int, end: int) -> Array:
    """Read the labels of some slices: [n * y * x] uint8, int16 or int32.

    Raises:
        DataError: not whole numbers of at least 0.
    """
    stored = labels.read(begin, end).reshape(-1)
    dense = stored.astype(np.int32) if stored.dtype.kind == "f" else stored
    if dense.dtype == np.bool_:
        return dense.view(np.uint8)
    is_whole = dense is stored or np.array_equal(stored, dense)
    is_negative = dense.dtype.kind == "i" and dense.min() < 0
    if is_negative or not is_whole:
        with naming(labels.name):
            wrong = stored[(dense < 0) | (stored != dense)][0]
            raise DataError(
                f"label {wrong}; labels are whole numbers of at least 0, "
                "save them without interpolation"
            )
    return dense


class LabelCollector(Generic[T]):
    """Gathers labelled voxels slab by slab.

    Args:
        shape: (z, y, x) of the volume.
        keep: Puts the positions of one class in one slab away, and returns how to find them.
    """

    def __init__(self, shape: Triple, keep: Callable[[Array], T]) -> None:
        self._dtype = index_dtype(shape)
        self._keep = keep
        self._parts: defaultdict[int, list[T]] = defaultdict(list)
        self._counts: Counter[int] = Counter()

    @property
    def classes(self) -> NDArray[np.int32]:
        """[K] int32, the labels that occurred, ascending."""
        return np.array(sorted(self._parts), np.int32)

    @property
    def starts(self) -> NDArray[np.int64]:
        """[K + 1] int64, where each class begins among ``parts``."""
        counts = [self._counts[label] for label in sorted(self._parts)]
        return np.cumsum([0, *counts], dtype=np.int64)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The smallest dtype that holds every label."""
        largest_label = max(self._parts, default=0)
        fitting = [name for name in LABEL_DTYPES if largest_label <= np.iinfo(name).max]
        return np.dtype(fitting[0])

    def add(self, offset: int, dense: Array) -> None:
        """Take the labels of a slab.

        Args:
            offset: Flat position of its first voxel.
            dense: [n] whole numbers, 0 for none.
        """
        places = find_true(dense != 0)
        if not len(places):
            return
        labels = dense.take(places)
        # Equal labels stay in their order; it takes linear time up to 16 bits.
        order = np.argsort(labels, kind="stable")
        positions = places.take(order).astype(self._dtype)
        positions += self._dtype.type(offset)
        classes, starts = np.unique(labels.take(order), return_index=True)
        for label, part in zip(classes.tolist(), np.split(positions, starts[1:]), strict=True):
            self._parts[label].append(self._keep(part))
            self._counts[label] += len(part)

    def parts(self) -> Iterator[T]:
        """Yield all that was put away: class by class, ascending within each."""
        for label in sorted(self._parts):
            yield from self._parts[label]


def join_labels(collector: LabelCollector[Array], shape: Triple) -> LabelIndex:
    """Make the index of a collector that keeps the labelled voxels in memory."""
    parts = list(collector.parts())
    positions = np.concatenate(parts) if parts else np.zeros(0, index_dtype(shape))
    return LabelIndex(
        shape=shape, classes=collector.classes, starts=collector.starts, positions=positions
    )
