"""The sparse store: occupied voxels of the volumes of a dataset, indexed once and mapped."""

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.filesize import decimal
from typing_extensions import override

from lit_data.core.child_process import watch_parent
from lit_data.core.errors import DataError, StoreError, WorkerDiedError, list_problems, show_path
from lit_data.core.progress import ordered_map, track
from lit_data.core.recent_cache import LruCache
from lit_data.core.temp import build_lock, remove_folder, sweep
from lit_data.core.types import Ints, PathText
from lit_data.images.decoders import ImageSource
from lit_data.images.header_scan import OnBad, raise_bad
from lit_data.images.store.files import explain_errors
from lit_data.images.store.sources import list_sources
from lit_data.wings.volumes.files.indexing import IndexOptions
from lit_data.wings.volumes.files.sources import VolumeSource
from lit_data.wings.volumes.files.sparse import SparseVolume, VolumeBank
from lit_data.wings.volumes.files.sparse_file import (
    MAX_OPEN,
    SUFFIX,
    StoredVolume,
    make_key,
    write_volume,
)
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)

_WAIT_S = 3600.0
"""Time to wait for another process that builds in the same folder."""

SkippedVolumes = tuple[tuple[str, str], ...]
"""(path, fault) of each skipped volume."""

Write = Callable[[VolumeSource, Path, IndexOptions], None]
"""Function that indexes a volume into a new folder, as `write_volume` does."""


class SparseStore(VolumeBank):
    """Numbered sparse volumes as read-only views of memory maps; made by ``build``.

    On disk, it is a folder with a folder of arrays for each volume (see ``sparse_file``), named by
    the volume's key. These are published complete and never changed; a killed build resumes where
    it stopped. A store is pickled as its paths only.

    Args:
        paths: Folder of each volume.
        skipped: (path, fault) of each skipped volume.
    """

    def __init__(self, paths: Sequence[Path], skipped: SkippedVolumes = ()) -> None:
        self.paths = list(paths)
        self.skipped = skipped
        self._volumes = [StoredVolume(path) for path in self.paths]
        self.counts = np.array([volume.points for volume in self._volumes], np.int64)
        self.shapes = [volume.facts.shape for volume in self._volumes]
        self.has_labels = ["labels" in volume.folder.arrays for volume in self._volumes]
        array_bytes = [volume.array_bytes for volume in self._volumes]
        self._array_bytes: Ints = np.array(array_bytes, np.int64)
        self.nbytes = sum(array_bytes)
        self.dense_bytes = sum(volume.dense_bytes for volume in self._volumes)
        # Each mapped volume takes descriptors, of which a process has few.
        self._mapped: LruCache[Path, SparseVolume] = LruCache(max_items=MAX_OPEN)

    @classmethod
    def build(
        cls,
        sources: Sequence[VolumeSource],
        folder: PathText,
        *,
        options: IndexOptions,
        processes: int = 1,
        on_bad: OnBad = "error",
    ) -> Self:
        """Open the store of these volumes, after indexing those that have not been indexed.

        Args:
            sources: The volumes, at least one.
            folder: Folder of the stores of one dataset, each in a subfolder named by its options.
            options: Options that determine which voxels are occupied.
            processes: Processes that index at the same time; 1 works in this process.
            on_bad: ``error`` raises one error that lists all bad volumes, ``skip`` skips and lists
                them.

        Raises:
            DataError: Volumes are bad, and are not to be skipped, or none is left.
            StoreSpaceError: The disk is full.
            StoreBusyError: Another process is still building after an hour.
            StoreCorruptError: A file exists and is damaged.
            StoreError: The folder cannot be read or written.
            WorkerDiedError: A process was killed.
        """
        # Other options make another store beside this one.
        digest = hashlib.sha256(options.fingerprint().encode()).hexdigest()
        build = _Build(
            sources=sources,
            folder=Path(folder).absolute() / digest[:16],
            options=options,
            processes=processes,
        )
        paths, skipped = build.run(on_bad)
        store = cls(paths, skipped)
        list_problems(skipped).warn_if_any(
            log, counted_of(len(skipped), len(sources), "volume", "is", "are") + " bad and skipped"
        )
        log.info("sparse store in %s: %s", show_path(build.folder), store)
        return store

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> SparseVolume:
        """Map one volume; nothing is read before it is used.

        Raises:
            StoreCorruptError: A file of the volume is damaged.
        """
        path = self.paths[operator.index(index)]
        return self._mapped.get_or_load(path, lambda: StoredVolume(path).map())

    def __str__(self) -> str:
        fraction = self.nbytes / max(self.dense_bytes, 1)
        return (
            f"{len(self)} volumes, {self.counts.sum()} foreground voxels: "
            f"{decimal(self.dense_bytes)} dense, {decimal(self.nbytes)} sparse ({fraction:.2%}); "
            f"{len(self.skipped)} skipped"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.paths, self.skipped)

    @override
    def name(self, index: int) -> str:
        return self._volumes[index].facts.path

    @override
    def count_bytes(self, numbers: Ints) -> Ints:
        return self._array_bytes[numbers]

    @override
    def check_size(self) -> None:
        for volume in self._volumes:
            volume.folder.check_size()

    @override
    def find_damages(self) -> list[str]:
        damages: list[str] = []
        for volume in self._volumes:
            damages += filter(None, volume.folder.find_damages())
        return damages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """Indexing of the volumes that have no index yet; see ``SparseStore.build``."""

    sources: Sequence[VolumeSource]
    folder: Path
    options: IndexOptions
    processes: int

    def run(self, on_bad: OnBad) -> tuple[list[Path], SkippedVolumes]:
        """Return the folders of the good volumes in their order, and the bad volumes."""
        targets = [self._find_target(source) for source in self.sources]
        faults: dict[int, str] = {}
        # A complete store is opened without its lock, because it may be read-only.
        if not _are_there(targets):
            with explain_errors(self.folder, 0):
                self.folder.mkdir(parents=True, exist_ok=True)
                with build_lock(self.folder, wait_s=_WAIT_S, is_done=lambda: _are_there(targets)):
                    sweep(self.folder)
                    try:
                        faults = self._write_missing(targets)
                    finally:
                        sweep(self.folder)  # of processes that were killed during their work
                    self._remove_stale(targets)
        skipped = []
        for number, fault in sorted(faults.items()):
            skipped.append((self.sources[number].path, fault))
        raise_bad(skipped, len(self.sources), on_bad, what="volume")
        paths = [target for number, target in enumerate(targets) if number not in faults]
        return paths, tuple(skipped)

    def _find_target(self, source: VolumeSource) -> Path:
        """Return the folder of a volume's index, which may not exist yet."""
        files = list_sources([ImageSource(source.all_files)], progress=False)
        return self.folder / f"{make_key(files, source.name, self.options)}{SUFFIX}"

    def _write_missing(self, targets: Sequence[Path]) -> dict[int, str]:
        """Index missing volumes; return the fault of each bad one by its number."""
        missing = [number for number, target in enumerate(targets) if not target.exists()]
        processes = max(1, min(self.processes, len(missing)))
        file_bytes = 0
        for number in missing:
            for path in self.sources[number].all_files:
                with suppress(OSError):  # it is bad, which is reported when it is read
                    file_bytes += Path(path).stat().st_size
        task = f"indexing {decimal(file_bytes)}"
        if missing:
            shown_folder = show_path(self.folder)
            log.info(
                "%s: %s in %s, %s",
                shown_folder,
                task,
                counted(len(missing), "volume"),
                counted(processes, "process", "processes"),
            )
        faults: dict[int, str] = {}
        with open_writer(processes) as write:

            def find_fault(number: int) -> str | None:
                try:
                    write(self.sources[number], targets[number], self.options)
                except DataError as error:
                    return str(error)
                return None

            results = ordered_map(find_fault, missing, processes)
            with closing(track(results, task, len(missing))) as tracked:
                for number, fault in zip(missing, tracked, strict=True):
                    if fault is not None:
                        faults[number] = fault
        return faults

    def _remove_stale(self, targets: Sequence[Path]) -> None:
        """Remove folders of volumes whose files have changed; processes that map one can still read it."""
        current_targets = set(targets)
        known_volumes = {(source.name, source.path) for source in self.sources}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path in current_targets:
                continue
            # A folder that cannot be read, or that another process is removing, is left alone.
            with suppress(StoreError, OSError):
                facts = StoredVolume(path).facts
                if (facts.name, facts.path) in known_volumes:
                    remove_folder(path)
                    log.info("%s: its volume changed, so it was removed", show_path(path))


@contextmanager
def open_writer(processes: int) -> Iterator[Write]:
    """Yield a function that indexes a volume, in this process or in one of several others.

    Call it from as many threads as there are processes. These end with the block, or within a
    second after this process is killed.

    Args:
        processes: Number of processes; 1 starts none.
    """
    if processes == 1:
        yield write_volume
        return
    # A child that waits for tasks holds both ends of their pipe, so it never sees the end.
    with ProcessPoolExecutor(processes, initializer=watch_parent) as pool:

        def write(source: VolumeSource, target: Path, options: IndexOptions) -> None:
            try:
                pool.submit(_write_volume, source, target, options).result()
            except BrokenProcessPool as error:
                raise WorkerDiedError(
                    f"{show_path(source.path)}: a process was killed while it indexed this "
                    "volume or a neighboring one; see the messages above, and lower processes= "
                    "if memory ran out"
                ) from error

        yield write


def _write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume in a process of the pool.

    Raises:
        DataError: The volume is bad, or a slab of it does not fit into memory.
    """
    try:
        write_volume(source, target, options)
    except MemoryError as error:
        raise DataError(f"{show_path(source.path)}: not enough memory for a slab of it") from error


def _are_there(targets: Sequence[Path]) -> bool:
    return all(target.exists() for target in targets)
