"""CT volumes in shards: the occupied voxels of each volume are a shard by themselves."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from typing_extensions import override

from lit_data.errors import DataError
from lit_data.files import write_json
from lit_data.io.images.decoders import ImageSource
from lit_data.io.images.header_scan import OnBad, raise_bad
from lit_data.io.progress import ordered_map, track
from lit_data.io.shards.cache import ShardCache, ShardedBank
from lit_data.io.shards.index import (
    Shard,
    add_shards,
    all_text,
    are_pairs,
    join_key,
    locate_below,
    read_shards,
)
from lit_data.io.shards.publish import SetWriter
from lit_data.io.shards.store import ShardedRoot
from lit_data.io.store.arrays import META_NAME, ArrayFolder, ArrayWriter
from lit_data.io.store.files import corrupt
from lit_data.io.store.sources import list_below
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume, VolumeBank, index_dtype
from lit_data.io.volumes.sparse_file import SUFFIX, StoredVolume, make_key
from lit_data.io.volumes.sparse_store import Write, open_writer
from lit_data.io.volumes.volume import Triple
from lit_data.types import Array

_KIND: Final = "volume shards"
_VERSION: Final = 2
_AXES: Final = ("depth", "height", "width")
_MOST_SIDE: Final = 2**20
_MOST_VOXELS: Final = 2**40
_NUMBERS: Final = ("points", "nbytes", "itemsize", "has_labels")
VOLUME = np.dtype([(name, "<u8") for name in (*_AXES, *_NUMBERS)])
"""Voxels along z, y and x, occupied ones, bytes of the arrays, bytes of a value, and whether there are labels."""


class Described(NamedTuple):
    """Entry of a volume in the index; see `VOLUME`. The path is that of its first file, below the root."""

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
        """Of a volume that was read."""
        arrays, facts = stored.folder.arrays, stored.facts
        return cls(
            name=facts.name,
            path=facts.path,
            shape=facts.shape,
            points=stored.points,
            nbytes=sum(array.nbytes for array in arrays.values()),
            # Bytes of the dense array follow from it and the shape.
            itemsize=arrays["values"].dtype.itemsize,
            has_labels="labels" in arrays,
            shard=shard,
        )

    @classmethod
    def read(cls, note: Path) -> Self:
        """From a note that was left when the shard was sent."""
        fields = json.loads(note.read_bytes())
        return cls(**fields | {"shape": tuple(fields["shape"]), "shard": Shard(*fields["shard"])})


def publish_volumes(
    writer: SetWriter,
    sources: Sequence[VolumeSource],
    names: Mapping[str, str],
    *,
    options: IndexOptions,
    processes: int,
    on_bad: OnBad,
) -> dict[str, int]:
    """Index volumes and write those that are not there, then what makes them a set.

    Args:
        writer: Brings them to their place.
        sources: The volumes, sorted by name.
        names: Path of each of their files below the root, by its local path.
        options: Which voxels are occupied.
        processes: That index at the same time.
        on_bad: `error` raises one error that lists all bad volumes, `skip` leaves them out.

    Returns:
        Numbers for a report.

    Raises:
        DataError: Volumes are bad; or the address cannot be written.
    """
    with open_writer(processes) as write:

        def work(source: VolumeSource) -> Described | DataError:
            return _publish(writer, source, names, options, write)

        results = list(track(ordered_map(work, sources, processes), "writing shards", len(sources)))
    volumes: list[Described] = []
    bad: list[tuple[str, str]] = []
    for source, result in zip(sources, results, strict=True):
        if isinstance(result, DataError):
            bad.append((names[source.files[0]], str(result)))
        else:
            volumes.append(result)
    raise_bad(bad, len(sources), on_bad, what="volumes")
    index = VolumeIndex.of(volumes, {"options": options.fingerprint(), "skipped": bad})
    counts = {
        "volumes": len(volumes),
        "skipped": len(bad),
        "points": sum(entry.points for entry in volumes),
    }
    return counts | writer.finish(index.shards, index.write, {})


def _publish(
    writer: SetWriter,
    source: VolumeSource,
    names: Mapping[str, str],
    options: IndexOptions,
    write: Write,
) -> Described | DataError:
    """Bring a volume to its place; return what is wrong with a bad one."""
    key = make_key(list_below([ImageSource(source.all_files)], names), source.name, options)
    note = writer.scratch / "notes" / f"{key}.json"
    if key in writer.there and note.exists():
        # A shard that is there and noted is not fetched again.
        return Described.read(note)

    def build(temp: Path) -> Path:
        folder = temp / f"{key}{SUFFIX}"
        # Under its name below the root, which is the same on every machine.
        write(replace(source, path=names[source.files[0]]), folder, options)
        return folder

    def describe(shard: Shard, tar: Path) -> Described:
        described = Described.of(StoredVolume(tar), shard)
        note.parent.mkdir(exist_ok=True)
        write_json(note, described._asdict())
        return described

    return writer.bring(key, build, describe)


class VolumeIndex(NamedTuple):
    """Index of a dataset of volumes.

    Attributes:
        facts: `options`, `skipped`, and `names` and `paths` of the volumes.
        volumes: [n] records of `VOLUME`.
        shards: [n] that of each volume.
    """

    facts: dict[str, Any]
    volumes: Array
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, volumes: Sequence[Described], facts: Mapping[str, Any]) -> Self:
        """Of the volumes of a set."""
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
            StoreCorruptError: It is not what was written.
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
        """Write it into an empty folder."""
        writer = ArrayWriter(folder)
        add_shards(writer, self.shards)
        writer.add("volumes", self.volumes)
        writer.finish(_KIND, _VERSION, join_key(self.shards), self.facts)


def _can_be(row: Sequence[int], shard: Shard) -> bool:
    """Return True if a record of `VOLUME` is one that a shard of that size can hold."""
    *shape, points, nbytes, itemsize, has_labels = row
    voxels = math.prod(shape)
    is_shape = max(shape) <= _MOST_SIDE and 0 < voxels <= _MOST_VOXELS
    if not is_shape or itemsize not in (1, 2, 4) or has_labels not in (0, 1):
        return False
    point_bytes = index_dtype((shape[0], shape[1], shape[2])).itemsize + itemsize
    # Where each slice begins, and each occupied voxel.
    least_bytes = 8 * (shape[0] + 1) + points * point_bytes
    return points <= voxels and least_bytes <= nbytes <= shard.nbytes


class ShardedVolumes(ShardedBank[SparseVolume], VolumeBank):
    """Volumes out of shards, of which each is one.

    Args:
        index: Local copy of the index.
        root: Local folder that names of volumes lie in; the volumes themselves are not there.
        cache: Of the shards.

    Attributes:
        shapes: Of each volume, (z, y, x).
        has_labels: Of each volume.
        counts: [n] int64, occupied voxels of each volume.
        nbytes: Of all arrays.
        dense_bytes: Of all volumes as dense arrays.
        skipped: (path, what is wrong) of each volume that was left out.
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
        """One volume, which is fetched if it is not here."""
        volume = self.cache.open(index)
        # A whole shard may still be another volume than the index says.
        if (volume.shape, len(volume)) != (self.shapes[index], self.counts[index]):
            raise corrupt(
                self.cache.fetch(index), "it does not hold what the index of the set says"
            )
        return volume

    def name(self, index: int) -> str:
        """Path of the first file of one volume, below the local folder."""
        return locate_below(self._root, self._paths[index])

    def list_sources(self) -> list[VolumeSource]:
        """The volumes by their names; their files are not here."""
        sources = []
        for number, name in enumerate(self._names):
            locate_below(self._root, name)  # files are written under it
            # The kind is never looked at, as nothing reads these files.
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
    """A set of volumes."""

    def open_volumes(self, options: IndexOptions) -> ShardedVolumes:
        """The volumes.

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
        StoreCorruptError: It holds what no volume can.
    """
    volume = StoredVolume(path).map()
    # Once, as its numbers are places in arrays later on.
    if fault := volume.find_fault():
        raise corrupt(path, fault)
    return volume
