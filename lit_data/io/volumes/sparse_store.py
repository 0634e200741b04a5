"""The sparse store: occupied voxels of the volumes of a dataset, indexed once and mapped."""

import logging
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from lit_data.errors import StoreError, list_problems, show_path
from lit_data.io.cache import LruCache
from lit_data.io.images.header_scan import OnBad
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_build import BuildPlan, build_missing, make_folder
from lit_data.io.volumes.sparse_file import MAX_OPEN, SUFFIX, StoredVolume

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Report about the volumes of a store.

    Attributes:
        volumes: Stored.
        refused: Left out because they are bad.
        points: Occupied voxels of all.
        dense_bytes: Of all volumes as dense arrays of their values' dtype.
        sparse_bytes: Of all files.
        ratio: Sparse by dense.
    """

    volumes: int
    refused: int
    points: int
    dense_bytes: int
    sparse_bytes: int

    @property
    def ratio(self) -> float:
        """Sparse by dense bytes."""
        return self.sparse_bytes / max(self.dense_bytes, 1)

    def __str__(self) -> str:
        dense, sparse = decimal(self.dense_bytes), decimal(self.sparse_bytes)
        return (
            f"{self.volumes} volumes, {self.points} occupied voxels: {dense} dense, "
            f"{sparse} sparse ({self.ratio:.2%}); {self.refused} refused"
        )


class SparseStore:
    """Sparse volumes by number, as read-only views of memory maps; made by ``build`` or ``open``.

    On disk it is a folder with one of arrays per volume (see ``sparse_file``), named by its key.
    They are published whole and never changed; a build that was killed goes on where it was. A
    store pickles as its paths alone.

    Attributes:
        path: The folder; one for each set of options.
        counts: [n] int64, occupied voxels of each volume.
        skipped: (path, what is wrong) of each volume that was left out.
        shapes: (z, y, x) voxels of each volume.
        has_labels: True for each volume that has labels.
        nbytes: Bytes of the arrays of all volumes.
        dense_bytes: Bytes of all volumes as dense arrays of their values' dtype.
    """

    def __init__(self, paths: Sequence[Path], skipped: tuple[tuple[str, str], ...] = ()) -> None:
        self._paths = [Path(path) for path in paths]
        self.path = self._paths[0].parent
        self.skipped = skipped
        self._volumes = [StoredVolume(path) for path in self._paths]
        counts = [volume.points for volume in self._volumes]
        self.counts: NDArray[np.int64] = np.array(counts, np.int64)
        self.shapes = [volume.facts.shape for volume in self._volumes]
        self.has_labels = ["labels" in volume.folder.arrays for volume in self._volumes]
        self.nbytes = sum(volume.array_bytes for volume in self._volumes)
        self.dense_bytes = sum(volume.dense_bytes for volume in self._volumes)
        # Each mapped volume holds descriptors, of which a process has few.
        self._mapped: LruCache[Path, SparseVolume] = LruCache(max_items=MAX_OPEN)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a store, its volumes sorted by name, without the dense volumes.

        Args:
            path: The folder, ``store.path``.

        Raises:
            StoreError: no store there, or it cannot be read.
            StoreCorruptError: a file is damaged.
        """
        paths = sorted(Path(path).glob(f"*{SUFFIX}"))
        if not paths:
            raise StoreError(
                f"no store of sparse volumes at {show_path(path)}; "
                "run `python -m lit_data prepare` to make it"
            )
        # Their files are named by digests, which say nothing of the order.
        names = {file: StoredVolume(file).facts.name for file in paths}
        return cls(sorted(paths, key=lambda file: (names[file], file.name)))

    @classmethod
    def build(
        cls,
        sources: Sequence[VolumeSource],
        folder: str | os.PathLike[str],
        *,
        options: IndexOptions,
        processes: int = 1,
        on_bad: OnBad = "error",
        wait_s: float = 3600,
        progress: bool = True,
    ) -> Self:
        """Open the store of these volumes, indexing first those that have no file yet.

        Args:
            sources: The volumes, at least one.
            folder: Holds the stores of one dataset, each in a folder named by its options.
            options: Which voxels are occupied.
            processes: That index at the same time; 1 works in this one.
            on_bad: ``error`` raises one error that lists all bad volumes, ``skip`` leaves them out
                and lists them.
            wait_s: Longest wait for another process that builds in the same folder.
            progress: Show a bar on work that takes longer than two seconds, and the sizes.

        Raises:
            ConfigError: an argument is not allowed.
            DataError: volumes are bad.
            StoreSpaceError: the disk has no room.
            StoreBusyError: another process still builds after ``wait_s``.
            StoreCorruptError: a file exists and is damaged.
            StoreError: the folder cannot be read or written.
            WorkerDiedError: a process died.
        """
        plan = BuildPlan(
            sources=tuple(sources),
            folder=make_folder(folder, options),
            options=options,
            processes=processes,
            on_bad=on_bad,
            wait_s=wait_s,
            progress=progress,
        )
        paths, bad = build_missing(plan)
        store = cls(paths, bad)
        list_problems(bad).warn_if_any(
            log, f"{len(bad)} of {len(sources)} volumes are bad and left out"
        )
        if progress:
            log.info("sparse store in %s: %s", show_path(store.path), store.report())
        return store

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> SparseVolume:
        """Map one volume; nothing is read before it is used.

        Raises:
            StoreCorruptError: its file is damaged.
        """
        path = self._paths[operator.index(index)]
        return self._mapped.get_or_load(path, lambda: StoredVolume(path).map())

    def __repr__(self) -> str:
        return f"SparseStore({self.report()}, {self.path})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._paths, self.skipped)

    def name(self, index: int) -> str:
        """Return the path of the source of one volume."""
        return self._volumes[index].facts.path

    def file(self, index: int) -> Path:
        """Return the folder of one volume."""
        return self._paths[index]

    def check_size(self) -> None:
        """Compare the length of every file with what was written, see `ArrayFolder.check_size`.

        Raises:
            StoreCorruptError: a file is not as long as it should be.
        """
        for volume in self._volumes:
            volume.folder.check_size()

    def find_damages(self) -> list[str]:
        """Read all bytes of all arrays; return a line for each that is not what was written."""
        damages: list[str] = []
        for volume in self._volumes:
            damages += filter(None, volume.folder.find_damages())
        return damages

    def report(self) -> StoreReport:
        """Return sizes, points and refused volumes."""
        return StoreReport(
            volumes=len(self),
            refused=len(self.skipped),
            points=int(self.counts.sum()),
            dense_bytes=self.dense_bytes,
            sparse_bytes=sum(volume.nbytes for volume in self._volumes),
        )
