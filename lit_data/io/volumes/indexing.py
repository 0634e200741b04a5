"""From a dense volume to its occupied voxels, slab by slab."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.io.volumes.occupied import LabelCollector, OccupiedFinder, join_labels, read_labels
from lit_data.io.volumes.reading import check_same_shape, open_labels, open_volume
from lit_data.io.volumes.resampling import Resolution
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume, index_dtype
from lit_data.io.volumes.volume import SLAB_BYTES, Volume
from lit_data.types import Array

AIR_HU = -1024.0
_NO_LABELS = np.zeros(0, np.int32)
_FORMAT = 1  # raised when the same files and options give other voxels


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """Options that say which voxels are occupied, and how the volume is read.

    Args:
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and with this one; None for no limit.
        resolution: What the volume is brought to first.
        npz_key: Name of the array in ``.npz`` files; None takes the only one of three axes.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.
        slab_bytes: Bytes of Hounsfield units that are worked on at once; the result does not depend
            on it.

    Raises:
        ConfigError: an option is not allowed.
    """

    low_hu: float
    high_hu: float | None = None
    resolution: Resolution = field(default_factory=Resolution)
    npz_key: str | None = None
    nan_fill: float | None = None
    slab_bytes: int = SLAB_BYTES

    def __post_init__(self) -> None:
        _check_range(self.low_hu, self.high_hu)
        if self.nan_fill is not None and not math.isfinite(self.nan_fill):
            raise ConfigError(f"nan_fill={self.nan_fill!r} must be a finite number")
        if self.slab_bytes < 1:
            raise ConfigError(f"slab_bytes={self.slab_bytes} must be at least 1")

    def fingerprint(self) -> str:
        """Return all that decides the result, as JSON with sorted keys."""
        fields = asdict(self)
        del fields["slab_bytes"]  # the result does not depend on it
        return json.dumps({"format": _FORMAT, **fields}, sort_keys=True)


class Slab(NamedTuple):
    """Occupied voxels of a few slices.

    Attributes:
        begin: First slice.
        counts: [n] int64, occupied voxels of each slice.
        positions: [N] flat positions in the volume.
        values: [N] Hounsfield units.
        labels: [N] int32 label of each; empty without labels.
    """

    begin: int
    counts: NDArray[np.int64]
    positions: Array
    values: Array
    labels: NDArray[np.int32]


@contextmanager
def open_with_labels(
    source: VolumeSource, options: IndexOptions
) -> Iterator[tuple[Volume, Volume | None]]:
    """Open a volume and its labels, None without, and close them with the block.

    Raises:
        DataError: the volume or its labels are bad.
    """
    with open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill) as volume:
        labels = open_labels(source, volume, npz_key=options.npz_key)
        with labels or nullcontext():
            yield volume, labels


def index_source(source: VolumeSource, options: IndexOptions) -> SparseVolume:
    """Find the occupied voxels of a file, in memory.

    Raises:
        DataError: the volume or its labels are bad.
    """
    with open_with_labels(source, options) as (volume, labels):
        return index_volume(
            volume,
            options.low_hu,
            options.high_hu,
            resolution=options.resolution,
            labels=labels,
            slab_bytes=options.slab_bytes,
        )


def index_volume(
    volume: Volume,
    low_hu: float,
    high_hu: float | None = None,
    *,
    resolution: Resolution | None = None,
    labels: Volume | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> SparseVolume:
    """Find the occupied voxels of a volume: those above ``low_hu``, and not above ``high_hu``.

    Args:
        volume: The dense volume, read once from the first slice to the last.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and with this one; None for no limit.
        resolution: What the volume is brought to first; None leaves it as it is.
        labels: Of the same shape as the volume.
        slab_bytes: Bytes worked on at once.

    Raises:
        ConfigError: the range is empty.
        DataError: the volume is bad, or its labels have another shape or are not whole numbers.
    """
    _check_range(low_hu, high_hu)
    volume, labels = bring_to(resolution or Resolution(), volume, labels, low_hu)
    collector = None if labels is None else LabelCollector(volume.shape, keep=_keep)
    slabs = list(
        scan_slabs(
            volume, low_hu, high_hu, labels=labels, collector=collector, slab_bytes=slab_bytes
        )
    )
    values = np.concatenate([slab.values for slab in slabs])
    if is_whole(values):
        values = values.astype(np.int16)
    voxel_labels, label_index = None, None
    if collector is not None:
        voxel_labels = np.concatenate([slab.labels for slab in slabs]).astype(collector.dtype)
        label_index = join_labels(collector, volume.shape)
    return SparseVolume(
        positions=np.concatenate([slab.positions for slab in slabs]),
        values=values,
        shape=volume.shape,
        spacing_mm=volume.spacing_mm,
        slices=count_slices(slabs),
        affine=volume.affine,
        low_hu=low_hu,
        high_hu=high_hu,
        labels=voxel_labels,
        label_index=label_index,
    )


def bring_to(
    resolution: Resolution, volume: Volume, labels: Volume | None, low_hu: float
) -> tuple[Volume, Volume | None]:
    """Bring a volume and its labels to a resolution; voxels added around it are not occupied.

    Raises:
        DataError: the labels have another shape.
    """
    if labels is not None:
        check_same_shape(labels, volume)
        labels = resolution.apply(labels, fill=0, nearest=True)
    # Added voxels are air, or less where even air would be occupied.
    return resolution.apply(volume, fill=math.floor(min(AIR_HU, low_hu))), labels


def scan_slabs(
    volume: Volume,
    low_hu: float,
    high_hu: float | None,
    *,
    labels: Volume | None = None,
    collector: LabelCollector[Any] | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> Iterator[Slab]:
    """Find the occupied voxels slab by slab, from the first slice on.

    Args:
        volume: See ``index_volume``.
        low_hu: See ``index_volume``.
        high_hu: See ``index_volume``.
        labels: See ``index_volume``.
        collector: Takes the labelled voxels, also those that are not occupied.
        slab_bytes: See ``index_volume``.

    Raises:
        DataError: see ``index_volume``.
    """
    finder = OccupiedFinder(volume.dtype, low_hu, high_hu)
    plane = volume.shape[1] * volume.shape[2]
    positions_dtype = index_dtype(volume.shape)
    for begin, end in volume.slabs(slab_bytes):
        slab = np.ascontiguousarray(volume.read(begin, end)).reshape(-1)
        places = finder.find(slab)  # within the slab
        edges = np.searchsorted(places, np.arange(end - begin + 1) * plane)
        voxel_labels = _NO_LABELS
        if labels is not None and collector is not None:
            dense = read_labels(labels, begin, end)
            collector.add(begin * plane, dense)
            voxel_labels = dense.take(places).astype(np.int32)
        positions = places.astype(positions_dtype)
        positions += positions_dtype.type(begin * plane)
        values = finder.take(slab, places)
        yield Slab(begin, np.diff(edges), positions, values, voxel_labels)


def is_whole(values: Array) -> bool:
    """Return True if float values are whole numbers of int16, so that two bytes hold them."""
    if values.dtype.kind != "f":
        return False
    limits = np.iinfo(np.int16)
    fits_int16 = (values >= limits.min) & (values <= limits.max) & (values == np.rint(values))
    return bool(fits_int16.all())


def count_slices(slabs: Iterable[Slab]) -> NDArray[np.int64]:
    """Return [depth + 1] int64, the place among the occupied voxels at which each slice begins."""
    counts = [slab.counts for slab in slabs]
    return np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)


def _check_range(low_hu: float, high_hu: float | None) -> None:
    is_right = math.isfinite(low_hu)
    if high_hu is not None:
        is_right = is_right and math.isfinite(high_hu) and high_hu > low_hu
    if not is_right:
        raise ConfigError(
            f"occupied from {low_hu} to {high_hu} HU: give numbers, "
            "the second above the first or null"
        )


def _keep(part: Array) -> Array:
    return part
