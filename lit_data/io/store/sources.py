"""The source files behind the images of a store: who they are, whether they changed, and the key
that sums them up.

Kept as flat arrays (paths joined into one blob), so that a million files are three objects and
workers that read them make no private copies (pytorch/pytorch#13246).
"""

import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import show_path
from lit_data.io.images.decoders import ImageSource
from lit_data.io.progress import track
from lit_data.types import Array

SOURCE_RECORD = np.dtype(
    [("name_end", "<u8"), ("size_bytes", "<i8"), ("mtime_ns", "<i8"), ("crc32", "<u4")]
)
"""Where a path ends among the joined paths, the file's size and modification time (-1: no such file), its CRC-32."""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """Source files of n images, in order; an image may need several files.

    Args:
        names: uint8, all paths joined, as the file system encodes them.
        files: [m] records of ``SOURCE_RECORD``.
        firsts: [n] int64, row in ``files`` at which each image begins.
    """

    names: NDArray[np.uint8]
    files: Array
    firsts: NDArray[np.int64]

    def name(self, row: int) -> str:
        """Path of one file."""
        begin = int(self.files["name_end"][row - 1]) if row else 0
        return os.fsdecode(self.names[begin : int(self.files["name_end"][row])].tobytes())

    def rows(self, image: int) -> range:
        """Rows of one image's files."""
        is_last = image + 1 == len(self.firsts)
        return range(
            int(self.firsts[image]), len(self.files) if is_last else int(self.firsts[image + 1])
        )

    def paths(self, image: int) -> tuple[str, ...]:
        """Paths of one image's files."""
        return tuple(self.name(row) for row in self.rows(image))

    def take(self, images: NDArray[np.int64]) -> "SourceTable":
        """Return the table of some of the images."""
        if len(images) == len(self.firsts):
            return self
        rows = [self.rows(int(image)) for image in images]
        table = join_paths([self.paths(int(image)) for image in images])
        kept = self.files[list(itertools.chain.from_iterable(rows))]
        kept["name_end"] = table.files["name_end"]
        return SourceTable(table.names, kept, table.firsts)

    def digest(self, *more: str) -> str:
        """SHA-256 over paths, sizes, modification times, their share among the images, and some texts."""
        sha256 = hashlib.sha256()
        parts = [text.encode() for text in more]
        parts += [self.firsts.astype("<i8").tobytes(), self.names.tobytes()]
        parts += [self.files[name].tobytes() for name in ("name_end", "size_bytes", "mtime_ns")]
        for part in parts:
            sha256.update(len(part).to_bytes(8, "little"))
            sha256.update(part)
        return sha256.hexdigest()

    @property
    def first_states(self) -> Array:
        """[images] CRC-32 and size of the first file of each image."""
        files = self.files[self.firsts]
        return np.stack((files["crc32"].astype(np.int64), files["size_bytes"]), axis=1)

    def states(self) -> dict[bytes, tuple[int, int]]:
        """Size and modification time of each file by its path."""
        blob = self.names.tobytes()
        names = [
            blob[begin:end]
            for begin, end in itertools.pairwise([0, *self.files["name_end"].tolist()])
        ]
        return dict(zip(names, self.files[["size_bytes", "mtime_ns"]].tolist(), strict=True))


def join_paths(paths: Iterable[Sequence[str]]) -> SourceTable:
    """Make the table of images whose files are given by path, with everything but the paths left at 0."""
    counts: list[int] = []
    names: list[bytes] = []
    for image_paths in paths:
        counts.append(len(image_paths))
        names += map(os.fsencode, image_paths)
    files = np.zeros(len(names), SOURCE_RECORD)
    files["name_end"] = np.cumsum([len(name) for name in names])
    firsts = np.cumsum([0, *counts[:-1]], dtype=np.int64) if counts else np.zeros(0, np.int64)
    return SourceTable(np.frombuffer(b"".join(names), np.uint8), files, firsts)


def list_sources(sources: Sequence[ImageSource], *, progress: bool) -> SourceTable:
    """Make the table of the sources as they are on disk now; a file that is not there has size and
    time -1.

    Args:
        sources: The images.
        progress: Show a bar if it takes long.
    """
    table = join_paths(source.paths for source in sources)
    paths = itertools.chain.from_iterable(source.paths for source in sources)
    states = [
        _stat(path) for path in track(paths, "looking at files", len(table.files), enabled=progress)
    ]
    table.files["size_bytes"], table.files["mtime_ns"] = np.array(states, np.int64).reshape(-1, 2).T
    return table


def list_below(sources: Sequence[ImageSource], names: Mapping[str, str]) -> SourceTable:
    """As `list_sources`, under names that are the same on every machine.

    Args:
        sources: The images.
        names: That of each file, by its path.
    """
    listed = list_sources(sources, progress=False)
    table = join_paths([names[path] for path in source.paths] for source in sources)
    for name in ("size_bytes", "mtime_ns"):
        table.files[name] = listed.files[name]
    return table


def describe_change(
    old: SourceTable, new: SourceTable, skipped: Collection[str] = ()
) -> str | None:
    """Say how one list of sources differs from another.

    Args:
        old: The list of a store.
        new: The list as it is now.
        skipped: Paths that the store left out, so that the old list has them not.

    Returns:
        One phrase, "" if they are equal but for skipped files, None if they have no file in common.
    """
    before, after = old.states(), new.states()
    if before.keys().isdisjoint(after):
        return None
    left_out = {os.fsencode(path) for path in skipped}
    lists = {
        "changed": [name for name in after if name in before and before[name] != after[name]],
        "added": [name for name in after if name not in before and name not in left_out],
        "removed": [name for name in before if name not in after],
    }
    phrases = [
        f"{len(names)} {what} (first: {show_path(os.fsdecode(names[0]))})"
        for what, names in lists.items()
        if names
    ]
    if phrases:
        return "files " + ", ".join(phrases)
    if left_out:
        is_same = list(before) == [name for name in after if name not in left_out]
    else:
        is_same = old.digest() == new.digest()
    return "" if is_same else "the order or grouping of the files"


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat takes three times as long, and there may be a million
    except (OSError, ValueError):
        return -1, -1
    return status.st_size, status.st_mtime_ns
