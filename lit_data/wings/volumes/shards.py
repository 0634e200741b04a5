"""CT volumes in shards: each shard has the occupied voxels of one volume."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from typing_extensions import override

from lit_data.core.errors import DataError, StoreCorruptError, show_path
from lit_data.core.progress import ordered_map, track
from lit_data.core.types import Array, Triple
from lit_data.images.decoders import ImageSource
from lit_data.images.header_scan import OnBad, raise_bad
from lit_data.images.roots import ShardSet
from lit_data.images.store.arrays import META_NAME, ArrayFolder, ArrayWriter, is_count
from lit_data.images.store.files import corrupt
from lit_data.images.store.sources import list_below
from lit_data.wings.remote.shards.cache import ShardCache, ShardedBank
from lit_data.wings.remote.shards.index import (
    Shard,
    add_shards,
    all_text,
    are_pairs,
    join_key,
    locate_below,
    read_shards,
)
from lit_data.wings.remote.shards.publish import WrittenSet
from lit_data.wings.remote.shards.store import ShardedRoot
from lit_data.wings.remote.shards.writer import READERS
from lit_data.wings.volumes.files.indexing import IndexOptions
from lit_data.wings.volumes.files.sources import VolumeSource
from lit_data.wings.volumes.files.sparse import SparseVolume, VolumeBank, index_dtype
from lit_data.wings.volumes.files.sparse_file import SUFFIX, StoredVolume, make_key
from lit_data.wings.volumes.files.sparse_store import Write, open_writer
from lit_inspect.counts import counted_of

_KIND = "volume shards"
_VERSION = 2
_AXES = ("depth", "height", "width")
_MOST_SIDE = 2**20
_MOST_VOXELS = 2**40
_NUMBERS = ("points", "nbytes", "itemsize", "has_labels")
VOLUME = np.dtype([(name, "<u8") for name in (*_AXES, *_NUMBERS)])
"""Voxels along z, y and x, number of occupied voxels, bytes of the arrays and of a value, 1 if there are labels."""


class Described(NamedTuple):
    """Entry of a volume in the index, see `VOLUME`; ``path`` is its first file, relative to the root."""

    name: str
    path: str
    shape: Triple
    points: int
    nbytes: int
    itemsize: int
    has_labels: bool
    shard: Shard

    @classmethod
    def of(cls, stored: StoredVolume, shard: Shard) -> Self:
        """Make the entry of a volume that was read."""
        arrays, facts = stored.folder.arrays, stored.facts
        return cls(
            name=facts.name,
            path=facts.path,
            shape=facts.shape,
            points=stored.points,
            nbytes=stored.array_bytes,
            # The bytes of the dense array follow from this and the shape.
            itemsize=arrays["values"].dtype.itemsize,
            has_labels="labels" in arrays,
            shard=shard,
        )

    @classmethod
    def read(cls, note: bytes) -> "Described | DataError":
        """Read a note, which may also describe the fault of a bad volume.

        Raises:
            StoreCorruptError: It is not a note.
        """
        try:
            fields = json.loads(note)
            if "fault" in fields:
                return DataError(str(fields["fault"]))
            described = cls(
                **fields | {"shape": tuple(fields["shape"]), "shard": Shard(*fields["shard"])}
            )
            numbers = (*described.shape, described.points, described.nbytes, described.itemsize)
            texts = [described.name, described.path, *described.shard[:2]]
            is_right = all_text(texts) and all(map(is_count, (*numbers, described.shard.nbytes)))
            if not is_right or len(described.shape) != len(_AXES):
                raise TypeError("its fields have other types")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreCorruptError(f"not the note of a volume ({error!s:.80})") from error
        return described


def publish_volumes(
    shards: ShardSet,
    sources: Sequence[VolumeSource],
    names: Mapping[str, str],
    *,
    options: IndexOptions,
    processes: int,
    on_bad: OnBad,
) -> dict[str, int]:
    """Index volumes and write those that do not exist, then the files that make them a dataset.

    Args:
        shards: The dataset, and the part of its volumes to write.
        sources: The volumes, sorted by name.
        names: Path of each of their files relative to the root, by its local path.
        options: Options that determine which voxels are occupied.
        processes: Processes that index at the same time.
        on_bad: `error` raises one error that lists all bad volumes, `skip` skips them.

    Returns:
        Numbers for a report.

    Raises:
        DataError: Volumes are bad, the address cannot be written, or parts are missing there.
    """
    assert isinstance(shards, WrittenSet)  # as `write_shards` gives it
    writer, part = shards.writer, shards.options.part
    if part is not None:
        sources = [sources[number] for number in part.take(len(sources))]
    publisher = _VolumePublisher(shards, names, options, notes_bad=on_bad == "skip")
    volumes: list[Described] = []
    bad: list[tuple[str, str]] = []
    missing: list[str] = []
    results = (
        publisher.read_notes(sources)
        if shards.options.finish
        else publisher.write(sources, processes)
    )
    for source, result in zip(sources, results, strict=True):
        name = names[source.files[0]]
        if result is None:
            missing.append(name)
        elif isinstance(result, DataError):
            bad.append((name, str(result)))
        else:
            volumes.append(result)
    if missing:
        raise DataError(
            f"{writer.transport}: "
            f"{counted_of(len(missing), len(sources), 'volume', 'is', 'are')} not written with "
            f"these options, such as {show_path(missing[0])}: run their parts again, or "
            "prepare.shards without a part, which writes what is missing"
        )
    if sources and (part is None or on_bad == "error"):
        raise_bad(bad, len(sources), on_bad, what="volume")
    counts = {
        "volumes": len(volumes),
        "skipped": len(bad),
        "points": sum(entry.points for entry in volumes),
    }
    if part is not None:
        written = [entry.shard for entry in volumes]
        return counts | writer.report(written, f"part {part}: ")
    index = VolumeIndex.of(volumes, {"options": options.fingerprint(), "skipped": bad})
    return counts | writer.finish(index.shards, index.write, {})


@dataclass(frozen=True, slots=True)
class _VolumePublisher:
    """Writes volumes and their notes; see `publish_volumes`.

    Args:
        shards: The dataset.
        names: Path of each file relative to the root, by its local path.
        options: Options that determine which voxels are occupied.
        notes_bad: True to write notes of bad volumes, so that the last part can skip them.
    """

    shards: WrittenSet
    names: Mapping[str, str]
    options: IndexOptions
    notes_bad: bool

    def write(
        self, sources: Sequence[VolumeSource], processes: int
    ) -> Iterator[Described | DataError]:
        """Yield each volume once it is published, or its fault."""
        with open_writer(processes) as write:

            def work(source: VolumeSource) -> Described | DataError:
                return self._bring(source, write)

            results = ordered_map(work, sources, processes)
            yield from track(results, "writing shards", len(sources))

    def read_notes(self, sources: Sequence[VolumeSource]) -> Iterator[Described | DataError | None]:
        """Yield the note of each volume; None without a note."""

        def read(source: VolumeSource) -> Described | DataError | None:
            return self._find_note(self._make_key(source))

        yield from track(ordered_map(read, sources, READERS), "reading notes", len(sources))

    def _make_key(self, source: VolumeSource) -> str:
        table = list_below([ImageSource(source.all_files)], self.names)
        return make_key(table, source.name, self.options)

    def _find_note(self, key: str) -> Described | DataError | None:
        """Return the note of a bad volume, or of a volume whose shard exists."""
        note = self.shards.writer.find_note(f"{key}.json", Described.read)
        if isinstance(note, Described) and not self.shards.writer.has(note.shard):
            return None
        return note

    def _bring(self, source: VolumeSource, write: Write) -> Described | DataError:
        """Publish a volume; return the fault of a bad one."""
        key = self._make_key(source)
        note = self._find_note(key)
        if isinstance(note, Described):  # a bad one is tried again, as memory may have been short
            return note

        def build(temp: Path) -> Path:
            folder = temp / f"{key}{SUFFIX}"
            # Under its name relative to the root, which is the same on every machine.
            write(replace(source, path=self.names[source.files[0]]), folder, self.options)
            return folder

        def describe(shard: Shard, tar: Path) -> Described:
            return Described.of(StoredVolume(tar), shard)

        with self.shards.holding(source.all_files):
            result = self.shards.writer.bring(key, build, describe)
        if isinstance(result, Described):
            self.shards.writer.send_note(f"{key}.json", json.dumps(result._asdict()).encode())
            return result
        fault = str(result)
        for path in source.all_files:
            fault = fault.replace(path, self.names[path])
        if self.notes_bad:
            self.shards.writer.send_note(f"{key}.json", json.dumps({"fault": fault}).encode())
        return DataError(fault)


class VolumeIndex(NamedTuple):
    """Index of a dataset of volumes.

    Attributes:
        facts: `options`, `skipped`, and `names` and `paths` of the volumes.
        volumes: [n] records of `VOLUME`.
        shards: [n] shard of each volume.
    """

    facts: dict[str, Any]
    volumes: Array
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, volumes: Sequence[Described], facts: Mapping[str, Any]) -> Self:
        """Make the index of the volumes of a dataset."""
        rows = [(*v.shape, v.points, v.nbytes, v.itemsize, v.has_labels) for v in volumes]
        names = [volume.name for volume in volumes]
        paths = [volume.path for volume in volumes]
        shards = tuple(volume.shard for volume in volumes)
        return cls({**facts, "names": names, "paths": paths}, np.array(rows, VOLUME), shards)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read an index and check it.

        Raises:
            StoreError: It cannot be read.
            StoreCorruptError: It differs from what was written.
        """
        folder = ArrayFolder(path, _KIND, _VERSION)
        facts = folder.facts
        volumes = folder.map("volumes", VOLUME, check=True)
        shards = read_shards(folder)
        is_right = (
            isinstance(facts.get("options"), str)
            and are_pairs(facts.get("skipped"))
            and volumes.ndim == 1
            and len(volumes) == len(shards) > 0
        )
        for name in ("names", "paths"):
            texts: Any = facts.get(name)
            is_right = is_right and all_text(texts) and len(texts) == len(volumes)
        if not is_right:
            raise corrupt(path / META_NAME, "no index of volumes")
        for number, (row, shard) in enumerate(zip(volumes.tolist(), shards, strict=True)):
            if not _can_be(row, shard):
                raise corrupt(path / META_NAME, f"volume {number} cannot be: {row}")
        return cls(facts, volumes, shards)

    def write(self, folder: Path) -> None:
        """Write the index into an empty folder."""
        writer = ArrayWriter(folder)
        add_shards(writer, self.shards)
        writer.add("volumes", self.volumes)
        writer.finish(_KIND, _VERSION, join_key(self.shards), self.facts)


def _can_be(row: Sequence[int], shard: Shard) -> bool:
    """Return True if a shard of that size can contain the volume of a `VOLUME` record."""
    *shape, points, nbytes, itemsize, has_labels = row
    voxels = math.prod(shape)
    is_shape = max(shape) <= _MOST_SIDE and 0 < voxels <= _MOST_VOXELS
    if not is_shape or itemsize not in (1, 2, 4) or has_labels not in (0, 1):
        return False
    point_bytes = index_dtype((shape[0], shape[1], shape[2])).itemsize + itemsize
    # The start of each slice, and each occupied voxel.
    least_bytes = 8 * (shape[0] + 1) + points * point_bytes
    return points <= voxels and least_bytes <= nbytes <= shard.nbytes


class ShardedVolumes(ShardedBank[SparseVolume], VolumeBank):
    """Volumes from shards, one volume each.

    Args:
        index: Local copy of the index.
        root: Local folder that paths of volumes are relative to; the volumes themselves are not
            there.
        cache: Cache of the shards.

    Attributes:
        shapes: (z, y, x) of each volume.
        has_labels: True for each volume with labels.
        counts: [n] int64, number of occupied voxels of each volume.
        nbytes: Bytes of all arrays.
        dense_bytes: Bytes of all volumes as dense arrays.
        skipped: (path, fault) of each skipped volume.
    """

    def __init__(self, index: Path, root: Path, cache: ShardCache[SparseVolume]) -> None:
        self.index = index
        self.cache = cache
        self._root = root
        facts, volumes, _ = VolumeIndex.open(index)
        self._names: list[str] = facts["names"]
        self._paths: list[str] = facts["paths"]
        self.skipped = tuple(
            (locate_below(root, name), str(fault)) for name, fault in facts["skipped"]
        )
        self.shapes = volumes[[*_AXES]].tolist()
        self.has_labels = (volumes["has_labels"] > 0).tolist()
        self.counts = volumes["points"].astype(np.int64)
        self.shard_of = np.arange(len(volumes))
        self.nbytes = int(volumes["nbytes"].sum())
        self.dense_bytes = sum(map(math.prod, volumes[[*_AXES, "itemsize"]].tolist()))

    def __reduce__(self) -> tuple[type[Self], tuple[Path, Path, ShardCache[SparseVolume]]]:
        return type(self), (self.index, self._root, self.cache)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> SparseVolume:
        """Return one volume, fetching it if it is not local."""
        volume = self.cache.open(index)
        # An intact shard may still have another volume than the index states.
        if (volume.shape, len(volume)) != (self.shapes[index], self.counts[index]):
            raise corrupt(self.cache.fetch(index), "its content differs from the index of the set")
        return volume

    def name(self, index: int) -> str:
        """Return the path of the first file of one volume, in the local folder."""
        return locate_below(self._root, self._paths[index])

    def list_sources(self) -> list[VolumeSource]:
        """Return the volumes by name; their files are not local."""
        sources = []
        for number, name in enumerate(self._names):
            locate_below(self._root, name)  # files are written under it
            # The kind is irrelevant, because nothing reads these files.
            path = self.name(number)
            sources.append(VolumeSource(name, path, "npz", (path,)))
        return sources

    @override
    def find_damages(self) -> list[str]:
        """Fetch every shard and compare its arrays with their checksums."""
        damages: list[str] = []
        for number in track(range(len(self)), "checking shards", len(self)):
            folder = StoredVolume(self.cache.fetch(number)).folder
            damages += filter(None, folder.find_damages())
        return damages


class ShardedVolumeRoot(ShardedRoot):
    """A sharded dataset of volumes."""

    def open_volumes(self, options: IndexOptions) -> ShardedVolumes:
        """Return the volumes.

        Raises:
            ConfigError: They were indexed with other options.
        """
        index = VolumeIndex.open(self.index_path)
        self.check_options(index.facts["options"], options.fingerprint(), "volumes were indexed")
        return ShardedVolumes(
            self.index_path, self.folder, self.cache_shards(index.shards, open_shard)
        )


def open_shard(path: Path) -> SparseVolume:
    """Map the volume of a shard.

    Raises:
        StoreCorruptError: Its content is not a valid volume.
    """
    volume = StoredVolume(path).map()
    # Checked once, because its numbers are used as places in arrays later.
    if fault := volume.find_fault():
        raise corrupt(path, fault)
    return volume
