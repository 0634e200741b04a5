"""The ways to the occupied voxels of a volume that mode ``ct`` compares."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.ct_points import choose_points, write_coordinates, write_values
from lit_data.io.volumes.hounsfield import WINDOWS
from lit_data.io.volumes.indexing import IndexOptions, index_volume
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_npz import read_sparse_npz, write_npz
from lit_data.io.volumes.sparse_store import SparseStore

_WINDOW = WINDOWS["bone"]


class Cloud(NamedTuple):
    """A sample.

    Attributes:
        coords: [N, 4] int32 (row, z, y, x).
        feats: [N, 1] float32 in 0..1.
    """

    coords: NDArray[np.int32]
    feats: NDArray[np.float32]


Load = Callable[[int, int], Cloud]
"""Makes the sample of a volume in an epoch."""

Way = tuple[Callable[[], object] | None, Load]
"""What is done once before the first epoch, if anything is, and what is done for each sample."""


class Ways:
    """Every way, for volumes and for what is kept of them.

    Args:
        sources: The volumes.
        options: Which voxels are occupied.
        folder: For what the ways keep.
        subset_points: Points that the way ``subset`` draws.
    """

    def __init__(
        self, sources: Sequence[VolumeSource], options: IndexOptions, folder: Path, *, subset_points: int
    ) -> None:
        self.sources, self.options, self.folder, self.subset_points = sources, options, folder, subset_points
        self.store: SparseStore
        self._kept: dict[int, SparseVolume] = {}
        self._rows: dict[int, Cloud] = {}

    def by_name(self) -> dict[str, Way]:
        """The ways by the names of `lit_data.commands.benchmark.run`."""
        return {
            "argwhere": (None, lambda number, _: self.search_dense(number, _find_argwhere)),
            "nonzero": (None, lambda number, _: self.search_dense(number, _find_nonzero)),
            "memory_map": (None, lambda number, _: self.write(number, self.index(number))),
            "sparse_file": (self.write_files, lambda number, _: self.write(number, read_sparse_npz(self.file(number)))),
            "store": (self.build, lambda number, _: self.write(number, self.store[number])),
            "subset": (None, self.draw_subset),
            "cached": (None, lambda number, _: self.write(number, self.keep(number))),
        }

    def forget_rows(self) -> None:
        """Let the next sample need rows of its own."""
        self._rows.clear()

    def write(self, number: int, volume: SparseVolume, chosen: NDArray[np.int64] | None = None) -> Cloud:
        """Write a sample of all occupied voxels, or of some, into rows that are used again, as a loader's are."""
        positions = volume.positions if chosen is None else volume.positions[chosen]
        if number not in self._rows or len(self._rows[number].coords) < len(positions):
            coords, feats = np.zeros((len(positions), 4), np.int32), np.zeros((len(positions), 1), np.float32)
            self._rows[number] = Cloud(coords, feats)
        rows = self._rows[number]
        cloud = Cloud(rows.coords[: len(positions)], rows.feats[: len(positions)])
        write_coordinates(positions, volume.shape, cloud.coords)
        write_values(volume.values if chosen is None else volume.values[chosen], _WINDOW, cloud.feats[:, 0])
        return cloud

    def search_dense(self, number: int, find: Callable[[NDArray[np.bool_]], NDArray[np.int64]]) -> Cloud:
        """Read a whole volume and search it."""
        volume, high_hu = self._read(number), self.options.high_hu
        mask = volume > self.options.low_hu
        places = find(mask if high_hu is None else mask & (volume <= high_hu))
        rows = np.zeros((len(places), 4), np.int32)
        rows[:, 1:] = places
        return Cloud(rows, _WINDOW.scale(volume[tuple(places.T)])[:, None])

    def index(self, number: int) -> SparseVolume:
        """Find a volume's occupied voxels slab by slab."""
        with open_volume(self.sources[number], nan_fill=self.options.nan_fill) as volume:
            return index_volume(volume, self.options.low_hu, self.options.high_hu)

    def write_files(self) -> None:
        """Write a compressed archive for each volume."""
        for number in range(len(self.sources)):
            write_npz(self.index(number), self.file(number))

    def file(self, number: int) -> Path:
        """The archive of a volume."""
        return self.folder / "files" / f"{number}.npz"

    def build(self) -> None:
        """Index all volumes into the store."""
        self.store = SparseStore.build(self.sources, self.folder / "store", options=self.options, progress=False)

    def draw_subset(self, number: int, epoch: int) -> Cloud:
        """Some of a volume's occupied voxels from the store, others in each epoch."""
        volume = self.store[number]
        chosen = choose_points(len(volume), self.subset_points, seed=0, epoch=epoch, index=number)
        return self.write(number, volume, chosen)

    def keep(self, number: int) -> SparseVolume:
        """A volume from the memory of this process."""
        if number not in self._kept:
            self._kept[number] = self.index(number)
        return self._kept[number]

    def _read(self, number: int) -> NDArray[Any]:
        source = self.sources[number]
        if source.kind == "npy":
            dense: NDArray[Any] = np.load(source.path, allow_pickle=False)
            return dense
        with open_volume(source, nan_fill=self.options.nan_fill) as volume:
            return np.array(volume.read(0, volume.shape[0]))


def _find_argwhere(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.argwhere(mask)


def _find_nonzero(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.stack(np.nonzero(mask), axis=1)
