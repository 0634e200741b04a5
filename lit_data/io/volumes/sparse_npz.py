"""Sparse volumes as compressed ``.npz`` archives, readable with NumPy alone.

Arrays of the archive, in the order of ``SparseVolume``:

    layout          []       int64, 1
    shape           [3]      int64 (z, y, x)
    spacing_mm      [3]      float64 (z, y, x)
    occupied_hu     [2]      float64, voxels above the first number and up to the second (inf: no limit) are occupied
    positions       [N]      int32 or int64, flat C-order positions, ascending
    values          [N]      uint8, int16 or float32, Hounsfield units
    slices          [z + 1]  int64, where each slice begins in positions
    affine          [4, 4]   float64, optional: from voxel numbers (x, y, z) to mm (right, anterior, superior)
    labels          [N]      uint8, uint16 or int32, optional: label of each occupied voxel
    classes         [K]      int32, with labels: those other than 0 that occur anywhere
    class_starts    [K + 1]  int64, with labels: where each class begins in class_positions
    class_positions [M]      as positions, with labels: all labelled voxels, ascending within a class
"""

import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from lit_data.errors import DataError
from lit_data.files import replacing
from lit_data.io.images.npz import read_npz
from lit_data.io.source import naming
from lit_data.io.store.files import explain_errors
from lit_data.io.volumes.hounsfield import StoredScale
from lit_data.io.volumes.sparse import LABEL_DTYPES, LabelIndex, SparseVolume, index_dtype
from lit_data.io.volumes.volume import FileVolume, Triple
from lit_data.types import Array

LAYOUT: Final = 1
_REQUIRED: Final = ("layout", "shape", "spacing_mm", "occupied_hu", "positions", "values", "slices")
_LABELS: Final = ("labels", "classes", "class_starts", "class_positions")


def write_npz(volume: SparseVolume, path: str | os.PathLike[str]) -> None:
    """Write a sparse volume as a compressed archive; it appears whole or not at all.

    Args:
        volume: What to write.
        path: Where, ending in ``.npz``; an archive there is replaced.

    Raises:
        DataError: the name does not end so.
        StoreSpaceError: the disk has no room.
        StoreError: the folder cannot be written to.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise DataError(f"{path}: the name of a sparse archive ends in .npz")
    with explain_errors(path.parent, volume.nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(file, allow_pickle=False, **_list_arrays(volume))


def read_sparse_npz(path: str | os.PathLike[str], *, max_total_bytes: int = 2**30) -> SparseVolume:
    """Read what ``write_npz`` wrote, and check everything that it promises.

    Args:
        path: The archive; it may come from anybody.
        max_total_bytes: Most bytes of all arrays together, unpacked.

    Raises:
        DataError: damaged, larger than allowed, or not of this layout.
    """
    arrays = read_npz(path, max_total_bytes=max_total_bytes)
    with naming(path):
        missing = [name for name in _REQUIRED if name not in arrays]
        if missing or arrays["layout"].tolist() != LAYOUT:
            raise DataError(
                f"not a sparse volume of layout {LAYOUT}: {', '.join(missing) or 'another layout'}"
            )
        return _build_volume(arrays)


def is_sparse_npz(path: str | os.PathLike[str]) -> bool:
    """Whether an archive has the arrays of a sparse volume; False as well for what is no archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {f"{name}.npy" for name in _REQUIRED} <= set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def open_sparse_npz(path: str) -> FileVolume:
    """Open a sparse archive as a dense volume, of which only the occupied voxels are known."""
    sparse = read_sparse_npz(path)
    limits = (
        np.iinfo(sparse.values.dtype) if sparse.values.dtype.kind != "f" else np.finfo(np.float32)
    )
    reader = _SparseSlices(sparse, max(math.floor(sparse.low_hu), float(limits.min)))
    scale = StoredScale(sparse.values.dtype)
    volume = FileVolume(path, reader, scale, spacing_mm=sparse.spacing_mm, affine=sparse.affine)
    volume.known_hu = sparse.low_hu, sparse.high_hu
    if sparse.label_index is not None:
        volume.labels = FileVolume(
            path, _LabelSlices(sparse.label_index), StoredScale(np.dtype(np.int32))
        )
    return volume


class _SparseSlices:
    def __init__(self, sparse: SparseVolume, fill: float) -> None:
        self._sparse, self._fill = sparse, fill
        self.shape: Triple = sparse.shape

    def read(self, begin: int, end: int) -> Array:
        return self._sparse.window((begin, 0, 0), (end - begin, *self.shape[1:]), self._fill)

    def close(self) -> None:
        """Nothing to close."""


class _LabelSlices:
    def __init__(self, index: LabelIndex) -> None:
        self._index = index
        self.shape: Triple = index.shape

    def read(self, begin: int, end: int) -> Array:
        return self._index.window((begin, 0, 0), (end - begin, *self.shape[1:]))

    def close(self) -> None:
        """Nothing to close."""


def _list_arrays(volume: SparseVolume) -> dict[str, Any]:
    arrays = {
        "layout": np.int64(LAYOUT),
        "shape": np.array(volume.shape, np.int64),
        "spacing_mm": np.array(volume.spacing_mm, np.float64),
        "occupied_hu": np.array(
            [volume.low_hu, np.inf if volume.high_hu is None else volume.high_hu], np.float64
        ),
        "positions": volume.positions,
        "values": volume.values,
        "slices": volume.slices,
        "affine": volume.affine,
        "labels": volume.labels,
    }
    if volume.label_index is not None:
        index = volume.label_index
        arrays |= {
            "classes": index.classes,
            "class_starts": index.starts,
            "class_positions": index.positions,
        }
    return {name: array for name, array in arrays.items() if array is not None}


def _build_volume(arrays: Mapping[str, Array]) -> SparseVolume:
    if (
        arrays["shape"].shape != (3,)
        or arrays["spacing_mm"].shape != (3,)
        or arrays["occupied_hu"].shape != (2,)
    ):
        raise DataError("shape, spacing_mm or occupied_hu have not three, three and two numbers")
    z, y, x = (int(length) for length in arrays["shape"])
    depth_mm, height_mm, width_mm = arrays["spacing_mm"].astype(np.float64).tolist()
    low_hu, high_hu = arrays["occupied_hu"].astype(np.float64).tolist()
    if min(z, y, x) < 1 or not np.isfinite(low_hu) or np.isnan(high_hu):
        raise DataError(f"shape {(z, y, x)} occupied from {low_hu} to {high_hu} HU")
    _check_positions(arrays["positions"], arrays["slices"], (z, y, x))
    affine = arrays.get("affine")
    if affine is not None and (affine.shape != (4, 4) or not np.isfinite(affine).all()):
        raise DataError(f"affine of shape {affine.shape}, or not finite; it is [4, 4]")
    return SparseVolume(
        positions=arrays["positions"],
        values=arrays["values"],
        shape=(z, y, x),
        spacing_mm=(depth_mm, height_mm, width_mm),
        slices=arrays["slices"],
        affine=affine,
        low_hu=low_hu,
        high_hu=None if high_hu == np.inf else high_hu,
        labels=arrays.get("labels"),
        label_index=_build_index(arrays, (z, y, x)),
    )


def _build_index(arrays: Mapping[str, Array], shape: Triple) -> LabelIndex | None:
    present = [name for name in _LABELS if name in arrays]
    if not present:
        return None
    if len(present) != len(_LABELS) or arrays["labels"].dtype.name not in LABEL_DTYPES:
        raise DataError(
            f"labels need all of {', '.join(_LABELS)}, of dtype {' or '.join(LABEL_DTYPES)}"
        )
    classes, starts = arrays["classes"], arrays["class_starts"]
    index = LabelIndex(shape, classes, starts, arrays["class_positions"])
    if classes.dtype != np.int32 or (classes < 1).any() or (np.diff(classes) < 1).any():
        raise DataError("the classes are not ascending whole numbers above 0")
    for label in classes.tolist():
        _check_ascending(index.of(label), shape)
    return index


def _check_positions(positions: Array, slices: Array, shape: Triple) -> None:
    _check_ascending(positions, shape)
    edges = np.arange(shape[0] + 1, dtype=np.int64) * (shape[1] * shape[2])
    if slices.dtype != np.int64 or not np.array_equal(slices, np.searchsorted(positions, edges)):
        raise DataError("slices do not say where each slice begins in positions")


def _check_ascending(positions: Array, shape: Triple) -> None:
    voxels = math.prod(shape)
    if positions.ndim != 1 or positions.dtype != index_dtype(shape):
        raise DataError(f"positions of dtype {positions.dtype} and shape {positions.shape}")
    if len(positions) and (
        positions[0] < 0 or positions[-1] >= voxels or (positions[1:] <= positions[:-1]).any()
    ):
        raise DataError(f"positions are not ascending, or not below {voxels}")
