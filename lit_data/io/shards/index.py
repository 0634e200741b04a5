"""What a set of shards holds: which shard has which image, their sizes and sums; small, and read by all at the start.

Below the address of a set, whose name ends with ``.shards``, lie::

    set.json                 names the two files below with their SHA-256 sums; written last, so a set is whole or old
    index-SUM.tar            the arrays of this module
    files-SUM.tar            masks and whatever else the kind of data reads beside its images
    shards/KEY-SUM.tar       a store of some images each, as `lit_data.io.store.store.DecodedStore` opens it

KEY is what a store is named by everywhere: sources, options of decoding, layout. So a set is built on from where it
stopped, and after a change of a few images only their shards are written anew.
"""

import os
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from lit_data.grid import Ints
from lit_data.io.images.header_scan import DTYPES
from lit_data.io.store.arrays import META_NAME, ArrayFolder, ArrayWriter
from lit_data.io.store.mapping import corrupt
from lit_data.io.store.sources import SOURCE_RECORD, SourceTable
from lit_data.types import Array

SUFFIX: Final = ".shards"
POINTER: Final = "set.json"
FORMAT: Final = 1
_KIND: Final = "shards"
_VERSION: Final = 1
_SUM_BYTES: Final = 32
PLACE = np.dtype([("shard", "<u4"), ("row", "<u4"), ("height_px", "<u4"), ("width_px", "<u4"), ("first_source", "<u8")])
"""Where an image is, its size, and its first row among the source files."""


def is_sharded(root: str | os.PathLike[str] | None) -> bool:
    """Whether a root is a set of shards, as its name says."""
    return root is not None and str(root).rstrip("/").endswith(SUFFIX)


class Shard(NamedTuple):
    """One file of a set.

    Attributes:
        key: Of its store.
        sha256: Of the file, hexadecimal.
        nbytes: Of the file.
    """

    key: str
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        """Below the address of the set."""
        return f"shards/{self.key}-{self.sha256}.tar"


class ShardIndex(NamedTuple):
    """See the module.

    Attributes:
        path: Of the local copy.
        key: SHA-256 of all shards.
        facts: `dtype`, `channels`, `decoder`, `skipped`.
        places: [n] records of `PLACE`.
        shards: In order.
        sources: Source files, by their paths below the root that the set was made from.
        similar: [n] number of the group of images that show the same, where that was looked for.
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
            StoreCorruptError: It is not what was written.
        """
        folder = ArrayFolder(path, _KIND, _VERSION)
        places, files = folder.map("images", PLACE, check=True), folder.map("files", SOURCE_RECORD, check=True)
        names, sums = folder.map("names", "u1", check=True), folder.map("sums", "u1", check=True)
        sizes, facts = folder.map("sizes", "<u8", check=True), folder.facts
        shards = tuple(_read_shards(sums, sizes))
        table = SourceTable(names, files, places["first_source"].astype(np.int64))
        similar = folder.map("similar", "<i8", check=True) if "similar" in folder.arrays else None
        checks = [
            facts.get("dtype") in DTYPES and isinstance(facts.get("channels"), int) and facts["channels"] > 0,
            isinstance(facts.get("decoder"), str) and isinstance(facts.get("skipped"), list),
            len(places) > 0 and len(sums) == 2 * _SUM_BYTES * len(sizes) and int(places["shard"].max()) < len(shards),
            len(files) > 0 and int(files["name_end"][-1]) == len(names) and bool(np.all(np.diff(table.firsts) > 0)),
            similar is None or similar.shape == places.shape,
        ]
        if not all(checks):
            raise corrupt(path / META_NAME, "no index of shards")
        return cls(path, folder.key, facts, places, shards, table, similar)

    def write(self, folder: Path) -> None:
        """Write the arrays into an empty folder."""
        writer = ArrayWriter(folder)
        sums = b"".join(bytes.fromhex(shard.key) + bytes.fromhex(shard.sha256) for shard in self.shards)
        arrays = {
            "images": self.places,
            "files": self.sources.files,
            "names": self.sources.names,
            "sums": np.frombuffer(sums, np.uint8),
            "sizes": np.array([shard.nbytes for shard in self.shards], np.uint64),
        }
        for name, array in arrays.items():
            writer.add(name, array)
        if self.similar is not None:
            writer.add("similar", self.similar)
        writer.finish(_KIND, _VERSION, self.key, self.facts)

    @property
    def nbytes(self) -> int:
        """Of all shards."""
        return sum(shard.nbytes for shard in self.shards)


def _read_shards(sums: Array, sizes: Array) -> "list[Shard]":
    rows = sums.reshape(-1, 2, _SUM_BYTES) if len(sums) == 2 * _SUM_BYTES * len(sizes) else np.zeros((0, 2, 1), "u1")
    return [
        Shard(key.tobytes().hex(), sum_.tobytes().hex(), int(n)) for (key, sum_), n in zip(rows, sizes, strict=False)
    ]
