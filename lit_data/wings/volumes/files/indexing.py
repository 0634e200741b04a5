"""Indexing of the occupied voxels of a dense volume, slab by slab."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.opening import naming
from lit_data.core.types import Array, Bools, Ints, Triple
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.files.sources import (
    VolumeSource,
    check_same_shape,
    open_labels,
    open_volume,
)
from lit_data.wings.volumes.files.sparse import LABEL_DTYPES, LabelIndex, SparseVolume, index_dtype
from lit_data.wings.volumes.files.volume import Volume

AIR_HU = -1024.0
_NO_LABELS = np.zeros(0, np.int32)
_LISTED = 5  # unknown labels in a message
_FORMAT = 1  # raised when the same files and options give other voxels

GROUP = 8
MAX_SHARE = 0.4
"""Fraction of occupied groups above which searching all voxels at once is faster."""

T = TypeVar("T")


def value_dtype(volume: Volume) -> "np.dtype[Any]":
    """Return the dtype of the values of occupied voxels: uint8, int16 or float32.

    Floats that are all whole numbers may become int16 later.
    """
    return np.dtype(np.uint8) if volume.dtype == np.bool_ else volume.dtype


def find_true(mask: Bools, levels: int = 2) -> NDArray[np.intp]:
    """Return the places where a flat mask is true, like ``flatnonzero`` but faster.

    Most groups of eight are empty and cost one comparison; only the others are searched voxel by
    voxel.

    Args:
        mask: [n].
        levels: Number of levels of groups of groups.

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
    """Compares slabs with a range of Hounsfield units, in a reused buffer.

    Whole numbers are compared as such. A mask of booleans is the result itself.

    Args:
        dtype: Dtype of the slabs: bool, uint8, int16 or float32.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and including this; None for no limit.
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

    @staticmethod
    def _compare(operation: np.ufunc, slab: Array, edge: float, out: Bools) -> None:
        # For whole numbers ``> 2.5`` is ``> 2``: rounding the edge down keeps both ``>`` and ``<=``
        # right.
        if slab.dtype.kind == "f":
            operation(slab, np.float32(edge), out=out)
            return
        limits = np.iinfo(slab.dtype)
        whole_edge = math.floor(edge)
        if limits.min <= whole_edge <= limits.max:
            operation(slab, slab.dtype.type(whole_edge), out=out)
        else:  # every value lies on one side of an edge outside the range of the dtype
            out[:] = operation(limits.max, whole_edge)


def read_labels(labels: Volume, begin: int, end: int) -> Array:
    """Read the labels of some slices: [n * y * x] uint8, int16 or int32.

    Raises:
        DataError: A label is not a whole number of at least 0.
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
    """Collects labeled voxels slab by slab.

    Args:
        shape: (z, y, x) of the volume.
        keep: Stores the positions of one class in one slab, and returns how to find them.
    """

    def __init__(self, shape: Triple, keep: Callable[[Array], T]) -> None:
        self._dtype = index_dtype(shape)
        self._keep = keep
        self._parts: defaultdict[int, list[T]] = defaultdict(list)
        self._counts: Counter[int] = Counter()

    @property
    def classes(self) -> NDArray[np.int32]:
        """The labels that occurred, ascending: [K] int32."""
        return np.array(sorted(self._parts), np.int32)

    @property
    def starts(self) -> Ints:
        """Start of each class among ``parts``: [K + 1] int64."""
        counts = [self._counts[label] for label in sorted(self._parts)]
        return np.cumsum([0, *counts], dtype=np.int64)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The smallest dtype that holds every label."""
        largest_label = max(self._parts, default=0)
        fitting = [name for name in LABEL_DTYPES if largest_label <= np.iinfo(name).max]
        return np.dtype(fitting[0])

    def add(self, offset: int, dense: Array) -> None:
        """Add the labels of a slab.

        Args:
            offset: Flat position of its first voxel.
            dense: [n] whole numbers, 0 for none.
        """
        places = find_true(dense != 0)
        if not len(places):
            return
        labels = dense.take(places)
        # Stable, so equal labels stay in order; takes linear time up to 16 bits.
        order = np.argsort(labels, kind="stable")
        positions = places.take(order).astype(self._dtype)
        positions += self._dtype.type(offset)
        # One part for each label of the slab.
        classes, starts = np.unique(labels.take(order), return_index=True)
        for label, part in zip(classes.tolist(), np.split(positions, starts[1:]), strict=True):
            self._parts[label].append(self._keep(part))
            self._counts[label] += len(part)

    def parts(self) -> Iterator[T]:
        """Yield everything that was stored: class by class, ascending within each."""
        for label in sorted(self._parts):
            yield from self._parts[label]


def check_labels(labels: NDArray[np.int32], classes: int | None) -> None:
    """Refuse labels of a volume that belong to no class.

    Args:
        labels: Labels of the volume, ascending.
        classes: Highest label; None allows any.

    Raises:
        DataError: There are higher labels.
    """
    unknown = [] if classes is None else labels[labels > classes].tolist()
    if unknown:
        listed = ", ".join(map(str, unknown[:_LISTED]))
        more = ", ..." if len(unknown) > _LISTED else ""
        raise DataError(
            f"unknown labels {listed}{more}; data.classes names {classes}, which are 1 to {classes}"
        )


def join_labels(collector: LabelCollector[Array], shape: Triple) -> LabelIndex:
    """Make an index from a collector that keeps the labeled voxels in memory."""
    parts = list(collector.parts())
    positions = np.concatenate(parts) if parts else np.zeros(0, index_dtype(shape))
    return LabelIndex(
        shape=shape, classes=collector.classes, starts=collector.starts, positions=positions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """Options that determine which voxels are occupied, and how the volume is read.

    Args:
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and including this; None for no limit.
        resolution: Size or spacing that the volume is resampled to first.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.
        classes: Highest label. Volumes with a higher one are bad, and so are labels whose position
            differs from that of their volume; None allows any label.

    Raises:
        ConfigError: An option is not allowed.
    """

    low_hu: float
    high_hu: float | None = None
    resolution: Resolution = field(default_factory=Resolution)
    nan_fill: float | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        is_right = math.isfinite(self.low_hu)
        if self.high_hu is not None:
            is_right = is_right and math.isfinite(self.high_hu) and self.high_hu > self.low_hu
        if not is_right:
            raise ConfigError(
                f"foreground from {self.low_hu} to {self.high_hu} HU: give numbers, the second "
                "above the first or null"
            )
        if self.nan_fill is not None and not math.isfinite(self.nan_fill):
            raise ConfigError(f"nan_fill={self.nan_fill!r} must be a finite number")

    def fingerprint(self) -> str:
        """Return everything that determines the result, as JSON with sorted keys."""
        options = asdict(self)
        if self.classes is None:
            del options["classes"]  # stores of any labels keep their names
        return json.dumps({"format": _FORMAT, **options}, sort_keys=True)


class Slab(NamedTuple):
    """Occupied voxels of a few slices.

    Attributes:
        begin: First slice.
        counts: [n] int64, occupied voxels of each slice.
        positions: [N] flat positions in the volume.
        values: [N] Hounsfield units.
        labels: [N] int32 label of each occupied voxel; empty without labels.
    """

    begin: int
    counts: Ints
    positions: Array
    values: Array
    labels: NDArray[np.int32]


@contextmanager
def open_with_labels(
    source: VolumeSource, options: IndexOptions
) -> Iterator[tuple[Volume, Volume | None]]:
    """Open a volume and its labels (None without), and close them at the end of the block.

    Raises:
        DataError: The volume or its labels are bad.
    """
    with open_volume(source, nan_fill=options.nan_fill) as volume:
        labels = open_labels(source, volume, aligned=options.classes is not None)
        with labels or nullcontext():
            yield volume, labels


def index_source(source: VolumeSource, options: IndexOptions) -> SparseVolume:
    """Find the occupied voxels of a file, in memory.

    Raises:
        DataError: The volume or its labels are bad.
    """
    with open_with_labels(source, options) as (volume, labels):
        return _index(volume, labels, options)


def index_volume(
    volume: Volume,
    low_hu: float,
    high_hu: float | None = None,
    *,
    resolution: Resolution | None = None,
    labels: Volume | None = None,
    classes: int | None = None,
) -> SparseVolume:
    """Find the occupied voxels of a volume: those above ``low_hu``, and not above ``high_hu``.

    Args:
        volume: The dense volume, read once from the first slice to the last.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and including this; None for no limit.
        resolution: Size or spacing that the volume is resampled to first; None leaves it as it is.
        labels: Labels, of the same shape as the volume.
        classes: Highest label; None allows any.

    Raises:
        ConfigError: The range is empty.
        DataError: The volume is bad, or its labels have another shape, are not whole numbers or are
            unknown.
    """
    resolution = resolution or Resolution()
    options = IndexOptions(low_hu=low_hu, high_hu=high_hu, resolution=resolution, classes=classes)
    return _index(volume, labels, options)


def _index(dense: Volume, dense_labels: Volume | None, options: IndexOptions) -> SparseVolume:
    volume, labels = bring_to(options, dense, dense_labels)
    collector = None if labels is None else LabelCollector(volume.shape, keep=_keep)
    slabs = list(scan_slabs(volume, options, labels=labels, collector=collector))
    values = np.concatenate([slab.values for slab in slabs])
    if is_whole(values):
        values = values.astype(np.int16)
    voxel_labels, label_index = None, None
    if collector is not None:
        check_labels(collector.classes, options.classes)
        voxel_labels = np.concatenate([slab.labels for slab in slabs]).astype(collector.dtype)
        label_index = join_labels(collector, volume.shape)
    counts = [slab.counts for slab in slabs]
    return SparseVolume(
        positions=np.concatenate([slab.positions for slab in slabs]),
        values=values,
        shape=volume.shape,
        spacing_mm=volume.spacing_mm,
        slices=np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64),
        affine=volume.affine,
        low_hu=options.low_hu,
        high_hu=options.high_hu,
        labels=voxel_labels,
        label_index=label_index,
    )


def bring_to(
    options: IndexOptions, volume: Volume, labels: Volume | None
) -> tuple[Volume, Volume | None]:
    """Resample a volume and its labels to the resolution of the options; voxels added around it are not occupied.

    Raises:
        DataError: The labels have another shape.
    """
    if labels is not None:
        check_same_shape(labels, volume)
        labels = options.resolution.apply(labels, fill=0, nearest=True)
    # Added voxels are air, or lower if even air would be occupied.
    fill_hu = math.floor(min(AIR_HU, options.low_hu))
    return options.resolution.apply(volume, fill=fill_hu), labels


def scan_slabs(
    volume: Volume,
    options: IndexOptions,
    *,
    labels: Volume | None,
    collector: LabelCollector[Any] | None,
) -> Iterator[Slab]:
    """Find the occupied voxels slab by slab, from the first slice on.

    Args:
        volume: Volume at the resolution of the options.
        options: Options that determine which voxels are occupied.
        labels: Labels of the volume; None without.
        collector: Collects the labeled voxels, even those that are not occupied.

    Raises:
        DataError: See ``index_volume``.
    """
    finder = OccupiedFinder(volume.dtype, options.low_hu, options.high_hu)
    plane = volume.shape[1] * volume.shape[2]
    positions_dtype = index_dtype(volume.shape)
    for begin, end in volume.slabs():
        slab = np.ascontiguousarray(volume.read(begin, end)).reshape(-1)
        places = finder.find(slab)  # within the slab
        # Start of each slice of the slab among its occupied voxels.
        edges = np.searchsorted(places, np.arange(end - begin + 1) * plane)
        voxel_labels = _NO_LABELS
        if labels is not None and collector is not None:
            dense = read_labels(labels, begin, end)
            collector.add(begin * plane, dense)
            voxel_labels = dense.take(places).astype(np.int32)
        positions = places.astype(positions_dtype)
        positions += positions_dtype.type(begin * plane)
        values = slab.take(places).astype(value_dtype(volume), copy=False)
        yield Slab(begin, np.diff(edges), positions, values, voxel_labels)


def is_whole(values: Array) -> bool:
    """Return True if float values are whole numbers in the range of int16, so that two bytes are enough."""
    if values.dtype.kind != "f":
        return False
    limits = np.iinfo(np.int16)
    fits_int16 = (values >= limits.min) & (values <= limits.max) & (values == np.rint(values))
    return bool(fits_int16.all())


def _keep(part: Array) -> Array:
    return part
