"""Dense copies of sparse volumes, of which a window is a slice."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.core.progress import track
from lit_data.core.recent_cache import LruCache
from lit_data.core.temp import sweep
from lit_data.core.types import Array
from lit_data.images.store.arrays import keep_arrays
from lit_data.wings.volumes.files.sparse import SparseVolume
from lit_data.wings.volumes.files.sparse_file import MAX_OPEN
from lit_data.wings.volumes.files.sparse_store import SparseStore

FORMAT_VERSION = 1  # raise it with every change of the arrays
_LEAST_INT16 = -(2**15)


class DenseVolume(NamedTuple):
    """All voxels of a volume, mapped read-only.

    Attributes:
        values: [Z, Y, X] int16 or float32 Hounsfield units; `empty` where nothing is occupied.
        labels: [Z, Y, X]; None in a volume that has no labels.
        empty: Below all that is occupied.
    """

    values: Array
    labels: Array | None
    empty: float

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + (0 if self.labels is None else self.labels.nbytes)


class DenseVolumes:
    """Dense volumes by number, written once each beside the sparse store.

    A window of a sparse volume takes a search in each of its lines; of a dense one it is a slice.

    Args:
        bank: The sparse volumes.
        folder: Where the dense ones are kept.
        empty_hu: Written where nothing is occupied; lower where occupied voxels are.
    """

    def __init__(self, bank: SparseStore, folder: Path, empty_hu: float) -> None:
        self.bank = bank
        self.folder = folder
        self.empty_hu = empty_hu
        self._mapped: LruCache[int, DenseVolume] = LruCache(max_items=MAX_OPEN)

    def __getitem__(self, number: int) -> DenseVolume:
        """Map a volume, which is written first if it is not there."""
        return self._mapped.get_or_load(number, lambda: self._open(number))

    def prepare(self) -> None:
        """Write all volumes that are not there.

        Raises:
            StoreError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder)
        for number in track(range(len(self.bank)), "writing dense volumes", len(self.bank)):
            self[number]

    def _open(self, number: int) -> DenseVolume:
        volume = self.bank[number]
        empty = choose_empty(volume, self.empty_hu)
        # The folder of a sparse volume is named by its files and all options.
        key = f"{self.bank.paths[number].stem}_{empty:g}"
        arrays = keep_arrays(
            self.folder, key, "dense", FORMAT_VERSION, lambda: fill_dense(volume, empty)
        )
        parts = {name: arrays.map(name, facts.dtype) for name, facts in arrays.arrays.items()}
        return shape_dense(parts, volume, empty)


def choose_empty(volume: SparseVolume, empty_hu: float) -> float:
    """Return the whole number of Hounsfield units that stands where nothing is occupied.

    Args:
        volume: Its occupied voxels lie above.
        empty_hu: As low at least.
    """
    return float(max(math.floor(min(empty_hu, volume.low_hu)), _LEAST_INT16))


def shape_dense(arrays: Mapping[str, Array], volume: SparseVolume, empty: float) -> DenseVolume:
    """Return the dense volume of the flat arrays of `fill_dense`."""
    values = arrays["values"].reshape(volume.shape)
    labels = arrays.get("labels")
    if labels is not None:
        labels = labels.reshape(volume.shape)
    return DenseVolume(values, labels, empty)


def fill_dense(volume: SparseVolume, empty: float) -> dict[str, Array]:
    """Return the flat arrays of a dense volume: its values, and its labels if it has any."""
    # Values of masks are uint8, in which nothing lies below them.
    dtype = np.result_type(volume.values.dtype, np.int16)
    values: NDArray[np.generic] = np.full(math.prod(volume.shape), empty, dtype)
    values[volume.positions] = volume.values
    arrays = {"values": values}
    index = volume.label_index
    if index is not None:
        highest = int(index.classes.max(initial=0))
        labels = np.zeros(len(values), np.min_scalar_type(highest))
        for label in index.classes.tolist():
            labels[index.of(label)] = label
        arrays["labels"] = labels
    return arrays
