"""Indexing the volumes of a set into their files, by several processes, going on where a killed
build was.

The processes are plain children of this one, told by lines of JSON what to do, and not those of
multiprocessing: a script that builds a store needs no ``if __name__ == "__main__"`` so, threads and
devices of this process are not forked, and a child whose parent dies reads the end of its input and
goes.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.filesize import decimal

from lit_data import errors
from lit_data.child_process import python_command, python_environment
from lit_data.errors import (
    ConfigError,
    DataError,
    LitDataError,
    StoreError,
    WorkerDiedError,
    show_path,
)
from lit_data.io.images.decoders import ImageSource
from lit_data.io.images.header_scan import OnBad, raise_bad
from lit_data.io.progress import ordered_map, track
from lit_data.io.store.files import explain_errors
from lit_data.io.store.sources import list_sources
from lit_data.io.temp import build_lock, remove_folder, sweep
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.resampling import Resolution
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse_file import SUFFIX, StoredVolume, make_key, write_volume


class WorkerPool:
    """As many processes, each of which works on one volume at a time; ask it from as many threads."""

    def __init__(self, processes: int) -> None:
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._all = [start_worker() for _ in range(processes)]
        for process in self._all:
            self._free.put(process)

    def write(self, source: VolumeSource, target: Path, options: IndexOptions) -> None:
        """Let a process do what ``write_volume`` does.

        Raises:
            DataError: the volume is bad.
            StoreError: or one of its kinds: the file cannot be written.
            WorkerDiedError: the process died.
        """
        process = self._free.get()
        task = {"source": asdict(source), "target": os.fspath(target), "options": asdict(options)}
        answer = _ask(process, json.dumps(task))
        self._free.put(
            process
        )  # a dead one too: whoever takes it is told so, instead of waiting for ever
        if answer is None:
            raise WorkerDiedError(
                f"{show_path(source.path)}: the process that indexed it died (exit code {process.wait()}); if memory "
                "ran out, lower processes=, and see the messages above"
            )
        if answer:
            raise getattr(errors, answer["error"])(answer["text"])

    def close(self) -> None:
        """End the processes, also while they work."""
        for process in self._all:
            process.terminate()
        for process in self._all:
            process.communicate()


@contextmanager
def open_pool(processes: int) -> Iterator[WorkerPool]:
    """Start processes, and end them at the end of the block."""
    pool = WorkerPool(processes)
    try:
        yield pool
    finally:
        pool.close()


def main() -> None:
    """Index volumes as told on stdin, and answer each with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_work(json.loads(line))) + "\n")
        answers.flush()


def _work(task: dict[str, Any]) -> dict[str, str]:
    fields, options = task["source"], task["options"]
    source = VolumeSource(**(fields | {"files": tuple(fields["files"])}))
    settings = IndexOptions(**(options | {"resolution": Resolution(**options["resolution"])}))
    try:
        write_volume(source, Path(task["target"]), settings)
    except LitDataError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except MemoryError:
        return {
            "error": DataError.__name__,
            "text": f"{show_path(source.path)}: no memory for a slab of it",
        }
    return {}


def start_worker() -> "subprocess.Popen[str]":
    """Start a process that indexes the volumes whose numbers it is sent."""
    command = python_command("-c", "from lit_data.io.volumes.sparse_build import main; main()")
    environment = python_environment({"OMP_NUM_THREADS": "1"})
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _ask(process: "subprocess.Popen[str]", line: str) -> dict[str, str] | None:
    """Its answer; None if it died."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    text = process.stdout.readline()
    answer: dict[str, str] | None = json.loads(text) if text.endswith("\n") else None
    return answer


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
                    log.warning(
                        "%s: %d volumes of an older layout are indexed anew",
                        show_path(plan.folder),
                        older,
                    )
                try:
                    bad = _write_missing(plan, targets)
                finally:
                    sweep(plan.folder)  # of processes that were ended in the middle of their work
                _remove_stale(plan, targets)
    skipped = tuple((plan.sources[number].path, reason) for number, reason in sorted(bad.items()))
    raise_bad(skipped, len(plan.sources), plan.on_bad, what="volumes")
    return [target for number, target in enumerate(targets) if number not in bad], skipped


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
        log.info(
            "%s: %s in %d volumes, %d processes",
            show_path(plan.folder),
            what,
            len(missing),
            processes,
        )
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
            bad = {
                number: fault
                for number, fault in zip(missing, shown, strict=True)
                if fault is not None
            }
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
