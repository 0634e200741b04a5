"""Sparse volumes by number, whenever they are made: before the first epoch, at first use, or anew each time."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.io.images.header_scan import OnBad
from lit_data.io.store.files import explain_errors
from lit_data.io.store.shared_arrays import share_state
from lit_data.io.temp import sweep
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.preload import check_headers, index_all, index_source, warm_folders
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_build import find_file, make_folder
from lit_data.io.volumes.sparse_file import LastOpened, StoredVolume, write_volume
from lit_data.io.volumes.sparse_store import SparseStore


class VolumeBank(Protocol):
    """Sparse volumes by number."""

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """[n] int64, occupied voxels of each volume; None until all are known."""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(path, what is wrong) of each volume that was left out."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SparseVolume: ...

    def name(self, index: int) -> str:
        """Path of the source of one volume."""

    def check_size(self) -> None:
        """Raise if a mapped file changed its length: reading past its end kills a process and cannot be caught."""


class CachedBank:
    """Keeps every volume that it gave, in the memory of this process; a pickled copy starts empty.

    Args:
        bank: Where volumes come from.
    """

    def __init__(self, bank: VolumeBank) -> None:
        self._bank = bank
        self._kept: dict[int, SparseVolume] = {}

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """See ``VolumeBank``; known as well once all volumes were given."""
        if self._bank.counts is None and len(self._kept) == len(self):
            return np.array([len(self._kept[index]) for index in range(len(self))], np.int64)
        return self._bank.counts

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """See ``VolumeBank``."""
        return self._bank.skipped

    def __len__(self) -> int:
        return len(self._bank)

    def __getitem__(self, index: int) -> SparseVolume:
        """One volume, from memory if it was given before."""
        volume = self._kept.get(index)
        if volume is None:
            volume = self._kept[index] = self._bank[index].in_memory()
        return volume

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._bank,)

    def name(self, index: int) -> str:
        """Path of the source of one volume."""
        return self._bank.name(index)

    def check_size(self) -> None:
        """See ``VolumeBank``."""
        self._bank.check_size()


class MemoryBank:
    """Volumes in memory that worker processes share.

    Args:
        volumes: All of them.
        names: Paths of their sources.
        skipped: (path, what is wrong) of volumes that were left out.
    """

    def __init__(
        self,
        volumes: Sequence[SparseVolume],
        names: Sequence[str],
        skipped: tuple[tuple[str, str], ...],
    ) -> None:
        self._volumes, self._names, self.skipped = list(volumes), list(names), skipped
        self.counts: NDArray[np.int64] = np.array(list(map(len, self._volumes)), np.int64)

    def __len__(self) -> int:
        return len(self._volumes)

    def __getitem__(self, index: int) -> SparseVolume:
        """One volume."""
        return self._volumes[index]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, ("_volumes", "_names", "skipped", "counts"))

    def name(self, index: int) -> str:
        """Path of the source of one volume."""
        return self._names[index]

    def check_size(self) -> None:
        """No file is mapped."""


__all__ = ["DirectBank", "LazyBank", "Precompute", "Preload", "VolumeBank", "open_bank"]

Precompute = Literal[True, False, "lazy"]
Preload = Literal[True, False, "auto"]
PRELOAD_VOLUMES: Final = 100
"""``preload="auto"`` reads sets of at most so many volumes beforehand."""


def open_bank(
    sources: Sequence[VolumeSource],
    folder: str | os.PathLike[str],
    *,
    options: IndexOptions,
    precompute: Precompute = True,
    cache_data: bool = False,
    preload: Preload = "auto",
    preload_bytes: int = 0,
    processes: int = 1,
    on_bad: OnBad = "error",
    progress: bool = True,
) -> VolumeBank:
    """Make what a dataset reads its volumes from; call it before workers start, once on a machine.

    Args:
        sources: The volumes.
        folder: Holds the stores of this data set.
        options: Which voxels are occupied.
        precompute: True indexes all volumes now, into the store; ``lazy`` each at its first use,
            into the store too; False anew each time it is asked for, without a store.
        cache_data: Keep in the memory of each process what it was given once.
        preload: True reads all volumes now: those of a store into the page cache, others into
            memory that workers share. ``auto`` does so if there are at most 100 of them that fit
            into ``preload_bytes``; without a store they count as if every voxel were occupied, and
            under ``lazy`` it leaves them to their first use.
        preload_bytes: Share of the available memory that ``auto`` may fill.
        processes: That index at the same time, under ``precompute=True``.
        on_bad: ``error`` raises one error that lists all bad volumes, ``skip`` leaves them out.
            Without ``precompute=True`` only the headers are looked at now.
        progress: Show bars on work that takes long, and sizes.

    Raises:
        ConfigError: an option is not allowed.
        DataError: volumes are bad.
        StoreError: or one of its kinds: the store cannot be read or written.
    """
    if precompute not in (True, False, "lazy") or preload not in (True, False, "auto"):
        raise ConfigError(
            f"precompute={precompute!r}, preload={preload!r}: give true, false, or 'lazy' and 'auto'"
        )
    bank: VolumeBank
    if precompute is True:
        store = SparseStore.build(
            sources, folder, options=options, processes=processes, on_bad=on_bad, progress=progress
        )
        if preload is True or (preload == "auto" and _fits(store, preload_bytes)):
            warm_folders([store.file(index) for index in range(len(store))], progress=progress)
        return CachedBank(store) if cache_data else store
    good, skipped = check_headers(sources, options, on_bad, progress=progress)
    if precompute is False and (
        preload is True or (preload == "auto" and _may_fit(good, preload_bytes))
    ):
        return MemoryBank(
            index_all(good, options, progress=progress), [source.path for source in good], skipped
        )
    bank = (
        DirectBank(good, options, skipped)
        if precompute is False
        else LazyBank(good, folder, options, skipped)
    )
    if isinstance(bank, LazyBank) and preload is True:
        warm_folders([bank.file(index) for index in range(len(bank))], progress=progress)
    return CachedBank(bank) if cache_data else bank


class DirectBank:
    """Volumes that are indexed from their dense files each time they are asked for.

    Args:
        sources: The volumes.
        options: Which voxels are occupied.
        skipped: (path, what is wrong) of volumes that were left out.
    """

    def __init__(
        self,
        sources: Sequence[VolumeSource],
        options: IndexOptions,
        skipped: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._sources, self._options, self.skipped = tuple(sources), options, skipped

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """See ``VolumeBank``; nobody counts before they are asked for."""
        return None

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> SparseVolume:
        """Index one volume.

        Raises:
            DataError: it is bad.
        """
        return index_source(self._sources[index], self._options)

    def name(self, index: int) -> str:
        """Path of the source of one volume."""
        return self._sources[index].path

    def check_size(self) -> None:
        """No file stays mapped."""


class LazyBank(DirectBank):
    """Volumes of a store that whoever asks first fills: worker, rank or run.

    Args:
        sources: The volumes.
        folder: Holds the stores of this data set.
        options: Which voxels are occupied.
        skipped: (path, what is wrong) of volumes that were left out.
    """

    def __init__(
        self,
        sources: Sequence[VolumeSource],
        folder: str | os.PathLike[str],
        options: IndexOptions,
        skipped: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(sources, options, skipped)
        self._folder = make_folder(folder, options)
        self._files: dict[int, Path] = {}
        self._open: LastOpened[Path, SparseVolume] = LastOpened()
        if self._folder.exists():
            sweep(self._folder)

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """See ``VolumeBank``; known once every volume has its file."""
        files = [find_file(source, self._folder, self._options) for source in self._sources]
        if not all(file.exists() for file in files):
            return None
        return np.array([StoredVolume(file).points for file in files], np.int64)

    def __getitem__(self, index: int) -> SparseVolume:
        """Map one volume, indexing it first where it has no file yet.

        Raises:
            DataError: it is bad.
            StoreError: or one of its kinds: its file cannot be read or written.
        """
        path = self.file(index)
        return self._open.get(path, lambda: StoredVolume(path).map())

    def file(self, index: int) -> Path:
        """The file of one volume; it is there afterwards."""
        path = self._files.get(index)
        if path is None:
            source = self._sources[index]
            path = find_file(source, self._folder, self._options)
            if not path.exists():
                with explain_errors(self._folder, 0):
                    self._folder.mkdir(parents=True, exist_ok=True)
                write_volume(source, path, self._options)
            self._files[index] = path
        return path

    def check_size(self) -> None:
        """See ``VolumeBank``.

        Raises:
            StoreCorruptError: a file is not as long as its header says.
        """
        for file in self._files.values():
            StoredVolume(file)  # which checks it


def _fits(store: SparseStore, limit_bytes: int) -> bool:
    return len(store) <= PRELOAD_VOLUMES and store.report().sparse_bytes <= limit_bytes


def _may_fit(sources: Sequence[VolumeSource], limit_bytes: int) -> bool:
    """Whether the volumes fit even if every voxel is occupied."""
    if len(sources) > PRELOAD_VOLUMES:
        return False
    size_bytes = 0
    for source in sources:
        with open_volume(source) as volume:
            size_bytes += math.prod(volume.shape) * (4 + volume.dtype.itemsize)
    return size_bytes <= limit_bytes
