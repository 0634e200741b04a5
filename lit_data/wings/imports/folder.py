"""`Imported`: the folder into which a dataset of another library is unpacked once."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType

from lit_data.core.errors import DataError, show_path
from lit_data.core.files import short_digest
from lit_data.core.temp import build_lock, sweep, temp_folder
from lit_data.wings.imports import fiftyone, huggingface, litdata, webdataset
from lit_data.wings.imports.records import Record, open_library, write_records

log = logging.getLogger(__name__)

_LIBRARIES = (litdata, huggingface, webdataset)
_WAIT_S = 24 * 3600
_MOST_FILES = 2**17
_SUFFIXES = {
    ".parquet",
    ".arrow",
    ".tar",
    ".bin",
    ".json",
    ".lock",
    ".md",
    ".txt",
    ".yaml",
    ".csv",
    "",
}
"""Suffixes of the files of these datasets."""


class Imported:
    """A dataset of another library, unpacked into the cache at first use; see `lit_data.images.roots.Root`.

    Args:
        root: Folder or file of the dataset.
        files: Files of the dataset.
        library: Module that reads it.
        cache: Folder for unpacked datasets.
    """

    def __init__(self, root: Path, files: Sequence[Path], library: ModuleType, cache: Path) -> None:
        self._root = root
        self._files = files
        self._library = library
        marks = [str(root.resolve())]
        for path in files:
            status = path.stat()
            marks.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        self._folder = cache / short_digest("\n".join(marks)) / (root.stem.strip(".") or "set")

    @property
    def folder(self) -> Path:
        """Folder of the unpacked files, which the first call writes.

        Raises:
            DataError: The dataset cannot be read.
        """
        shelf = self._folder.parent
        note = shelf / "found.txt"
        shelf.mkdir(parents=True, exist_ok=True)
        with build_lock(shelf, wait_s=_WAIT_S, is_done=self._folder.is_dir):
            if not self._folder.is_dir():
                sweep(shelf)
                note.write_text(self._unpack(shelf), encoding="utf-8")
        title = self._library.TITLE
        log.info("%s: %s: %s", show_path(self._root), title, note.read_text(encoding="utf-8"))
        return self._folder

    def refresh(self) -> None:
        """Do nothing, because changed files are another dataset."""

    def _unpack(self, shelf: Path) -> str:
        with temp_folder(shelf) as temp, temp_folder(shelf) as scratch:
            read: Callable[..., Iterator[Record]] = self._library.read
            try:
                summary = write_records(read(self._root, self._files, scratch), temp)
            except DataError as error:
                raise DataError(
                    f"{show_path(self._root)}: {self._library.TITLE}: {error}"
                ) from error
            temp.rename(self._folder)
        return summary


def find_import(root: str, cache: Path) -> Imported | None:
    """Return the dataset of another library at a root; None for folders of plain images.

    Args:
        root: A folder, a file, or tar files as ``shards/{000..003}.tar``.
        cache: Folder for unpacked datasets.
    """
    root_path = Path(root)
    if fiftyone.recognize(root_path):
        return Imported(root_path, sorted(_walk(root_path)), fiftyone, cache)
    files = _expand(root) if "{" in root and not root_path.exists() else _list_set(root_path)
    for library in _LIBRARIES:
        if library.recognize(files):
            return Imported(root_path, files, library, cache)
    return None


def _expand(root: str) -> list[Path]:
    """Return the tar files that match a pattern with braces."""
    if not root.endswith(".tar"):
        return []
    expand = open_library("braceexpand", webdataset.TITLE).braceexpand
    paths = [*map(Path, islice(expand(root), _MOST_FILES))]
    for path in paths:
        if not path.is_file():
            raise DataError(f"data.root={root}: there is no {show_path(path)}")
    return paths


def _list_set(root_path: Path) -> list[Path]:
    """Return the files of a dataset of shards; empty if there is any other file, such as an image."""
    if root_path.is_file():
        return [root_path]
    files = []
    for path in _walk(root_path) if root_path.is_dir() else ():
        if path.suffix.lower() not in _SUFFIXES:
            return []
        files.append(path)
    return sorted(files)


def _walk(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the files of a folder, then those of its subfolders."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(Path(entry.path))
            else:
                yield Path(entry.path)
    for inner in folders if depth > 1 else ():
        yield from _walk(inner, depth - 1)
