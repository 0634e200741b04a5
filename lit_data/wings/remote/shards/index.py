"""Index of a dataset of shards: the shard of each image, their sizes and checksums.

It is small, and every process reads it at the start.

The address of a dataset, whose name ends with ``.shards``, contains::

    set.json                 names the two files below with their SHA-256 sums; written last, so a set is whole or old
    index-SUM.tar            the arrays of this module
    files-SUM.tar            masks and other files that the kind of data reads beside its images
    shards/KEY-SUM.tar       a store of some images each, as `lit_data.images.store.store.DecodedStore` opens it
    shards/KEY-SUM.packed.tar  or the files of these images, see `lit_data.wings.remote.shards.packed`
    notes/KEY.tar            for writers: what already exists, see `lit_data.wings.remote.shards.groups`

KEY is the name of a store everywhere: sources, options of decoding, layout. So writing a dataset
resumes where it stopped, and after a change of a few images only their shards are written again.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lit_data.core.errors import StoreCorruptError
from lit_data.core.types import Array, Ints
from lit_data.images.header_scan import DTYPES
from lit_data.images.scope import find_fault
from lit_data.images.store.arrays import META_NAME, ArrayFolder, ArrayWriter
from lit_data.images.store.files import corrupt
from lit_data.images.store.sources import SOURCE_RECORD, SourceTable

PACKED_SUFFIX = ".packed.tar"
POINTER = "set.json"
FORMAT = 1
_KIND = "shards"
_VERSION = 2
_SUM_BYTES = 32
SUM = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 sum as text."""
_MOST_CHANNELS = 2**16
PLACE = np.dtype(
    [
        ("shard", "<u4"),
        ("row", "<u4"),
        ("height_px", "<u4"),
        ("width_px", "<u4"),
        ("first_source", "<u8"),
    ]
)
"""Place of an image, its size, and its first row among the source files."""


class Packed(NamedTuple):
    """The file that a shard is decoded from.

    Attributes:
        sha256: Hexadecimal checksum of the file.
        nbytes: Size of the file.
    """

    sha256: str
    nbytes: int


class Shard(NamedTuple):
    """A store of some images in one file, and the file of the dataset that it is made from.

    Attributes:
        key: Key of the store.
        sha256: Hexadecimal checksum of the store.
        nbytes: Size of the store.
        packed: The file of the dataset; None if that is the store itself.
    """

    key: str
    sha256: str
    nbytes: int
    packed: Packed | None = None

    @property
    def name(self) -> str:
        """Path relative to the address of the dataset."""
        if self.packed is None:
            return f"shards/{self.key}-{self.sha256}.tar"
        return f"shards/{self.key}-{self.packed.sha256}{PACKED_SUFFIX}"

    @property
    def file_bytes(self) -> int:
        """Size of the file of the dataset."""
        return self.nbytes if self.packed is None else self.packed.nbytes

    @property
    def stamp(self) -> list[int]:
        """List of one integer that changes with the content."""
        return [int(self.sha256[:15], 16)]


class ShardIndex(NamedTuple):
    """Index of images, see the module.

    Attributes:
        path: Path of the local copy.
        key: SHA-256 of all shards.
        facts: `dtype`, `channels`, `decoder`, `skipped`.
        places: [n] records of `PLACE`.
        shards: Shards in order.
        sources: Source files, by their paths relative to the root that the dataset was made from.
        similar: [n] number of the group of near-duplicates of each image; None if none were
            searched.
    """

    path: Path
    key: str
    facts: dict[str, Any]
    places: Array
    shards: tuple[Shard, ...]
    sources: SourceTable
    similar: Ints | None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an index and check it.

        Raises:
            StoreError: It cannot be read.
            StoreCorruptError: It differs from what was written.
        """
        folder = ArrayFolder(path, _KIND, _VERSION)
        facts = folder.facts
        shards = read_shards(folder)
        places = folder.map("images", PLACE, check=True)
        files = folder.map("files", SOURCE_RECORD, check=True)
        names = folder.map("names", "u1", check=True)
        similar = folder.map("similar", "<i8", check=True) if "similar" in folder.arrays else None
        if any(array.ndim != 1 or not len(array) for array in (places, files, names)):
            raise corrupt(path / META_NAME, "no index of shards")
        firsts, ends = places["first_source"].astype(np.int64), files["name_end"]
        # The index is not trusted, so all numbers must be valid places in the arrays.
        checks = [
            facts.get("dtype") in list(DTYPES) and type(facts.get("channels")) is int,
            isinstance(facts.get("decoder"), str) and are_pairs(facts.get("skipped")),
            int(places["shard"].max()) < len(shards),
            int(ends[-1]) == len(names) and bool(np.all(ends[1:] >= ends[:-1])),
            int(firsts[0]) == 0 and bool(np.all(np.diff(firsts) > 0)),
            int(firsts[-1]) < len(files),
            similar is None or similar.shape == places.shape,
        ]
        if not all(checks) or not 0 < facts["channels"] <= _MOST_CHANNELS:
            raise corrupt(path / META_NAME, "no index of shards")
        table = SourceTable(names, files, firsts)
        return cls(path, folder.key, facts, places, shards, table, similar)

    def write(self, folder: Path) -> None:
        """Write the arrays into an empty folder."""
        writer = ArrayWriter(folder)
        add_shards(writer, self.shards)
        writer.add("images", self.places)
        writer.add("files", self.sources.files)
        writer.add("names", self.sources.names)
        if self.similar is not None:
            writer.add("similar", self.similar)
        writer.finish(_KIND, _VERSION, self.key, self.facts)


def are_pairs(skipped: object) -> bool:
    """Return True if the value lists pairs of a path and its fault."""
    if not isinstance(skipped, list):
        return False
    for pair in skipped:
        if not isinstance(pair, list) or len(pair) != 2 or not all_text(pair):
            return False
    return True


def all_text(values: object) -> bool:
    """Return True for a list of texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def add_shards(writer: ArrayWriter, shards: Sequence[Shard]) -> None:
    """Write the sums and sizes of shards into an index."""
    # Key and SHA-256 sum of each shard, 32 bytes each.
    sums = b"".join(bytes.fromhex(shard.key) + bytes.fromhex(shard.sha256) for shard in shards)
    writer.add("sums", np.frombuffer(sums, np.uint8))
    writer.add("sizes", np.array([shard.nbytes for shard in shards], np.uint64))
    packed = [shard.packed for shard in shards if shard.packed is not None]
    if packed:
        sums = b"".join(bytes.fromhex(file.sha256) for file in packed)
        writer.add("packed_sums", np.frombuffer(sums, np.uint8))
        writer.add("packed_sizes", np.array([file.nbytes for file in packed], np.uint64))


def read_shards(folder: ArrayFolder) -> tuple[Shard, ...]:
    """Return the shards of an index.

    Raises:
        StoreCorruptError: The numbers of checksums and shards differ.
    """
    sums, sizes = folder.map("sums", "u1", check=True), folder.map("sizes", "<u8", check=True)
    is_flat = sums.ndim == sizes.ndim == 1 and len(sums) == 2 * _SUM_BYTES * len(sizes)
    # Sizes are summed as int64.
    if not is_flat or not 0 < sizes.max() < 2**62:
        raise corrupt(folder.path / META_NAME, f"{len(sums)} bytes of sums of {len(sizes)} shards")
    shards = []
    pairs = sums.reshape(-1, 2, _SUM_BYTES)
    for (key, sha256), nbytes in zip(pairs, sizes.tolist(), strict=True):
        shards.append(Shard(key.tobytes().hex(), sha256.tobytes().hex(), nbytes))
    if "packed_sums" not in folder.arrays:
        return tuple(shards)
    packed = _read_packed(folder, len(shards))
    return tuple(shard._replace(packed=file) for shard, file in zip(shards, packed, strict=True))


def _read_packed(folder: ArrayFolder, count: int) -> list[Packed]:
    sums = folder.map("packed_sums", "u1", check=True)
    sizes = folder.map("packed_sizes", "<u8", check=True)
    if len(sums) != _SUM_BYTES * count or len(sizes) != count or sizes.max() >= 2**62:
        raise corrupt(folder.path / META_NAME, f"{len(sizes)} packed files of {count} shards")
    sums_of_files = [sha256.tobytes().hex() for sha256 in sums.reshape(-1, _SUM_BYTES)]
    return list(map(Packed, sums_of_files, sizes.tolist()))


def locate_below(root: Path, name: str) -> str:
    """Return the local path of a file in an index.

    Raises:
        StoreCorruptError: The path would be outside the root.
    """
    # The index comes from a server.
    if fault := find_fault(name):
        raise StoreCorruptError(f"a set of shards names a file that {fault}: {name!a:.80}")
    return f"{root}/{name}"


def join_key(shards: Sequence[Shard]) -> str:
    """Return the SHA-256 sum of all shards, the key of their index."""
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
