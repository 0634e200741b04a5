"""Signed distances of the occupied voxels of volumes, measured once and read by memory map."""

import hashlib
from pathlib import Path

import numpy as np

from lit_data.datasets.ct_distance import Distances, measure_points
from lit_data.errors import StoreError
from lit_data.files import replacing
from lit_data.io.progress import track
from lit_data.io.temp import sweep
from lit_data.io.volumes.banks import VolumeBank
from lit_data.io.volumes.sparse import SparseVolume

FORMAT_VERSION = 1  # raise it with every change of a distance


class PointDistances:
    """`distances[i]` are those of volume i of a bank; what is not in the folder is measured and put there.

    A file is named by what the distances depend on, so it is never out of date, and is renamed when it is complete, so
    several processes may measure the same volume.

    Args:
        bank: The volumes.
        folder: Where distances are kept; none measures them at every call.
        most_mm: Larger distances are cut to this; none keeps all.
    """

    def __init__(self, bank: VolumeBank, folder: Path | None, most_mm: float | None) -> None:
        self.bank, self.folder, self.most_mm = bank, folder, most_mm
        self._opened: dict[int, Distances] = {}

    def __getitem__(self, number: int) -> Distances:
        """Distances of one volume: [N] float32 mm, none of them positive; read-only."""
        if self.folder is None:
            return self._measure(self.bank[number])
        if number not in self._opened:
            self._opened[number] = self._open(self.bank[number], self.folder)
        return self._opened[number]

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_opened": {}}  # memory maps would be copied

    def prepare(self, *, progress: bool = True) -> None:
        """Measure what is not measured yet.

        Raises:
            StoreError: The folder cannot be written.
        """
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            for number in track(range(len(self.bank)), "measuring distances", len(self.bank), enabled=progress):
                self[number]

    def _open(self, volume: SparseVolume, folder: Path) -> Distances:
        path = folder / f"{self._identify(volume)}.npy"
        if not path.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(path, sync=False) as file:
                    np.save(file, self._measure(volume))
            except OSError as error:
                raise StoreError(f"cannot keep distances in {folder} ({error}); set data.cache_dir") from error
        distances: Distances = np.load(path, mmap_mode="r", allow_pickle=False)
        if len(distances) != len(volume):
            raise StoreError(f"{path} holds {len(distances)} distances of {len(volume)} voxels; remove it")
        return distances

    def _measure(self, volume: SparseVolume) -> Distances:
        return measure_points(volume.positions, volume.shape, volume.spacing_mm, self.most_mm)

    def _identify(self, volume: SparseVolume) -> str:
        about = repr((FORMAT_VERSION, volume.shape, volume.spacing_mm, self.most_mm))
        digest = hashlib.blake2b(about.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(volume.positions).data)
        return digest.hexdigest()
