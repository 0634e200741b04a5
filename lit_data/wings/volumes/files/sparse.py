"""Occupied voxels of a volume: positions, values, and the start of each slice among them."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.core.bank import Bank
from lit_data.core.errors import DataError
from lit_data.core.types import Array, Ints, Spacing, Triple

VALUE_DTYPES = ("uint8", "int16", "float32")
LABEL_DTYPES = ("uint8", "uint16", "int32")


@dataclass(frozen=True, slots=True, eq=False)
class LabelIndex:
    """Index of all labeled voxels, class by class, occupied or not.

    Args:
        shape: (z, y, x) of the volume.
        classes: [K] int32, the labels other than 0 that occur, ascending.
        starts: [K + 1] int64, start of each class in ``positions``.
        positions: [M] flat C-order positions, ascending within a class; dtype as in
            ``SparseVolume``.
    """

    shape: Triple
    classes: NDArray[np.int32]
    starts: Ints
    positions: Array

    def __post_init__(self) -> None:
        _check_starts(self.starts, len(self.classes), len(self.positions), "classes")

    def of(self, label: int) -> Array:
        """Return the flat positions of one class as a view; empty if the class does not occur."""
        row = int(np.searchsorted(self.classes, label))
        if row == len(self.classes) or self.classes[row] != label:
            return self.positions[:0]
        return self.positions[self.starts[row] : self.starts[row + 1]]

    def window(self, start: Sequence[int], size: Sequence[int]) -> NDArray[np.int32]:
        """Return the labels of a box: [D, H, W] int32, 0 for unlabeled voxels and outside the volume.

        Args:
            start: (z, y, x) of the box's first voxel.
            size: (D, H, W).
        """
        box = np.zeros(tuple(size), np.int32)
        for label in self.classes.tolist():
            _, places = _find_inside(self.of(label), self.shape, start, size)
            box.reshape(-1)[places] = label
        return box


@dataclass(frozen=True, slots=True, eq=False)
class SparseVolume:
    """The occupied voxels of one volume; arrays may be read-only views of a memory map.

    Args:
        positions: [N] flat C-order positions, ascending; int32 in volumes of fewer than 2**31
            voxels, otherwise int64.
        values: [N] Hounsfield units: uint8 for masks, int16 if exact, otherwise float32.
        shape: (z, y, x) of the volume.
        spacing_mm: (z, y, x).
        slices: [z + 1] int64, start of each slice in ``positions``.
        affine: See ``Volume``; None if unknown.
        low_hu: Voxels above this are occupied ...
        high_hu: ... up to and including this; None for no limit.
        labels: [N] label of each occupied voxel; None without labels.
        label_index: All labeled voxels, even those that are not occupied; None without labels.

    Raises:
        DataError: The arrays do not match each other.
    """

    positions: Array
    values: Array
    shape: Triple
    spacing_mm: Spacing
    slices: Ints
    affine: Array | None = None
    low_hu: float = 0.0
    high_hu: float | None = None
    labels: Array | None = None
    label_index: LabelIndex | None = None

    def __post_init__(self) -> None:
        points = len(self.positions)
        has_index_dtype = self.positions.dtype == index_dtype(self.shape)
        if not has_index_dtype or self.values.dtype.name not in VALUE_DTYPES:
            raise DataError(
                f"positions {self.positions.dtype} and values {self.values.dtype} "
                "of a sparse volume"
            )
        if len(self.values) != points or (self.labels is not None and len(self.labels) != points):
            raise DataError(
                f"{points} positions but {len(self.values)} values, or another number of labels"
            )
        _check_starts(self.slices, self.shape[0], points, "slices")

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        nbytes: int = self.positions.nbytes + self.values.nbytes + self.slices.nbytes
        if self.labels is not None:
            nbytes += self.labels.nbytes
        if self.label_index is not None:
            index = self.label_index
            nbytes += index.positions.nbytes + index.classes.nbytes + index.starts.nbytes
        return nbytes

    def find_fault(self) -> str | None:
        """Check all arrays of a volume from an untrusted source; return a description of faults, or None."""
        depth, height, width = self.shape
        edges = np.arange(depth + 1, dtype=self.positions.dtype) * (height * width)
        faults = {
            "positions": not _are_places(self.positions, [], self.shape),
            "slices": not np.array_equal(np.searchsorted(self.positions, edges), self.slices),
            "values": self.values.dtype.kind == "f" and not np.isfinite(self.values).all(),
            "labels": self.labels is not None and self.labels.min(initial=0) < 0,
        }
        if self.label_index is not None:
            classes, starts = self.label_index.classes, self.label_index.starts
            positions = self.label_index.positions
            ascend = bool((classes[1:] > classes[:-1]).all())
            faults["classes"] = not ascend or classes.min(initial=1) < 1
            faults["labeled voxels"] = not _are_places(positions, starts[1:-1], self.shape)
        wrong_names = [name for name, is_wrong in faults.items() if is_wrong]
        return f"wrong: {', '.join(wrong_names)}" if wrong_names else None

    def coords(self) -> NDArray[np.int32]:
        """Return the coordinates of the occupied voxels, [N, 3] int32 (z, y, x)."""
        depth, height, width = self.shape
        coords = np.empty((len(self), 3), np.int32)
        # A division and a product are faster than two remainders.
        line = self.positions // width
        coords[:, 2] = self.positions - line * width
        coords[:, 0] = np.repeat(np.arange(depth, dtype=np.int32), np.diff(self.slices))
        coords[:, 1] = line - coords[:, 0] * height
        return coords

    def find_inside(self, start: Sequence[int], size: Sequence[int]) -> tuple[Ints, Ints]:
        """Find the occupied voxels of a box, visiting only those in its lines.

        Args:
            start: (z, y, x) of the box's first voxel.
            size: (D, H, W) of the box, which may reach past the volume.

        Returns:
            Two [n] int64: the voxels' numbers among the occupied ones, ascending, and their flat
            positions in the box.
        """
        return _find_inside(self.positions, self.shape, start, size)

    def window_labels(self, start: Sequence[int], size: Sequence[int]) -> NDArray[np.int32]:
        """Return the labels of a box, occupied or not: [D, H, W] int32, 0 for unlabeled voxels.

        Raises:
            DataError: The volume has no labels.
        """
        if self.label_index is None:
            raise DataError("the volume has no labels; put them next to it as NAME_labels.*")
        return self.label_index.window(start, size)


class VolumeBank(Bank):
    """Numbered sparse volumes.

    Attributes:
        counts: [n] int64, occupied voxels of each volume.
        shapes: (z, y, x) voxels of each volume.
        has_labels: True for each volume that has labels.
        nbytes: Bytes of the arrays of all volumes.
        dense_bytes: Bytes of all volumes as dense arrays of their values' dtype.
    """

    counts: Ints
    shapes: Sequence[Triple]
    has_labels: Sequence[bool]
    nbytes: int
    dense_bytes: int

    @abstractmethod
    def __getitem__(self, index: int) -> SparseVolume:
        """Map one volume, fetching it first if it is remote."""

    @abstractmethod
    def find_damages(self) -> list[str]:
        """Read every byte of all arrays; return a line for each array that has changed."""


def index_dtype(shape: Triple) -> "np.dtype[Any]":
    """Return the dtype of flat positions in a volume."""
    voxels = math.prod(shape)
    return np.dtype(np.int32 if voxels < 2**31 else np.int64)


def _find_rows(positions: Array, shape: Triple, start: Sequence[int], size: Sequence[int]) -> Ints:
    """Return the rows of ``positions`` in the slices and lines of a box.

    They are contiguous in each slice, and bisection finds them.
    """
    _, height, width = shape
    z = np.arange(max(start[0], 0), min(start[0] + size[0], shape[0]), dtype=np.int64)
    first, last = np.clip([start[1], start[1] + size[1]], 0, height).tolist()
    if not len(z) or first >= last:
        return np.zeros(0, np.int64)
    # Keys of another dtype than the positions would copy all of them; the last voxel fits into that
    # dtype even if the one after it does not.
    begins = np.searchsorted(positions, ((z * height + first) * width).astype(positions.dtype))
    ends = np.searchsorted(
        positions, ((z * height + last) * width - 1).astype(positions.dtype), side="right"
    )
    # Row n of the result is n plus the offset of its contiguous part in the positions.
    lengths = ends - begins
    offsets = begins - (np.cumsum(lengths) - lengths)
    return np.repeat(offsets, lengths) + np.arange(int(lengths.sum()))


def _find_inside(
    positions: Array, shape: Triple, start: Sequence[int], size: Sequence[int]
) -> tuple[Ints, Ints]:
    """Return the rows of the positions inside a box, and their flat places in it."""
    _, height, width = shape
    rows = _find_rows(positions, shape, start, size)
    line, x = np.divmod(positions[rows].astype(np.int64), width)
    x -= start[2]
    # These rows are in the slices and lines of the box, so only columns are compared.
    is_inside = (x >= 0) & (x < size[2])
    z, y = np.divmod(line[is_inside], height)
    places = ((z - start[0]) * size[1] + y - start[1]) * size[2] + x[is_inside]
    return rows[is_inside], places


def _are_places(positions: Array, starts: ArrayLike, shape: Triple) -> bool:
    """Return True if positions ascend from each start on, and are inside a volume."""
    if not len(positions):
        return True
    ascends = positions[1:] > positions[:-1]
    inner_starts = np.asarray(starts, np.int64)
    ascends[inner_starts[(inner_starts > 0) & (inner_starts < len(positions))] - 1] = True
    return bool(ascends.all() and positions.min() >= 0 and positions.max() < math.prod(shape))


def _check_starts(starts: Array, count: int, length: int, parts: str) -> None:
    has_ends = len(starts) == count + 1 and starts[0] == 0 and starts[-1] == length
    if not has_ends or (starts[1:] < starts[:-1]).any():
        raise DataError(f"the {parts} of a sparse volume do not cover its {length} positions once")
