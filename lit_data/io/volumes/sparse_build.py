"""Indexing the volumes of a set into their files, by several processes, going on where a killed build was."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from lit_data.errors import ConfigError, DataError, Problems, StoreError, show_path
from lit_data.io.images.decoders import ImageSource
from lit_data.io.images.header_scan import OnBad
from lit_data.io.progress import ordered_map, track
from lit_data.io.store.sources import list_sources
from lit_data.io.store.writer import explain_errors
from lit_data.io.temp import build_lock, remove_folder, sweep
from lit_data.io.volumes.build_worker import open_pool
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse_file import StoredVolume
from lit_data.io.volumes.sparse_writer import SUFFIX, make_key, write_volume

log = logging.getLogger(__name__)


Bad = tuple[tuple[str, str], ...]
Write = Callable[[VolumeSource, Path, IndexOptions], None]


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is to be built; see ``SparseStore.build``.

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
    """The folder of the files that are made with these options."""
    return Path(folder).absolute() / hashlib.sha256(options.fingerprint().encode()).hexdigest()[:16]


def find_file(source: VolumeSource, folder: Path, options: IndexOptions) -> Path:
    """Where the file of a volume is, or will be."""
    files = list_sources([ImageSource(source.all_files)], progress=False)
    return folder / f"{make_key(files, source.name, options)}{SUFFIX}"


def build_files(plan: BuildPlan) -> tuple[list[Path], Bad]:
    """Make the files that are not there.

    Returns:
        The files of the good volumes in their order, and (path, what is wrong) of the bad ones.

    Raises:
        DataError: volumes are bad, and are not to be skipped or none is left.
        StoreError: or one of its kinds.
        WorkerDiedError: a process died.
    """
    targets = [find_file(source, plan.folder, plan.options) for source in plan.sources]
    bad: dict[int, str] = {}
    if not _are_there(targets):
        with explain_errors(plan.folder, 0):
            plan.folder.mkdir(parents=True, exist_ok=True)
            with build_lock(plan.folder, wait_s=plan.wait_s, is_done=lambda: _are_there(targets)):
                sweep(plan.folder)
                if older := sum(path.is_file() for path in plan.folder.glob(f"*{SUFFIX}")):
                    log.warning("%s: %d volumes of an older layout are indexed anew", show_path(plan.folder), older)
                try:
                    bad = _write_missing(plan, targets)
                finally:
                    sweep(plan.folder)  # of processes that were ended in the middle of their work
                _remove_stale(plan, targets)
    skipped = tuple((plan.sources[number].path, reason) for number, reason in sorted(bad.items()))
    raise_bad_volumes(skipped, len(plan.sources), plan.on_bad)
    return [target for number, target in enumerate(targets) if number not in bad], skipped


def raise_bad_volumes(bad: Sequence[tuple[str, str]], total: int, on_bad: OnBad) -> None:
    """Raise one error for all bad volumes, unless they are to be skipped and some good ones are left.

    Args:
        bad: (path, what is wrong) of each.
        total: Of all volumes.
        on_bad: ``error`` or ``skip``.

    Raises:
        DataError: Lists the bad volumes.
    """
    if on_bad == "skip" and len(bad) < total:
        return
    problems = Problems()
    for path, reason in bad:
        problems.add(path, reason)
    problems.raise_if_any(f"{len(bad)} of {total} volumes are bad")


@contextmanager
def open_writer(processes: int) -> Iterator[Write]:
    """What indexes a volume, by this process or several others, which end with the block."""
    if processes < 2:
        yield write_volume
    else:
        with open_pool(processes) as pool:
            yield pool.write


def _write_missing(plan: BuildPlan, targets: Sequence[Path]) -> dict[int, str]:
    """Number and fault of each bad volume."""
    missing = [number for number, target in enumerate(targets) if not target.exists()]
    processes = min(plan.processes, len(missing))
    what = f"indexing {decimal(sum(map(_measure, (plan.sources[number] for number in missing))))}"
    if plan.progress and missing:
        log.info("%s: %s in %d volumes, %d processes", show_path(plan.folder), what, len(missing), processes)
    bad: dict[int, str] = {}
    with open_writer(processes) as write:

        def work(number: int) -> str | None:
            try:
                write(plan.sources[number], targets[number], plan.options)
            except DataError as error:
                return str(error)
            return None

        faults = ordered_map(work, missing, max(processes, 1))
        with closing(track(faults, what, len(missing), enabled=plan.progress)) as shown:
            bad = {number: fault for number, fault in zip(missing, shown, strict=True) if fault is not None}
    return bad


def _remove_stale(plan: BuildPlan, targets: Sequence[Path]) -> None:
    """Remove what is of sources that changed since, or of an older layout; whoever has it mapped reads on."""
    current, known = set(targets), {(source.name, source.path) for source in plan.sources}
    for path in plan.folder.glob(f"*{SUFFIX}"):
        if path.is_file():  # of an older layout, which had one for each volume
            path.unlink()
        elif path not in current:
            with suppress(StoreError, OSError):
                facts = StoredVolume(path).facts
                if (facts.name, facts.path) in known:
                    remove_folder(path)
                    log.info("%s: its volume changed; removed", show_path(path))


def _are_there(targets: Sequence[Path]) -> bool:
    return all(target.exists() for target in targets)


def _measure(source: VolumeSource) -> int:
    """Bytes of the files of a volume."""
    size_bytes = 0
    for path in source.all_files:
        with suppress(OSError):
            size_bytes += Path(path).stat().st_size
    return size_bytes
