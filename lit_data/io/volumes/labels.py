"""Label volumes: read as whole numbers, and kept class by class."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.source import naming
from lit_data.io.volumes.occupied import find_true
from lit_data.io.volumes.sparse import LABEL_DTYPES, LabelIndex, index_dtype
from lit_data.io.volumes.volume import Triple, Volume
from lit_data.types import Array

T = TypeVar("T")


def read_labels(labels: Volume, begin: int, end: int) -> Array:
    """Labels of some slices: [n * y * x] uint8, int16 or int32.

    Raises:
        DataError: not whole numbers of at least 0.
    """
    stored = labels.read(begin, end).reshape(-1)
    dense = stored.astype(np.int32) if stored.dtype.kind == "f" else stored
    if dense.dtype == np.bool_:
        return dense.view(np.uint8)
    if (dense.dtype.kind == "i" and dense.min() < 0) or not (dense is stored or np.array_equal(stored, dense)):
        with naming(labels.name):
            wrong = stored[(dense < 0) | (stored != dense)][0]
            raise DataError(f"label {wrong}; labels are whole numbers of at least 0, save them without interpolation")
    return dense


class LabelCollector(Generic[T]):
    """Gathers labelled voxels slab by slab.

    Args:
        shape: (z, y, x) of the volume.
        keep: Puts the positions of one class in one slab away and says where.
    """

    def __init__(self, shape: Triple, keep: Callable[[Array], T]) -> None:
        self._dtype, self._keep = index_dtype(shape), keep
        self._parts: defaultdict[int, list[T]] = defaultdict(list)
        self._counts: Counter[int] = Counter()

    @property
    def classes(self) -> NDArray[np.int32]:
        """[K] int32, the labels that occurred, ascending."""
        return np.array(sorted(self._parts), np.int32)

    @property
    def starts(self) -> NDArray[np.int64]:
        """[K + 1] int64, where each class begins among ``parts``."""
        return np.cumsum([0, *(self._counts[label] for label in sorted(self._parts))], dtype=np.int64)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The smallest dtype that holds every label."""
        highest = max(self._parts, default=0)
        return np.dtype(next(name for name in LABEL_DTYPES if highest <= np.iinfo(name).max))

    def add(self, offset: int, dense: Array) -> None:
        """Take the labels of a slab.

        Args:
            offset: Flat position of its first voxel.
            dense: [n] whole numbers, 0 for none.
        """
        places = find_true(dense != 0)
        if not len(places):
            return
        found = dense.take(places)
        order = np.argsort(found, kind="stable")  # equal labels stay in their order; linear time up to 16 bits
        positions = places.take(order).astype(self._dtype)
        positions += self._dtype.type(offset)
        classes, starts = np.unique(found.take(order), return_index=True)
        for label, part in zip(classes.tolist(), np.split(positions, starts[1:]), strict=True):
            self._parts[label].append(self._keep(part))
            self._counts[label] += len(part)

    def parts(self) -> Iterator[T]:
        """What was kept: class by class, ascending within each."""
        for label in sorted(self._parts):
            yield from self._parts[label]


def join_labels(collector: LabelCollector[Array], shape: Triple) -> LabelIndex:
    """All labelled voxels of a collector that keeps them in memory."""
    parts = list(collector.parts())
    positions = np.concatenate(parts) if parts else np.zeros(0, index_dtype(shape))
    return LabelIndex(shape=shape, classes=collector.classes, starts=collector.starts, positions=positions)
