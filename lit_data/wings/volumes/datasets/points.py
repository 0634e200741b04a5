"""Writers of samples of volumes into the rows of a batch: as points, or as dense windows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError, show_path
from lit_data.core.rng import Stream, random_words
from lit_data.core.types import COUNT_SUFFIX, Array, FieldSpec, Floats, Ints, Triple
from lit_data.wings.volumes.datasets.dense import (
    DenseVolume,
    DenseVolumes,
    choose_empty,
    fill_dense,
    shape_dense,
)
from lit_data.wings.volumes.datasets.distance import (
    PointDistances,
    empty_box,
    measure_signed,
    read_limit,
)
from lit_data.wings.volumes.datasets.windows import (
    WindowGrid,
    WindowSpec,
    choose_labelled,
    count_inside,
    draw_start,
    draw_words,
)
from lit_data.wings.volumes.files.hounsfield import Window
from lit_data.wings.volumes.files.sparse import SparseVolume, VolumeBank

_WORD_BITS = np.uint64(32)
_MOST_WINDOWS = 2**26  # of a grid, whose numbers are listed
_CHUNK = 2**16  # voxels at once, which stay in the cache of a core

UNLABELLED = -1
"""Label of all voxels of a volume without labels, in a dataset where others have labels."""


def choose_points(count: int, most: int, *, seed: int, epoch: int, index: int) -> Ints | None:
    """Choose some of `count` voxels, each with equal probability, none twice, in ascending order.

    The voxels form a ring that is rotated by a random number of places and cut into `most` arcs of
    equal length; each arc gives one voxel. The rotation makes all voxels equally likely; the arcs
    spread the subset over the whole volume, which a plain draw does not. Random numbers come from
    the sample's stream `Stream.POINTS` in its epoch.

    Args:
        count: Number of voxels.
        most: Number of voxels to choose.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**32.
        index: Number of the sample.

    Returns:
        [most] numbers of voxels; None if there are no more than that, so that all are taken.
    """
    if count <= most:
        return None
    words = random_words(seed, Stream.POINTS, index, epoch, most + 2)[0].astype(np.uint64)
    # 64 bits, so that the remainder is even enough for any volume.
    turn = int(words[0] << _WORD_BITS | words[1]) % count
    # Whole numbers, so that arcs differ by one voxel at most.
    edges = np.arange(most + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(most)
    places = edges[:-1] + (words[2:] * np.diff(edges) >> _WORD_BITS)
    places = places.astype(np.int64)
    # From here on, the rotation passes the end of the ring and continues at the smallest numbers.
    first = int(np.searchsorted(places, count - turn))
    return np.concatenate((places[first:] + (turn - count), places[:first] + turn))


def write_coordinates(positions: NDArray[np.signedinteger], shape: Triple, out: Array) -> None:
    """Convert flat positions to coordinates, directly in the rows of a batch.

    Args:
        positions: [N] int32 or int64, in C order.
        shape: (Z, Y, X) of the volume.
        out: [N, 4] int32, contiguous; set to (0, z, y, x).
    """
    import cv2

    _, height, width = shape
    planes = np.zeros((5, min(_CHUNK, len(positions))), positions.dtype)
    for begin in range(0, len(positions), _CHUNK):
        flat = positions[begin : begin + _CHUNK]
        target = out[begin : begin + _CHUNK]
        _, z, y, x, product = planes[:, : len(flat)]
        # Manual divisions: np.divmod is slower, and new arrays would leave the cache.
        np.floor_divide(flat, width, out=y)
        np.multiply(y, width, out=product)
        np.subtract(flat, product, out=x)
        np.floor_divide(y, height, out=z)
        np.multiply(z, height, out=product)
        np.subtract(y, product, out=y)
        # Three writes with gaps between them would take twice as long.
        parts = planes[:4, : len(flat)].astype(np.int32, copy=False)
        cv2.merge([part[None] for part in parts], dst=target[None])


def write_values(values: Array, window: Window, out: Array) -> None:
    """Scale values to 0..1 as `Window.scale` does, directly into the rows of a batch.

    Args:
        values: [N] or [D, H, W] Hounsfield units; lines need not be contiguous.
        window: Window whose edges become 0 and 1.
        out: float32 of the same shape; written.
    """
    low_hu, width_hu = np.float32(window.low_hu), np.float32(window.width_hu)
    step = max(1, _CHUNK // max(1, math.prod(values.shape[1:])))
    for begin in range(0, len(values), step):
        target = out[begin : begin + step]
        # Converted first: arithmetic of two types goes through small buffers.
        target[...] = values[begin : begin + step]
        target -= low_hu
        target /= width_hu
        np.clip(target, 0, 1, out=target)


def clear_outside(out: Array, shape: Sequence[int]) -> None:
    """Set the voxels of a box [D, H, W] to 0 outside a smaller box at its first voxel."""
    depth, height, width = shape
    out[depth:] = 0
    out[:depth, height:] = 0
    out[:depth, :height, width:] = 0


@dataclass(frozen=True, slots=True, eq=False)
class PointRows:
    """Writes the occupied voxels of a volume, or some of them.

    Sample number n is the n-th volume of the split.

    Args:
        bank: The volumes of all splits.
        volumes: [S] numbers of this split's volumes.
        window: Scales values to 0..1.
        most: Maximum number of points; this many are drawn from volumes with more.
        has_labels: True to write labels.
        distances: Signed distances of the points, or None.
        seed: Seed of all random numbers.
    """

    bank: VolumeBank
    volumes: Ints
    window: Window
    most: int
    has_labels: bool
    distances: PointDistances | None
    seed: int

    def __len__(self) -> int:
        return len(self.volumes)

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """Fields that `write` fills, in addition to the number of the sample."""
        columns = 1 if self.distances is None else 2
        fields = {
            "coords": FieldSpec((4,), "int32", max_items=self.most, row_column=True),
            "feats": FieldSpec((columns,), "float32", max_items=self.most),
        }
        if self.has_labels:
            fields["label"] = FieldSpec((1,), "int32", max_items=self.most)
        fields["occupied_total"] = FieldSpec((), "int64")
        return fields

    def volumes_of(self, numbers: Ints) -> Ints:
        """Return the volume of each sample: [n]."""
        return self.volumes[numbers]

    def place(self, rows: Mapping[str, Array], numbers: Ints, epoch: int) -> None:
        """Write the numbers of samples among those of all splits, which are also those of their volumes."""
        rows["index"][:] = rows["volume_index"][:] = self.volumes_of(numbers)

    def write(self, rows: Mapping[str, Array], row: int, epoch: int) -> SparseVolume:
        """Write one sample, and return its volume."""
        number = int(rows["volume_index"][row])
        volume = self.bank[number]
        chosen = choose_points(len(volume), self.most, seed=self.seed, epoch=epoch, index=number)
        count = len(volume) if chosen is None else len(chosen)
        write_coordinates(
            _take(volume.positions, chosen), volume.shape, rows["coords"][row, :count]
        )
        feats = rows["feats"][row, :count]
        write_values(_take(volume.values, chosen), self.window, feats[:, 0])
        if self.distances is not None:
            feats[:, 1] = _take(self.distances[number], chosen)
        if self.has_labels:
            # Losses skip voxels with -1.
            labels = UNLABELLED if volume.labels is None else _take(volume.labels, chosen)
            rows["label"][row, :count, 0] = labels
            rows["label" + COUNT_SUFFIX][row] = count
        rows["coords" + COUNT_SUFFIX][row] = count
        rows["feats" + COUNT_SUFFIX][row] = count
        rows["occupied_total"][row] = len(volume)
        return volume

    def describe(self, number: int) -> str:
        """Name a sample by its file."""
        return show_path(self.bank.name(int(self.volumes[number])))


@dataclass(eq=False)
class WindowRows:
    """Writes dense windows of volumes: those of a grid, or, for training, ones at random places.

    Args:
        bank: The volumes of all splits.
        volumes: [S] numbers of this split's volumes.
        window: Scales values to 0..1; voxels that are not occupied are 0.
        spec: Size of the windows and how they are placed.
        draws: True to place windows at random.
        has_labels: True to write labels.
        sdf: True to write signed distances.
        most_mm: Largest distance. None for no limit, which measures each window over its whole
            volume.
        seed: Seed of all random numbers.
        dense: Dense copies of the volumes, from which windows are cut faster.
    """

    bank: VolumeBank
    volumes: Ints
    window: Window
    spec: WindowSpec
    draws: bool
    has_labels: bool
    sdf: bool
    most_mm: float | None
    seed: int
    dense: DenseVolumes | None = None

    def __post_init__(self) -> None:
        """List the windows of the grid."""
        self.grid = WindowGrid(self.bank.shapes, self.spec.sides, self.spec.steps)
        self.left_out = 0
        self._numbers = np.zeros(0, np.int64) if self.draws else self._list_windows()

    def __len__(self) -> int:
        if self.draws:
            return len(self.volumes) * self.spec.per_volume
        return len(self._numbers)

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """Fields that `write` fills, in addition to the number of the sample."""
        shape = (1, *self.spec.sides)
        fields = {"image": FieldSpec(shape, "float32"), "occupied": FieldSpec(shape, "bool")}
        if self.sdf:
            fields["sdf"] = FieldSpec(shape, "float32")
        if self.has_labels:
            fields["mask"] = FieldSpec(shape, "int32")
        fields["position"] = FieldSpec((3,), "int64")
        return fields

    def locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the numbers of samples among those of all splits, and of their volumes."""
        if not self.draws:
            windows = self._numbers[numbers]
            return windows, self.grid.locate(windows)[0]
        volumes = self.volumes[numbers // self.spec.per_volume]
        # Numbered by volume, so that other splits do not change them.
        return volumes * self.spec.per_volume + numbers % self.spec.per_volume, volumes

    def volumes_of(self, numbers: Ints) -> Ints:
        """Return the volume of each sample: [n]."""
        return self.locate(numbers)[1]

    def place(self, rows: Mapping[str, Array], numbers: Ints, epoch: int) -> None:
        """Write the numbers of samples and of their volumes, and the positions of the windows."""
        indices, volumes = self.locate(numbers)
        rows["index"][:] = indices
        rows["volume_index"][:] = volumes
        if not self.draws:
            rows["position"][:] = self.grid.locate(indices)[1]
            return
        # One call for all samples takes as long as for one.
        words = draw_words(self.seed, indices, epoch)
        for row, volume in enumerate(volumes.tolist()):
            rows["position"][row] = self._draw(self.bank[volume], words[row])

    def write(self, rows: Mapping[str, Array], row: int, epoch: int) -> SparseVolume:
        """Write one sample, and return its volume."""
        number = int(rows["volume_index"][row])
        volume = self.bank[number]
        start = rows["position"][row].tolist()
        if self.dense is None:
            self._write_sparse(rows, row, volume, start)
        else:
            self._write_dense(rows, row, self.dense[number], start)
        if self.sdf:
            rows["sdf"][row, 0] = self._measure(volume, np.array(start))
        return volume

    def densify(self, number: int) -> DenseVolume:
        """Return all voxels of a volume: its dense copy, or one in memory if it has none."""
        if self.dense is not None:
            return self.dense[number]
        volume = self.bank[number]
        empty = choose_empty(volume, self.window.low_hu)
        return shape_dense(fill_dense(volume, empty), volume, empty)

    def _write_sparse(
        self, rows: Mapping[str, Array], row: int, volume: SparseVolume, start: Sequence[int]
    ) -> None:
        numbers, places = volume.find_inside(start, self.spec.sides)
        image, occupied = rows["image"][row], rows["occupied"][row]
        image[...] = 0
        # Only occupied voxels are scaled.
        image.reshape(-1)[places] = self.window.scale(volume.values[numbers])
        occupied[...] = False
        occupied.reshape(-1)[places] = True
        if not self.has_labels:
            return
        if volume.label_index is None:
            rows["mask"][row, 0] = UNLABELLED
        else:
            rows["mask"][row, 0] = volume.window_labels(start, self.spec.sides)

    def _write_dense(
        self, rows: Mapping[str, Array], row: int, volume: DenseVolume, start: Sequence[int]
    ) -> None:
        """Write a window of a dense volume; voxels past the volume's edge are empty."""
        z, y, x = start
        depth, height, width = self.spec.sides
        box = (slice(z, z + depth), slice(y, y + height), slice(x, x + width))
        values = volume.values[box]
        inside = tuple(map(slice, values.shape))
        names = ("image", "occupied", "mask") if self.has_labels else ("image", "occupied")
        if values.shape != self.spec.sides:
            for name in names:
                clear_outside(rows[name][row, 0], values.shape)
        write_values(values, self.window, rows["image"][row, 0][inside])
        # A number of another type would be compared in float64.
        empty = values.dtype.type(volume.empty)
        np.greater(values, empty, out=rows["occupied"][row, 0][inside])
        if not self.has_labels:
            return
        if volume.labels is None:
            rows["mask"][row] = UNLABELLED
        else:
            rows["mask"][row, 0][inside] = volume.labels[box]

    def describe(self, number: int) -> str:
        """Name a sample by its file, and by its place if that is not random."""
        indices, volumes = self.locate(np.array([number]))
        index = int(indices[0])
        name = show_path(self.bank.name(int(volumes[0])))
        if self.draws:
            return f"{name}, window {index % self.spec.per_volume}"
        z, y, x = self.grid.locate([index])[1][0].tolist()
        return f"{name}, window at (z {z}, y {y}, x {x})"

    def _draw(self, volume: SparseVolume, words: Sequence[int]) -> list[int]:
        """Return the first voxel of a window of a volume."""
        labelled = None
        if volume.label_index is not None:
            labelled = choose_labelled(volume.label_index, self.spec, words)
        return draw_start(volume.shape, self.spec, labelled, words)

    def _measure(self, volume: SparseVolume, start: Ints) -> Floats:
        """Measure the signed distances of a window over the part of the volume that they depend on."""
        limit_mm, margin = read_limit(volume.shape, volume.spacing_mm, self.most_mm)
        low = np.maximum(start - margin, 0)
        high = np.minimum(start + self.spec.sides + margin, volume.shape)
        box = empty_box((high - low).tolist())
        box.reshape(-1)[volume.find_inside(low.tolist(), box.shape)[1]] = True
        z, y, x = (start - low).tolist()  # of the window in the box
        depth, height, width = self.spec.sides
        box_mm = measure_signed(box, volume.spacing_mm, limit_mm)
        inside_mm = box_mm[z : z + depth, y : y + height, x : x + width]
        # Beyond the volume, a window has the largest distance.
        window_mm = np.full(self.spec.sides, limit_mm, np.float32)
        depth, height, width = inside_mm.shape
        window_mm[:depth, :height, :width] = inside_mm
        return window_mm

    def _list_windows(self) -> Ints:
        """Return the grid's windows of this split, without those that have too few voxels."""
        parts = [np.zeros(0, np.int64)]
        window_count = sum(len(self.grid.windows_of(volume)) for volume in self.volumes.tolist())
        if window_count > _MOST_WINDOWS:
            raise ConfigError(
                f"{window_count} windows of {len(self.volumes)} volumes are more than "
                f"{_MOST_WINDOWS}: give larger data.windows.size and data.windows.stride"
            )
        for volume in self.volumes.tolist():
            # Windows are numbered over all splits, so a stream does not depend on the split.
            windows = np.array(self.grid.windows_of(volume))
            if self.spec.min_points:
                counts = count_inside(
                    self.bank[volume], self.grid.locate(windows)[1], self.spec.sides
                )
                windows = windows[counts >= self.spec.min_points]
                self.left_out += len(counts) - len(windows)
            parts.append(windows)
        return np.concatenate(parts)


def _take(values: Array, chosen: Ints | None) -> Array:
    return values if chosen is None else values[chosen]
