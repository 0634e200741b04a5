"""Dense copies of sparse volumes, from which windows are cut as slices."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.core.types import Array
from lit_data.images.store.arrays import keep_arrays
from lit_data.wings.volumes.datasets.computed import ComputedVolumes
from lit_data.wings.volumes.files.sparse import SparseVolume
from lit_data.wings.volumes.files.sparse_store import SparseStore

FORMAT_VERSION = 1  # raise it with every change of the arrays
_LEAST_INT16 = -(2**15)


class DenseVolume(NamedTuple):
    """All voxels of a volume, mapped read-only.

    Attributes:
        values: [Z, Y, X] int16 or float32 Hounsfield units; `empty` for voxels that are not
            occupied.
        labels: [Z, Y, X]; None in a volume without labels.
        empty: Value below all occupied ones.
    """

    values: Array
    labels: Array | None
    empty: float

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + (0 if self.labels is None else self.labels.nbytes)


class DenseVolumes(ComputedVolumes[DenseVolume]):
    """Dense volumes.

    A window of a sparse volume takes a search in each of its lines; a window of a dense one is a
    slice.

    Args:
        bank: The sparse volumes.
        folder: Folder of the dense volumes.
        empty_hu: Value of voxels that are not occupied; a lower one is used if occupied voxels are
            as low.
    """

    task = "writing dense volumes"
    bank: SparseStore

    def __init__(self, bank: SparseStore, folder: Path, empty_hu: float) -> None:
        super().__init__(bank, folder)
        self.empty_hu = empty_hu

    @override
    def open(self, number: int) -> DenseVolume:
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
    """Return a whole number of Hounsfield units for voxels that are not occupied.

    Args:
        volume: Volume whose occupied voxels are all above that number.
        empty_hu: Upper limit of the number.
    """
    return float(max(math.floor(min(empty_hu, volume.low_hu)), _LEAST_INT16))


def shape_dense(arrays: Mapping[str, Array], volume: SparseVolume, empty: float) -> DenseVolume:
    """Make a dense volume of the flat arrays of `fill_dense`."""
    values = arrays["values"].reshape(volume.shape)
    labels = arrays.get("labels")
    if labels is not None:
        labels = labels.reshape(volume.shape)
    return DenseVolume(values, labels, empty)


def fill_dense(volume: SparseVolume, empty: float) -> dict[str, Array]:
    """Return the flat arrays of a dense volume: its values, and its labels if it has any."""
    # Values of masks are uint8, which has nothing below them.
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
