"""Source files of the images of a store: their names and states, and a key that identifies them.

They are kept as flat arrays (paths joined into one blob), so that a million files are three objects
and workers that read them make no private copies (pytorch/pytorch#13246).
"""

import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lit_data.core.errors import show_path
from lit_data.core.files import find_crc32, flatten
from lit_data.core.opening import open_source
from lit_data.core.progress import track
from lit_data.core.types import Array, Bytes, Ints
from lit_data.images.decoders import ImageSource

SOURCE_RECORD = np.dtype(
    [("name_end", "<u8"), ("size_bytes", "<i8"), ("mtime_ns", "<i8"), ("crc32", "<u4")]
)
"""Record of a file: end of its path among the joined paths, size and time (-1 if missing), CRC-32."""

KEY_DIGITS = 40
"""Digits of a key that tell paths, sizes, times and options; the others tell when the files changed."""

CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SourceTable:
    """Source files of n images, in order; an image may need several files.

    Args:
        names: uint8, all paths joined, in the encoding of the file system.
        files: [m] records of ``SOURCE_RECORD``.
        firsts: [n] int64, row in ``files`` at which each image begins.
        changed: Digest of the change times of all files (``st_ctime``), which no program can set,
            unlike modification times; "" for a table that is not of files on this machine.
    """

    names: Bytes
    files: Array
    firsts: Ints
    changed: str = ""

    def name(self, row: int) -> str:
        """Return the path of one file."""
        begin = int(self.files["name_end"][row - 1]) if row else 0
        return os.fsdecode(self.names[begin : int(self.files["name_end"][row])].tobytes())

    def rows(self, image: int) -> range:
        """Return the rows of one image's files."""
        is_last = image + 1 == len(self.firsts)
        end = len(self.files) if is_last else self.firsts.item(image + 1)
        return range(self.firsts.item(image), end)

    def paths(self, image: int) -> tuple[str, ...]:
        """Return the paths of one image's files."""
        return tuple(self.name(row) for row in self.rows(image))

    def take(self, images: Ints) -> "SourceTable":
        """Return the table of the chosen images."""
        if len(images) == len(self.firsts):
            return self
        rows: list[int] = []
        paths: list[tuple[str, ...]] = []
        for image in images.tolist():
            rows += self.rows(image)
            paths.append(self.paths(image))
        table = join_paths(paths)
        files = self.files[rows]
        files["name_end"] = table.files["name_end"]  # the names have other offsets now
        return SourceTable(table.names, files, table.firsts)

    def digest(self, *more: str) -> str:
        """Return the SHA-256 over paths, sizes and times, their images, and the texts."""
        sha256 = hashlib.sha256()
        parts = [text.encode() for text in more]
        parts.append(self.firsts.astype("<i8").tobytes())
        parts.append(self.names.tobytes())
        for field in ("name_end", "size_bytes", "mtime_ns"):
            parts.append(self.files[field].tobytes())
        for part in parts:
            sha256.update(len(part).to_bytes(8, "little"))  # no two lists of parts give one text
            sha256.update(part)
        return sha256.hexdigest()

    def make_key(self, *more: str) -> str:
        """Return the digest, whose last digits also tell the change times if these are known."""
        digest = self.digest(*more)
        return digest[:KEY_DIGITS] + self.changed if self.changed else digest

    @property
    def first_states(self) -> Array:
        """[images] CRC-32 and size of the first file of each image."""
        files = self.files[self.firsts]
        return np.stack((files["crc32"].astype(np.int64), files["size_bytes"]), axis=1)

    def states(self) -> dict[bytes, tuple[int, int]]:
        """Return size and modification time of each file, by its path."""
        blob = self.names.tobytes()  # cut all at once, without a call of `name` for each
        edges = [0, *self.files["name_end"].tolist()]
        names = [blob[begin:end] for begin, end in itertools.pairwise(edges)]
        return dict(zip(names, self.files[["size_bytes", "mtime_ns"]].tolist(), strict=True))


def join_paths(paths: Iterable[Sequence[str]]) -> SourceTable:
    """Make a table of images with the paths of their files; all other values are 0."""
    counts: list[int] = []
    names: list[bytes] = []
    for image_paths in paths:
        counts.append(len(image_paths))
        names += map(os.fsencode, image_paths)
    files = np.zeros(len(names), SOURCE_RECORD)
    files["name_end"] = np.cumsum([len(name) for name in names])
    firsts = np.cumsum([0, *counts[:-1]], dtype=np.int64) if counts else np.zeros(0, np.int64)
    return SourceTable(np.frombuffer(b"".join(names), np.uint8), files, firsts)


def join_tables(tables: Sequence[SourceTable]) -> SourceTable:
    """Join tables, and shift the offsets of each."""
    names, files, firsts = [], [], []
    name_bytes = file_count = 0
    for table in tables:
        moved_files = table.files.copy()
        # Ends of names count the bytes of all previous names.
        moved_files["name_end"] += np.uint64(name_bytes)
        names.append(table.names)
        files.append(moved_files)
        firsts.append(table.firsts + file_count)
        name_bytes += len(table.names)
        file_count += len(table.files)
    return SourceTable(np.concatenate(names), np.concatenate(files), np.concatenate(firsts))


def list_sources(sources: Sequence[ImageSource], *, progress: bool) -> SourceTable:
    """Make the table of the current state of the sources; a missing file has size and time -1.

    Args:
        sources: The images.
        progress: Show a progress bar if it takes long.
    """
    table = join_paths(source.paths for source in sources)
    paths = itertools.chain.from_iterable(source.paths for source in sources)
    tracked = track(paths, "looking at files", len(table.files), enabled=progress)
    states = np.array([_stat(path) for path in tracked], np.int64).reshape(-1, 3)
    table.files["size_bytes"] = states[:, 0]
    table.files["mtime_ns"] = states[:, 1]
    changed = hashlib.sha256(states[:, 2].tobytes()).hexdigest()
    return replace(table, changed=changed[KEY_DIGITS:])


def list_below(sources: Sequence[ImageSource], names: Mapping[str, str]) -> SourceTable:
    """Make the table of `list_sources` under names that are the same on every machine.

    Args:
        sources: The images.
        names: Name of each file, by its path.
    """
    listed = list_sources(sources, progress=False)
    table = join_paths([names[path] for path in source.paths] for source in sources)
    for name in ("size_bytes", "mtime_ns"):
        table.files[name] = listed.files[name]
    return table


def describe_change(
    old: SourceTable, new: SourceTable, skipped: Collection[str] = ()
) -> str | None:
    """Describe how one list of sources differs from another.

    Args:
        old: The list of a store.
        new: The current list.
        skipped: Paths that the store skipped, which the old list therefore lacks.

    Returns:
        One phrase; "" if they are equal except for skipped files, None if they have no file in
        common.
    """
    before = old.states()
    after = new.states()
    if before.keys().isdisjoint(after):
        return None
    skipped_names = {os.fsencode(path) for path in skipped}
    changes = {
        "changed": [name for name in after if name in before and before[name] != after[name]],
        "added": [name for name in after if name not in before and name not in skipped_names],
        "removed": [name for name in before if name not in after],
    }
    phrases = []
    for change, names in changes.items():
        if names:
            first = show_path(os.fsdecode(names[0]))
            phrases.append(f"{len(names)} {change} (first: {first})")
    if phrases:
        return "files " + ", ".join(phrases)
    # The old list lacks the skipped files, so digests can be compared only if there are none.
    if skipped_names:
        is_same = list(before) == [name for name in after if name not in skipped_names]
    else:
        is_same = old.digest() == new.digest()
    return "" if is_same else "the order or grouping of the files"


def describe_options(old: str, new: str) -> list[str]:
    """Return the decode options that differ, by name if the fingerprints are JSON."""
    try:
        before = flatten(json.loads(old), "decoder")
        after = flatten(json.loads(new), "decoder")
    except (ValueError, RecursionError):
        before = {"decoder": old}
        after = {"decoder": new}
    changes = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            changes.append(f"{name} {before.get(name)!r} -> {after.get(name)!r}")
    return changes


def find_checksum(path: str) -> int:
    """Return the CRC-32 of a file.

    Raises:
        DataError: The file cannot be read.
    """
    crc32 = 0
    with open_source(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = find_crc32(chunk, crc32)
    return crc32


def _stat(path: str) -> tuple[int, int, int]:
    """Return size, modification time and change time of a file, or -1 for each if it is missing."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat takes three times as long, and there may be a million
    except (OSError, ValueError):
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
