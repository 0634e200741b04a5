"""The sparse store: occupied voxels of the volumes of a dataset, indexed once and mapped."""

import hashlib
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal
from typing_extensions import override

from lit_data.child_process import watch_parent
from lit_data.errors import (
    ConfigError,
    DataError,
    StoreError,
    WorkerDiedError,
    list_problems,
    show_path,
)
from lit_data.io.bank import Ints
from lit_data.io.cache import LruCache
from lit_data.io.images.decoders import ImageSource
from lit_data.io.images.header_scan import OnBad, raise_bad
from lit_data.io.progress import ordered_map, track
from lit_data.io.store.files import explain_errors
from lit_data.io.store.sources import list_sources
from lit_data.io.temp import build_lock, remove_folder, sweep
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume, VolumeBank
from lit_data.io.volumes.sparse_file import MAX_OPEN, SUFFIX, StoredVolume, make_key, write_volume

log = logging.getLogger(__name__)


SkippedVolumes = tuple[tuple[str, str], ...]
"""(path, what is wrong) of each volume that was left out."""

Write = Callable[[VolumeSource, Path, IndexOptions], None]
"""Indexes a volume into a new folder, as `write_volume` does."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Arguments of a build; see ``SparseStore.build``.

    Raises:
        ConfigError: an argument is not allowed.
        DataError: no volume.
    """

    sources: tuple[VolumeSource, ...]
    folder: Path
    options: IndexOptions
    processes: int = 1
    on_bad: OnBad = "error"
    wait_s: float = 3600
    progress: bool = True

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"processes={self.processes} is not allowed; give 1 or more")
        if self.on_bad not in ("error", "skip"):
            raise ConfigError(f"on_bad={self.on_bad!r} is not allowed; give 'error' or 'skip'")
        if not self.wait_s >= 0:
            raise ConfigError(f"wait_s={self.wait_s} is not allowed; give 0 or more seconds")
        if not self.sources:
            raise DataError("the list of volumes is empty; check the data folder")


def make_folder(folder: str | os.PathLike[str], options: IndexOptions) -> Path:
    """Return the folder of all volumes that are indexed with these options."""
    digest = hashlib.sha256(options.fingerprint().encode()).hexdigest()
    return Path(folder).absolute() / digest[:16]


def find_target(source: VolumeSource, folder: Path, options: IndexOptions) -> Path:
    """Return the folder that a volume is, or will be, indexed into."""
    files = list_sources([ImageSource(source.all_files)], progress=False)
    return folder / f"{make_key(files, source.name, options)}{SUFFIX}"


def build_missing(plan: BuildPlan) -> tuple[list[Path], SkippedVolumes]:
    """Index the volumes that have no folder yet.

    Returns:
        The folders of the good volumes in their order, and the bad ones.

    Raises:
        DataError: volumes are bad, and are not to be skipped or none is left.
        StoreError: or one of its kinds.
        WorkerDiedError: a process died.
    """
    targets = [find_target(source, plan.folder, plan.options) for source in plan.sources]
    faults: dict[int, str] = {}
    if not _are_there(targets):  # a whole store is opened without its lock: it may be read-only
        with explain_errors(plan.folder, 0):
            plan.folder.mkdir(parents=True, exist_ok=True)
            with build_lock(plan.folder, wait_s=plan.wait_s, is_done=lambda: _are_there(targets)):
                sweep(plan.folder)
                try:
                    faults = _write_missing(plan, targets)
                finally:
                    sweep(plan.folder)  # of processes that died in the middle of their work
                _remove_stale(plan, targets)
    skipped = tuple((plan.sources[number].path, fault) for number, fault in sorted(faults.items()))
    raise_bad(skipped, len(plan.sources), plan.on_bad, what="volumes")
    return [target for number, target in enumerate(targets) if number not in faults], skipped


@contextmanager
def open_writer(processes: int) -> Iterator[Write]:
    """Give a function that indexes a volume, in this process or in one of several others.

    Call it from as many threads as there are processes; these end with the block, and within a
    second of the death of this process.

    Args:
        processes: 1 starts none.
    """
    if processes == 1:
        yield write_volume
        return
    # A child that waits for tasks holds both ends of their pipe, and so never sees its end.
    with ProcessPoolExecutor(processes, initializer=watch_parent) as pool:

        def write(source: VolumeSource, target: Path, options: IndexOptions) -> None:
            try:
                pool.submit(_write_volume, source, target, options).result()
            except BrokenProcessPool as error:
                raise WorkerDiedError(
                    f"{show_path(source.path)}: a process died while it indexed this volume or one "
                    "beside it; if memory ran out, lower processes=, and see the messages above"
                ) from error

        yield write


def _write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume in a process of the pool.

    Raises:
        DataError: it is bad, or one slab of it does not fit into memory.
    """
    try:
        write_volume(source, target, options)
    except MemoryError as error:
        raise DataError(f"{show_path(source.path)}: no memory for a slab of it") from error


def _write_missing(plan: BuildPlan, targets: Sequence[Path]) -> dict[int, str]:
    """Return number and fault of each bad volume."""
    missing = [number for number, target in enumerate(targets) if not target.exists()]
    processes = max(1, min(plan.processes, len(missing)))
    dense_bytes = sum(_measure_files(plan.sources[number]) for number in missing)
    task = f"indexing {decimal(dense_bytes)}"
    if plan.progress and missing:
        log.info(
            "%s: %s in %d volumes, %d processes",
            show_path(plan.folder),
            task,
            len(missing),
            processes,
        )
    faults: dict[int, str] = {}
    with open_writer(processes) as write:

        def find_fault(number: int) -> str | None:
            try:
                write(plan.sources[number], targets[number], plan.options)
            except DataError as error:
                return str(error)
            return None

        results = ordered_map(find_fault, missing, processes)
        with closing(track(results, task, len(missing), enabled=plan.progress)) as tracked:
            for number, fault in zip(missing, tracked, strict=True):
                if fault is not None:
                    faults[number] = fault
    return faults


def _remove_stale(plan: BuildPlan, targets: Sequence[Path]) -> None:
    """Remove the folders of volumes whose files changed since; whoever has one mapped reads on."""
    current_targets = set(targets)
    known_volumes = {(source.name, source.path) for source in plan.sources}
    for path in plan.folder.glob(f"*{SUFFIX}"):
        if path in current_targets:
            continue
        # One that cannot be read, or that another process removes at this moment, is left alone.
        with suppress(StoreError, OSError):
            facts = StoredVolume(path).facts
            if (facts.name, facts.path) in known_volumes:
                remove_folder(path)
                log.info("%s: its volume changed; removed", show_path(path))


def _are_there(targets: Sequence[Path]) -> bool:
    return all(target.exists() for target in targets)


def _measure_files(source: VolumeSource) -> int:
    """Return the bytes of the files of a volume."""
    size_bytes = 0
    for path in source.all_files:
        with suppress(OSError):
            size_bytes += Path(path).stat().st_size
    return size_bytes


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


class SparseStore(VolumeBank):
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
        array_bytes = [volume.array_bytes for volume in self._volumes]
        self._array_bytes: NDArray[np.int64] = np.array(array_bytes, np.int64)
        self.nbytes = sum(array_bytes)
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

    @override
    def count_bytes(self, numbers: Ints) -> Ints:
        return self._array_bytes[numbers]

    def file(self, index: int) -> Path:
        """Return the folder of one volume."""
        return self._paths[index]

    def check_size(self) -> None:
        """Compare the length of every file with what was written, see `ArrayFolder.check_size`."""
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
