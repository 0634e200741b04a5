"""Record of finished inputs, from which ``predict`` resumes, and with which processes share work."""

import fcntl
import json
import os
import re
import stat
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_data.core.errors import ConfigError, DataError, StoreBusyError, StoreError, show_path
from lit_data.core.files import (
    check_kind,
    flatten,
    open_regular,
    remove_parts,
    write_json,
    write_json_once,
)
from lit_data.images.store.files import write_all
from lit_data.predict.options import Share

FINGERPRINT = "fingerprint.json"
JOURNALS = re.compile(r"images(-\d+-of-\d+)?\.jsonl")
"""Names of the journals of one process and of several."""
_RESULTS = re.compile(
    r"(bad|images|defects|labels|detections|marks|volumes)\.(csv|parquet)"
    r"|detections\.json|predictions\.png"
)
"""Names of the tables and pictures of all images, which a run writes at its end."""
_READ_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One image that is done, or that cannot be read.

    Attributes:
        image: Its name.
        stamp: Numbers that change with its file, such as size and time.
        files: Length of each file that was written for it, by its path below the folder.
        rows: Rows of the table.
        score: Confidence of the model, by which pictures are chosen.
        bad: What is wrong with the image; empty if it is done.
        note: Text of the writer for its tables.
    """

    image: str
    stamp: Sequence[int]
    files: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]
    score: float
    bad: str = ""
    note: str = ""


class Journal:
    """Record of finished images, one line each in ``images.jsonl``.

    A line is written when the files of its image are complete; a truncated line does not count.
    ``fingerprint.json`` holds the weights and the options that decide the predictions.

    Each of several processes adds to its own journal, such as ``images-0-of-2.jsonl``, and reads
    the journals of all others. It locks its own journal; the system frees the lock if the process
    ends.

    Args:
        folder: Folder of the predictions, which is created.
        identity: Everything that decides the predictions, as plain data.
        resume: Keep the images that are done, instead of starting again. Processes that do not lead
            always keep them.
        share: Share of this process.
        remote_sizes: Sizes of files that are at the address of the folder, see `PredictRun`.

    Attributes:
        earlier: Images with files in the folder when it was opened; empty if this process does not lead.

    Raises:
        ConfigError: The folder holds predictions of other weights or options.
        StoreBusyError: Another process predicts into the folder, or the same share.
        StoreError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool,
        share: Share | None = None,
        remote_sizes: Mapping[str, int] | None = None,
    ) -> None:
        share = share or Share()
        self._folder = folder
        self._remote_sizes = remote_sizes or {}
        self._path = folder / f"images{share.suffix}.jsonl"
        self.earlier: set[str] = set()
        self._entries: dict[str, Entry] = {}
        # An image that changed, or whose share changed, may have lines in several journals.
        self._candidates: dict[str, list[Entry]] = {}
        self._bad: dict[str, Entry] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not share.leads:
                self._join_folder(identity)
            self._descriptor = _open_locked(self._path)
            weakref.finalize(self, os.close, self._descriptor)
            if share.leads:
                self._take_folder(identity, resume=resume)
            self.read()
        except OSError as error:
            raise StoreError(
                f"cannot write into {show_path(folder)}: {error.strerror}. Set predict.folder."
            ) from error

    def _take_folder(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Open the folder for this process, or for ranks that wait until this is done."""
        others = [path for path in self._list_journals() if path != self._path]
        for path in others:
            os.close(_open_locked(path))
        with suppress(StoreError):  # a damaged journal, which is read again if the run resumes
            self.read()
        for image, entries in self._candidates.items():
            if any(entry.files for entry in entries):
                self.earlier.add(image)
        fingerprint = self._folder / FINGERPRINT
        if resume and fingerprint.exists():
            _check_identity(fingerprint, identity, "start again with predict.resume=false")
        if fingerprint.is_file():  # in a folder without one no run has left any files
            _remove_unfinished(self._folder)
            if resume:
                return
        # Journals go first: they must never lie beside the fingerprint of another run.
        for path in others:
            path.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        write_json(fingerprint, identity)

    def _join_folder(self, identity: Mapping[str, Any]) -> None:
        """Open the folder beside other processes, which may be at work in it."""
        # Looked for before the fingerprint, which is there before any of them.
        journals = self._list_journals()
        fingerprint = self._folder / FINGERPRINT
        if not fingerprint.exists():
            if any(path.stat().st_size for path in journals):
                raise ConfigError(
                    f"{show_path(self._folder)} holds {journals[0].name} of a run, but not its "
                    f"{FINGERPRINT}: choose another predict.folder, or remove that file"
                )
            write_json_once(fingerprint, identity)
        _check_identity(fingerprint, identity, "remove that one")

    def holds(self, image: str, stamp: Sequence[int]) -> bool:
        """Return True if an image is done, and its source and files have not changed since."""
        for entry in reversed(self._candidates.get(image, ())):
            if list(entry.stamp) != list(stamp):
                continue
            if all(self._has_size(name, size) for name, size in entry.files.items()):
                self._entries[image] = entry
                return True
        return False

    def find_fault(self, image: str, stamp: Sequence[int]) -> str:
        """Return what is wrong with an unreadable image; empty for any other image."""
        entry = self._bad.get(image)
        if entry is None or list(entry.stamp) != list(stamp):
            return ""
        return entry.bad

    def add(self, entry: Entry) -> None:
        """Record an image whose files are complete, or that is bad."""
        line = json.dumps(asdict(entry)).encode() + b"\n"
        try:
            # Unbuffered: a run that is killed leaves the line whole, or cut at the end.
            write_all(self._descriptor, memoryview(line))
        except OSError as error:
            raise StoreError(
                f"cannot write {show_path(self._path)}: {error.strerror}. Free some disk space."
            ) from error
        self._note(entry)
        if not entry.bad:
            self._entries[entry.image] = entry

    def entries(self, images: Sequence[str]) -> list[Entry]:
        """Return the entries of the images that `holds` or `add` knows, in the order of the images."""
        return [self._entries[image] for image in images if image in self._entries]

    def drop(self, image: str) -> None:
        """Remove an image that will be predicted again."""
        self._entries.pop(image, None)

    def measure(self, files: Sequence[Path]) -> dict[str, int]:
        """Return the sizes of written files, bytes, by their names below the folder."""
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def count_shares(self) -> set[int]:
        """Return the numbers of shares into which the journals of the folder divide the images."""
        counts = set()
        for path in self._list_journals():
            _, _, count = path.stem.rpartition("-of-")
            counts.add(int(count) if count.isdigit() else 1)
        return counts

    def read(self) -> None:
        """Read the journals of all processes."""
        self._candidates.clear()
        self._bad.clear()
        for path in self._list_journals():
            if path != self._path:
                with suppress(FileNotFoundError):
                    self._read_lines(path, _read_whole(path))
        # Its own by the descriptor alone: closing another one would free the lock.
        content = _read_from_start(self._descriptor)
        complete_bytes = self._read_lines(self._path, content)
        if complete_bytes < len(content):  # so that the next line does not continue a cut one
            os.ftruncate(self._descriptor, complete_bytes)

    def _list_journals(self) -> list[Path]:
        paths = sorted(self._folder.iterdir())
        return [path for path in paths if JOURNALS.fullmatch(path.name)]

    def _read_lines(self, path: Path, content: bytes) -> int:
        """Note the whole lines of a journal; return their length, bytes."""
        complete_bytes = content.rfind(b"\n") + 1
        for line in content[:complete_bytes].splitlines():
            try:
                entry = _check_entry(Entry(**json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                raise StoreError(
                    f"{show_path(path)} is damaged: remove it, or start again with "
                    "predict.resume=false"
                ) from error
            self._note(entry)
        return complete_bytes

    def _note(self, entry: Entry) -> None:
        if entry.bad:
            self._bad[entry.image] = entry
        else:
            self._candidates.setdefault(entry.image, []).append(entry)

    def _has_size(self, name: str, size: int) -> bool:
        if self._remote_sizes.get(name) == size:
            return True
        with suppress(OSError, ValueError):  # ValueError: a name that no file can have
            return (self._folder / name).stat().st_size == size
        return False


def _open_locked(path: Path) -> int:
    """Open a journal, which is made, and lock it until the descriptor is closed.

    Raises:
        StoreBusyError: Another process holds it.
        StoreError: It is no regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o664)
    try:
        check_kind(os.fstat(descriptor).st_mode)
        # Of the process, so that workers that outlive it do not hold it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(descriptor)
        raise StoreBusyError(
            f"another process is predicting into {show_path(path.parent)} and writing "
            f"{path.name}: wait until it ends, or choose another predict.folder"
        ) from error
    except DataError as error:
        os.close(descriptor)
        raise StoreError(f"{show_path(path)}: {error}; remove it") from error
    except OSError:  # a file system without locks
        pass
    return descriptor


def _read_whole(path: Path) -> bytes:
    """Return the content of a file of the folder, which may be anybody's.

    Raises:
        OSError: It cannot be read.
        StoreError: It is no regular file.
    """
    try:
        with open_regular(path) as file:
            return file.read()
    except DataError as error:
        raise StoreError(f"{show_path(path)}: {error}; remove it") from error


def _read_from_start(descriptor: int) -> bytes:
    """Return all bytes of an open file."""
    content = bytearray()
    while chunk := os.pread(descriptor, _READ_BYTES, len(content)):
        content += chunk
    return bytes(content)


def _check_entry(entry: Entry) -> Entry:
    """Return a line of the journal if its values have the types of ours.

    Raises:
        TypeError: They have others.
    """
    is_good = (
        isinstance(entry.image, str)
        and isinstance(entry.stamp, list)
        and isinstance(entry.files, dict)
        and all(isinstance(size, int) for size in entry.files.values())
        and isinstance(entry.rows, list)
        and all(isinstance(row, dict) for row in entry.rows)
        and isinstance(entry.score, int | float)
        and isinstance(entry.bad, str)
    )
    if not is_good:
        raise TypeError("its parts have other types")
    return entry


def _remove_unfinished(folder: Path) -> None:
    """Remove the partial files of an interrupted run, and the tables of an earlier one.

    Those lack or contradict what is written from now on. No link is followed or removed.
    """
    remove_parts(folder)
    for path in folder.iterdir():
        if _RESULTS.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def _check_identity(path: Path, identity: Mapping[str, Any], cure: str) -> None:
    """Compare the fingerprint of the folder with that of this run.

    Raises:
        ConfigError: They differ; the message names the cure.
        StoreError: The file is damaged.
    """
    try:
        before = flatten(json.loads(_read_whole(path)))
        now = flatten(json.loads(json.dumps(identity)))  # with lists in the place of tuples
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{show_path(path)} is damaged: choose another predict.folder, or {cure}"
        ) from error
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        changes = [f"{key}: {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
        raise ConfigError(
            f"{show_path(path.parent)} holds predictions of another run: choose another "
            f"predict.folder, or {cure}\n  " + "\n  ".join(changes)
        )
