"""Where a CT set comes from: its files, the index of their occupied voxels, and the drawn set."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.source import Source
from lit_data.datasets.splits import SPLITS, split_images
from lit_data.errors import ConfigError, DataError, Problems, show_path
from lit_data.io.progress import ordered_map, track
from lit_data.io.shards.index import is_sharded
from lit_data.io.shards.publish import SetWriter
from lit_data.io.shards.volumes import ShardedVolumeRoot, ShardedVolumes, publish_volumes
from lit_data.io.volumes.banks import Precompute, Preload, VolumeBank, open_bank
from lit_data.io.volumes.hounsfield import Window
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.preload import index_source
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.resampling import Resolution
from lit_data.io.volumes.sources import VolumeSource, find_volumes
from lit_data.io.volumes.sparse_npz import write_npz
from lit_data.io.volumes.sparse_store import SparseStore
from lit_data.io.volumes.volume import Triple
from lit_data.loading.machine import available_memory_bytes, count_cores
from lit_data.samples.ct import ensure_ct_samples
from lit_data.types import Stage

log = logging.getLogger(__name__)


README: Final = """Occupied voxels of CT volumes, written by lit_data. The arrays of each file in train, val and test:

shape            [3] int64, (z, y, x) voxels of the volume
spacing_mm       [3] float64, (z, y, x)
occupied_hu      [2] float64: voxels above the first and up to the second number are occupied
positions        [N] int32 or int64, where they lie in the flat volume, ascending: z * Y * X + y * X + x
values           [N] their Hounsfield units
slices           [z + 1] int64, where each slice begins in positions
labels           [N] their labels, where there are any; classes, class_starts and class_positions: all labelled voxels
affine           [4, 4] float64, where it is known: from voxels (x, y, z) to mm (right, anterior, superior)
"""


@dataclass(frozen=True, slots=True, eq=False)
class CTVolumes:
    """The volumes that are good, in the order of their names.

    Args:
        bank: Their occupied voxels; it may hold more volumes than there are in the splits.
        sources: Their files.
        shapes: (z, y, x) voxels of each.
        splits: For each of train, val, test the ascending numbers of its volumes.
        has_labels: Whether any volume has labels.
        too_few: Volumes that were left out because too few voxels are occupied.
    """

    bank: VolumeBank
    sources: Sequence[VolumeSource]
    shapes: Sequence[Triple]
    splits: Mapping[str, NDArray[np.int64]]
    has_labels: bool
    too_few: int

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Numbers of the volumes of a stage: to predict, those of all splits."""
        if stage == "predict":
            return np.sort(np.concatenate([self.splits[split] for split in SPLITS]))
        return self.splits[stage]

    def find_room(self, most: int | None) -> int:
        """Most points of a sample.

        Raises:
            ConfigError: They are not limited, and not known.
        """
        counts = self.bank.counts
        if counts is None:
            if most is None:
                raise ConfigError(
                    "max_points=null needs precompute=true, which counts points: set data.max_points"
                )
            return most
        largest = max(1, int(counts[self.of("predict")].max(initial=0)))
        return largest if most is None else min(most, largest)

    def describe(self) -> dict[str, Any]:
        """Numbers for a report; sizes and points where all volumes are indexed."""
        found: dict[str, Any] = {
            "volumes": len(self.of("predict")),
            "refused": len(self.bank.skipped),
            "too_few": self.too_few,
        }
        bank = self.bank
        if bank.counts is not None:
            parts = (
                [bank]
                if isinstance(bank, ShardedVolumes)
                else [bank[number] for number in range(len(bank))]
            )
            dense_bytes, sparse_bytes = (
                sum(part.dense_bytes for part in parts),
                sum(part.nbytes for part in parts),
            )
            found |= {
                "points": int(bank.counts.sum()),
                "dense_bytes": dense_bytes,
                "sparse_bytes": sparse_bytes,
            }
            found["sparse_share"] = sparse_bytes / dense_bytes
        return found | {f"{split}_volumes": len(self.splits[split]) for split in SPLITS}

    def export(self, folder: Path) -> dict[str, int]:
        """Write every volume as ``SPLIT/NAME.npz``; the folder can be read as a set again.

        Raises:
            ConfigError: The folder holds files already.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"prepare.export={folder} is not empty: name a new folder")
        places = [(split, number) for split in SPLITS for number in self.splits[split].tolist()]
        written_bytes = 0
        for split, number in track(places, "exporting", len(places)):
            path = folder / split / f"{self.sources[number].name.removeprefix(f'{split}/')}.npz"
            write_npz(self.bank[number], path)
            written_bytes += path.stat().st_size
        (folder / "README.txt").write_text(README, encoding="utf-8")
        return {"volumes": len(places), "bytes": written_bytes}


SampleKind = Literal["points", "windows"]


def read_range(given: Sequence[float | None] | None, window: Window) -> tuple[float, float | None]:
    """Which Hounsfield units are occupied: above the first number, and not above the second one if
    there is one.

    Raises:
        ConfigError: Not two numbers.
    """
    if given is None:
        return window.low_hu, None
    pair = (given,) if isinstance(given, str | float | int) else tuple(given)
    if len(pair) != 2 or not all(value is None or _is_number(value) for value in pair):
        raise ConfigError(
            f"occupied_hu={given!r} is not allowed: [low, high] in HU or null is; null for no limit"
        )
    low, high = pair
    return (window.low_hu if low is None else low), high


def read_most(most: int | None) -> int | None:
    """Check the largest number of points.

    Raises:
        ConfigError: No number that allows any.
    """
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError(
            f"max_points={most!r} is not allowed: a whole number of at least 1, or null"
        )
    return most


def read_sdf(sdf: float | str | None) -> float | None:
    """The largest signed distance in mm; none where there is no limit, or there are no distances.

    Raises:
        ConfigError: No distance.
    """
    if sdf is None or sdf == "exact":
        return None
    if not _is_number(sdf) or not 0 < float(sdf) < math.inf:
        raise ConfigError(f"sdf={sdf!r} is not allowed: the largest distance in mm, exact, or null")
    return float(sdf)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TooFew = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class CTSource(Source):
    """The files of a CT set: `.npy`, `.npz`, NIfTI and DICOM volumes in a folder, or one file.

    Args:
        occupied_hu: Voxels above the first and not above the second number are occupied, `None` has
            no limit; by default those above the lower edge of the window.
        resolution: What volumes are brought to before they are indexed.
        min_points: Volumes with fewer occupied voxels are bad.
        too_few: `error` lists them and ends; `skip` leaves them out and counts them.
        precompute: True indexes all volumes before the first epoch; `lazy` each at its first use;
            False at every use.
        cache_data: Keep what was read in the memory of each process.
        preload: Read the index into memory before the first epoch: True, False, or `auto`: sets of
            up to 100 volumes that fit into `preload_share`.
        preload_share: Share of the available memory.
        processes: Of the indexing; `auto` takes the cores.
        nan_fill: Replaces NaN and infinite voxels, which are bad otherwise.

    Raises:
        ConfigError: An option is out of its range.
    """

    occupied_hu: tuple[float, float | None]
    resolution: Resolution = field(default_factory=Resolution)
    min_points: int
    too_few: TooFew
    precompute: Precompute
    cache_data: bool
    preload: Preload
    preload_share: float
    processes: int | Literal["auto"]
    nan_fill: float | None

    takes_shards = True
    draw = staticmethod(ensure_ct_samples)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("too_few", self.too_few, get_args(TooFew))
        check_choice("precompute", self.precompute, get_args(Precompute))
        check_choice("preload", self.preload, get_args(Preload))
        check_choice("cache_data", self.cache_data, (True, False))
        if not 0 < self.preload_share <= 1:
            raise ConfigError(
                f"preload_share={self.preload_share!r} is not allowed: a share above 0 and up to 1 is"
            )
        for name, least in (("min_points", 0), ("processes", 1)):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
            if wrong and not (name == "processes" and value == "auto"):
                raise ConfigError(
                    f"{name}={value!r} is not allowed: a whole number of at least {least} is"
                )
        if self.too_few == "skip" and self.precompute is not True:
            raise ConfigError(
                "too_few=skip needs precompute=true, which counts points before the first epoch"
            )
        if is_sharded(self.root) and (
            self.precompute is not True or self.cache_data or self.preload is True
        ):
            raise ConfigError(
                f"root={self.root}: a set of shards is indexed, and its volumes come when they are needed: leave "
                "precompute=true, cache_data=false and preload=auto"
            )

    @cached_property
    @override
    def shards(self) -> ShardedVolumeRoot | None:
        return self._find_shards(ShardedVolumeRoot, self.cache_bytes)

    @override
    def _publish(self, writer: SetWriter, shard_bytes: int) -> dict[str, int]:
        sources, root = (
            find_volumes(self.folder),
            self.folder if self.folder.is_dir() else self.folder.parent,
        )
        names = {
            path: Path(path).relative_to(root).as_posix()
            for source in sources
            for path in source.all_files
        }
        return publish_volumes(
            writer,
            sources,
            names,
            options=self.index_options,
            processes=self.workers,
            on_bad=self.on_bad,
        )

    @property
    @override
    def store_folder(self) -> Path:
        return super().store_folder / "ct"

    @cached_property
    def index_options(self) -> IndexOptions:
        """Which voxels are occupied, and how volumes are read."""
        low_hu, high_hu = self.occupied_hu
        return IndexOptions(
            low_hu=low_hu, high_hu=high_hu, resolution=self.resolution, nan_fill=self.nan_fill
        )

    @property
    def workers(self) -> int:
        """Processes that index."""
        return count_cores() if self.processes == "auto" else self.processes

    def open(self) -> CTVolumes:
        """The volumes that are good, and their splits; the first call indexes them, unless that is
        to be done later.

        Raises:
            DataError: Volumes are bad or have too few points; all of them are listed.
        """
        sources, bank = self._open_bank()
        good = _find_good(sources, bank)
        splits = split_images(
            [source.name for source in sources], self.splits, seed=self.split_seed
        )
        few = self._find_few(bank)
        places = {number: place for place, number in enumerate(good) if place not in few}
        known = [self._look(bank, place, sources[number]) for place, number in enumerate(good)]
        return CTVolumes(
            bank,
            [sources[number] for number in good],
            [shape for shape, _ in known],
            {
                split: _number([places[n] for n in splits[split].tolist() if n in places])
                for split in SPLITS
            },
            has_labels=any(has_labels for _, has_labels in known),
            too_few=len(few),
        )

    def _open_bank(self) -> tuple[Sequence[VolumeSource], VolumeBank]:
        if self.shards is not None:
            there = self.shards.open_volumes(self.index_options)
            return there.list_sources(), there
        sources = find_volumes(self.folder)
        return sources, open_bank(
            sources,
            self.store_folder,
            options=self.index_options,
            precompute=self.precompute,
            cache_data=self.cache_data,
            preload=self.preload,
            preload_bytes=round(self.preload_share * available_memory_bytes()),
            processes=self.workers,
            on_bad=self.on_bad,
        )

    def check(self) -> dict[str, int]:
        """Read every volume and its labels strictly, and keep nothing.

        Raises:
            DataError: Lists everything that is wrong.
        """
        self._refuse_shards()
        self.refresh()
        sources = find_volumes(self.folder)
        problems, points = Problems(), 0
        found = ordered_map(self._count, sources, self.workers)
        for source, count in zip(sources, track(found, "checking", len(sources)), strict=True):
            if isinstance(count, str):
                problems.add(source.path, count)
            elif count < self.min_points:
                problems.add(
                    source.path,
                    f"{count} occupied voxels, fewer than data.min_points={self.min_points}",
                )
            else:
                points += count
        problems.raise_if_any(f"{len(problems)} of {len(sources)} volumes are bad")
        return {"volumes": len(sources), "points": points}

    def verify(self, volumes: CTVolumes) -> list[str]:
        """Volumes whose index differs from what their files give now."""
        if self.precompute is False:
            raise ConfigError("precompute=false keeps no index that could be verified")
        if isinstance(volumes.bank, ShardedVolumes):
            return volumes.bank.find_damages()
        damaged = []
        for number, source in enumerate(track(volumes.sources, "verifying", len(volumes.sources))):
            kept, fresh = volumes.bank[number], index_source(source, self.index_options)
            pairs = (
                (kept.positions, fresh.positions),
                (kept.values, fresh.values),
                (kept.slices, fresh.slices),
            )
            if not all(np.array_equal(one, other) for one, other in pairs):
                damaged.append(f"{show_path(source.path)}: its index is not what the file gives")
        return damaged + (
            volumes.bank.find_damages() if isinstance(volumes.bank, SparseStore) else []
        )

    def _count(self, source: VolumeSource) -> int | str:
        """Occupied voxels of a volume, or what is wrong with it."""
        try:
            return len(index_source(source, self.index_options))
        except DataError as error:
            return str(error)

    def _find_few(self, bank: VolumeBank) -> set[int]:
        """Volumes with too few points, where that is known; the others are refused when they are
        read.

        Raises:
            DataError: There are any, and they are not to be skipped.
        """
        if bank.counts is None:
            return set()
        problems, few = Problems(), np.flatnonzero(bank.counts < self.min_points).tolist()
        for place in few:
            count = bank.counts[place]
            problems.add(
                bank.name(place),
                f"{count} occupied voxels, fewer than data.min_points={self.min_points}",
            )
        what = f"{len(few)} of {len(bank)} volumes have too few points"
        if self.too_few == "error":
            problems.raise_if_any(what, "lower data.min_points, or set data.too_few=skip")
        problems.warn_if_any(
            log, f"{len(few)} of {len(bank)} volumes have too few points; they are left out"
        )
        return set(few)

    def _look(self, bank: VolumeBank, place: int, source: VolumeSource) -> tuple[Triple, bool]:
        """Shape of a volume, and whether it has labels."""
        if isinstance(bank, ShardedVolumes):
            return bank.shapes[place], bank.has_labels[place]
        if isinstance(bank, SparseStore):
            stored = bank.stored(place)
            return stored.facts.shape, "labels" in stored.folder.arrays
        if bank.counts is not None:
            volume = bank[place]
            return volume.shape, volume.labels is not None
        with open_volume(source, nan_fill=self.nan_fill) as opened:
            has_labels = source.labels is not None or opened.labels is not None
            return self.resolution.apply(opened, fill=0).shape, has_labels


def _find_good(sources: Sequence[VolumeSource], bank: VolumeBank) -> list[int]:
    """Number of each volume of a bank among the sources: those that were left out are missing, none is moved."""
    good: list[int] = []
    for number, source in enumerate(sources):
        if len(good) < len(bank) and bank.name(len(good)) == source.path:
            good.append(number)
    return good


def _number(places: Sequence[int]) -> NDArray[np.int64]:
    return np.array(sorted(places), np.int64)
