"""Groups of images, the unit of work of writing a dataset in shards, with a note at the address for each.

A group is some consecutive images, whose shards are cut without looking at other images. So
independent processes can write different groups, and together they write the shards that a single
process would write. Beside the shards are::

    notes/KEY.tar            index entries of a group whose shards all exist

KEY is a function of the sources of the group and of all options, so a note is never out of date.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lit_data.core.temp import temp_folder
from lit_data.core.types import Array, Ints
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import ImageSource
from lit_data.images.header_scan import DTYPES, Survey
from lit_data.images.store.arrays import META_NAME, ArrayFolder, ArrayWriter, is_count
from lit_data.images.store.build import Recipe
from lit_data.images.store.files import TAR_SUFFIX, corrupt, write_tar
from lit_data.images.store.sources import SOURCE_RECORD, SourceTable, join_tables
from lit_data.images.store.store import DecodedStore
from lit_data.wings.remote.shards.index import SUM, Packed, Shard, are_pairs

_KIND = "note"
_VERSION = 2
_GROUP_SHARDS = 8  # of a group, about: its last one is not full
_MOST_FILE_BYTES = 2**30  # of the files of a group, which are here while it is written


class Reference(NamedTuple):
    """First good image of a dataset, which all others must match.

    Attributes:
        source: Files of the image.
        row: [4] channels, height, width and number of the dtype, as in `scan_headers`.
    """

    source: ImageSource
    row: Ints

    @property
    def channels(self) -> int:
        """Number of channels of all images."""
        return self.row.item(0)

    @property
    def dtype(self) -> str:
        """Name of the dtype of all images."""
        return DTYPES[self.row.item(3)]


class Group(NamedTuple):
    """Images whose shards are written by one process.

    Attributes:
        key: Name of the note.
        sources: The images.
    """

    key: str
    sources: Sequence[ImageSource]

    @property
    def paths(self) -> list[str]:
        """All files of the images."""
        return [path for source in self.sources for path in source.paths]


def count_group_images(rows: Ints, shard_bytes: int) -> int:
    """Return the number of images of a group, a power of two so that it rarely changes.

    Args:
        rows: [n, 4] headers of some good images, as in `scan_headers`.
        shard_bytes: Decoded bytes of a shard.
    """
    channels, heights_px, widths_px, dtypes = rows.T
    item_bytes = np.array([np.dtype(name).itemsize for name in DTYPES])
    image_bytes = float(np.median(channels * heights_px * widths_px * item_bytes[dtypes]))
    return 1 << max(0, round(math.log2(_GROUP_SHARDS * shard_bytes / image_bytes)))


def cut_groups(file_bytes: Ints, group_images: int) -> list[range]:
    """Return the numbers of the images of each group, in order.

    Args:
        file_bytes: [n] bytes of the files of each image.
        group_images: Maximum number of images of a group.
    """
    groups: list[range] = []
    for begin in range(0, len(file_bytes), group_images):
        sizes = np.maximum(file_bytes[begin : begin + group_images], 0)  # -1: not there
        before = np.cumsum(sizes) - sizes
        # Large files split a group: a change of one affects only these images.
        edges = begin + np.flatnonzero(np.diff(before // _MOST_FILE_BYTES, prepend=-1))
        ends = [*edges[1:].tolist(), begin + len(sizes)]
        groups += map(range, edges.tolist(), ends)
    return groups


def cut_shards(survey: Survey, shard_bytes: int) -> Iterator[Ints]:
    """Yield the numbers of the images of each shard, in order."""
    sizes = survey.heights_px * survey.widths_px * survey.channels * np.dtype(survey.dtype).itemsize
    before = np.cumsum(sizes) - sizes
    # A shard begins with each image that starts after another multiple of its size.
    edges = np.flatnonzero(np.diff(before // shard_bytes, prepend=-1))
    return iter(np.split(np.arange(len(sizes)), edges[1:]))


def take_images(survey: Survey, images: Ints) -> Survey:
    """Return the part of a survey for some images."""
    return replace(
        survey,
        images=np.arange(len(images)),
        heights_px=survey.heights_px[images],
        widths_px=survey.widths_px[images],
        skipped=(),
    )


def name_note(recipe: Recipe, *options: object) -> str:
    """Return the key of a group: the SHA-256 of its sources and of everything its note depends on."""
    text = repr((_KIND, _VERSION, recipe.key, *options))
    return hashlib.sha256(text.encode()).hexdigest()


class WrittenShard(NamedTuple):
    """A published shard, with its index entries.

    Attributes:
        shard: The shard.
        sizes_px: [n, 2] height and width of its images.
        sources: Files of the images, by paths relative to the root.
        summary: [values] summary of the images.
        skipped: (path, fault) of each skipped image.
    """

    shard: Shard
    sizes_px: Ints
    sources: SourceTable
    summary: Array
    skipped: Sequence[tuple[str, str]]

    @classmethod
    def of(
        cls, shard: Shard, store: DecodedStore, summarise: Callable[[ImageBank], Array] | None
    ) -> Self:
        """Describe a shard by its store, without keeping it open."""
        table = store.sources
        # Copies, because the arrays of a store are views of its map.
        sources = SourceTable(table.names.copy(), table.files.copy(), table.firsts.copy())
        sizes_px = np.stack((store.heights_px, store.widths_px), axis=1)
        summary = summarise(store) if summarise else np.zeros(0)
        return cls(shard, sizes_px, sources, summary, store.skipped)


class WrittenGroup(NamedTuple):
    """A group whose shards are all published, as in its note.

    Attributes:
        key: Key of the group.
        shards: Shards in order; empty if no image is good.
        counts: Number of images of each shard.
        channels: Number of channels of all images.
        dtype: Dtype of all images.
        skipped: (path, fault) of each skipped image.
        sizes_px: [n, 2] height and width of the good images.
        sources: Files of the images, by paths relative to the root.
        summary: [values] summary of the images.
    """

    key: str
    shards: tuple[Shard, ...]
    counts: tuple[int, ...]
    channels: int
    dtype: str
    skipped: tuple[tuple[str, str], ...]
    sizes_px: Ints
    sources: SourceTable
    summary: Array

    @classmethod
    def join(
        cls,
        key: str,
        reference: Reference,
        written: Sequence[WrittenShard],
        skipped: Sequence[tuple[str, str]],
    ) -> Self:
        """Join the shards of a group and the images that are in none."""
        left_out = list(skipped)
        for entry in written:
            left_out += entry.skipped
        no_sources = SourceTable(
            np.zeros(0, np.uint8), np.zeros(0, SOURCE_RECORD), np.zeros(0, np.int64)
        )
        return cls(
            key=key,
            shards=tuple(entry.shard for entry in written),
            counts=tuple(len(entry.sizes_px) for entry in written),
            channels=reference.channels,
            dtype=reference.dtype,
            skipped=tuple(left_out),
            sizes_px=np.concatenate(
                [np.zeros((0, 2), np.int64), *(entry.sizes_px for entry in written)]
            ),
            sources=join_tables([no_sources, *(entry.sources for entry in written)]),
            summary=np.concatenate([entry.summary for entry in written] or [np.zeros(0)]),
        )

    def pack(self, scratch: Path) -> bytes:
        """Return the content of the note.

        Args:
            scratch: Folder for temporary files.
        """
        with temp_folder(scratch) as temp:
            self._write(temp)
            tar = temp / f"note{TAR_SUFFIX}"
            write_tar({path.name: path for path in temp.iterdir()}, tar)
            return tar.read_bytes()

    @classmethod
    def unpack(cls, content: bytes, scratch: Path) -> Self:
        """Read a note, which is not trusted.

        Raises:
            StoreError: It cannot be read.
            StoreCorruptError: It differs from what was written.
        """
        with temp_folder(scratch) as temp:
            tar = temp / f"note{TAR_SUFFIX}"
            tar.write_bytes(content)
            return cls._read(tar)

    def _write(self, folder: Path) -> None:
        writer = ArrayWriter(folder)
        writer.add("sizes", self.sizes_px.reshape(-1))
        writer.add("files", self.sources.files)
        writer.add("names", self.sources.names)
        writer.add("firsts", self.sources.firsts)
        writer.add("summary", self.summary)
        facts = {
            "shards": [[*shard[:3], *(shard.packed or ())] for shard in self.shards],
            "counts": list(self.counts),
            "channels": self.channels,
            "dtype": self.dtype,
            "skipped": [list(pair) for pair in self.skipped],
        }
        writer.finish(_KIND, _VERSION, self.key, facts)

    @classmethod
    def _read(cls, tar: Path) -> Self:
        folder = ArrayFolder(tar, _KIND, _VERSION)
        facts = folder.facts
        # Copies, because the local file is removed.
        sizes = np.array(folder.map("sizes", "<i8", check=True))
        files = np.array(folder.map("files", SOURCE_RECORD, check=True))
        names = np.array(folder.map("names", "u1", check=True))
        firsts = np.array(folder.map("firsts", "<i8", check=True))
        summary = np.array(folder.map("summary", check=True))
        shards: Any = facts.get("shards")
        counts: Any = facts.get("counts")
        is_right = (
            _are_shards(shards)
            and isinstance(counts, list)
            and all(map(is_count, counts))
            and 2 * sum(counts) == 2 * len(firsts) == len(sizes)
            and is_count(facts.get("channels"))
            and facts.get("dtype") in list(DTYPES)
            and are_pairs(facts.get("skipped"))
        )
        if not is_right or len(counts) != len(shards):
            raise corrupt(tar / META_NAME, "not the note of a group")
        return cls(
            key=folder.key,
            shards=tuple(map(_read_shard, shards)),
            counts=tuple(counts),
            channels=facts["channels"],
            dtype=facts["dtype"],
            skipped=tuple((path, fault) for path, fault in facts["skipped"]),
            sizes_px=sizes.reshape(-1, 2),
            sources=SourceTable(names, files, firsts),
            summary=summary,
        )


def _are_shards(fields: Any) -> bool:  # noqa: ANN401 - of a JSON text
    """Return True if the value lists shards in the form of a note."""
    return isinstance(fields, list) and all(map(_is_shard, fields))


def _is_shard(entry: Any) -> bool:  # noqa: ANN401 - of a JSON text
    """Return True for key, SHA-256 sum and size of a shard, optionally with sum and size of its file."""
    if not isinstance(entry, list) or len(entry) not in (3, 5):
        return False
    sums, sizes = [*entry[:2], *entry[3:4]], [*entry[2:3], *entry[4:]]
    return all(map(_is_sum, sums)) and all(map(is_count, sizes))


def _is_sum(text: object) -> bool:
    return isinstance(text, str) and SUM.fullmatch(text) is not None


def _read_shard(fields: list[Any]) -> Shard:
    key, sha256, nbytes, *packed = fields
    return Shard(key, sha256, nbytes, Packed(*packed) if packed else None)
