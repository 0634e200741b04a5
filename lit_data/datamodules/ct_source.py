"""Where a CT set comes from: its files, the index of their occupied voxels, and the drawn set."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.ct_volumes import CTVolumes
from lit_data.datamodules.source import Source
from lit_data.datasets.ct_samples import ensure_ct_samples
from lit_data.datasets.splits import SPLITS, Splits, split_images
from lit_data.errors import ConfigError, DataError, Problems, show_path
from lit_data.io.ordered import ordered_map
from lit_data.io.progress import track
from lit_data.io.volumes.banks import Precompute, Preload, VolumeBank, open_bank
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.preload import index_source
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.resampling import Resolution
from lit_data.io.volumes.sources import VolumeSource, find_volumes
from lit_data.io.volumes.sparse_store import SparseStore
from lit_data.io.volumes.volume import Triple
from lit_data.loading.machine import available_memory_bytes, count_cores

log = logging.getLogger(__name__)

TooFew = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class CTSource(Source):
    """The files of a CT set: `.npy`, `.npz`, NIfTI and DICOM volumes in a folder, or one file.

    Args:
        splits: `auto`, `folders`, shares, or lists, see `split_images`.
        split_seed: Chooses the volumes of each share.
        occupied_hu: Voxels above the first and not above the second number are occupied, `None` has no limit; by
            default those above the lower edge of the window.
        resolution: What volumes are brought to before they are indexed.
        min_points: Volumes with fewer occupied voxels are bad.
        too_few: `error` lists them and ends; `skip` leaves them out and counts them.
        precompute: True indexes all volumes before the first epoch; `lazy` each at its first use; False at every use.
        cache_data: Keep what was read in the memory of each process.
        preload: Read the index into memory before the first epoch: True, False, or `auto`: sets of up to 100 volumes
            that fit into `preload_share`.
        preload_share: Share of the available memory.
        processes: Of the indexing; `auto` takes the cores.
        nan_fill: Replaces NaN and infinite voxels, which are bad otherwise.

    Raises:
        ConfigError: An option is out of its range.
    """

    splits: Splits
    split_seed: int
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("too_few", self.too_few, get_args(TooFew))
        check_choice("precompute", self.precompute, get_args(Precompute))
        check_choice("preload", self.preload, get_args(Preload))
        check_choice("cache_data", self.cache_data, (True, False))
        if not 0 < self.preload_share <= 1:
            raise ConfigError(f"preload_share={self.preload_share!r} is not allowed: a share above 0 and up to 1 is")
        for name, least in (("min_points", 0), ("processes", 1)):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
            if wrong and not (name == "processes" and value == "auto"):
                raise ConfigError(f"{name}={value!r} is not allowed: a whole number of at least {least} is")
        if self.too_few == "skip" and self.precompute is not True:
            raise ConfigError("too_few=skip needs precompute=true, which counts points before the first epoch")

    @property
    @override
    def store_folder(self) -> Path:
        return super().store_folder / "ct"

    @cached_property
    def index_options(self) -> IndexOptions:
        """Which voxels are occupied, and how volumes are read."""
        low_hu, high_hu = self.occupied_hu
        return IndexOptions(low_hu=low_hu, high_hu=high_hu, resolution=self.resolution, nan_fill=self.nan_fill)

    @property
    def workers(self) -> int:
        """Processes that index."""
        return count_cores() if self.processes == "auto" else self.processes

    def open(self) -> CTVolumes:
        """The volumes that are good, and their splits; the first call indexes them, unless that is to be done later.

        Raises:
            DataError: Volumes are bad or have too few points; all of them are listed.
        """
        sources = find_volumes(self.folder)
        bank = open_bank(
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
        good = _find_good(sources, bank)
        splits = split_images([source.name for source in sources], self.splits, seed=self.split_seed)
        few = self._find_few(bank)
        places = {number: place for place, number in enumerate(good) if place not in few}
        known = [self._look(bank, place, sources[number]) for place, number in enumerate(good)]
        return CTVolumes(
            bank,
            [sources[number] for number in good],
            [shape for shape, _ in known],
            {split: _number([places[n] for n in splits[split].tolist() if n in places]) for split in SPLITS},
            has_labels=any(has_labels for _, has_labels in known),
            too_few=len(few),
        )

    def check(self) -> dict[str, int]:
        """Read every volume and its labels strictly, and keep nothing.

        Raises:
            DataError: Lists everything that is wrong.
        """
        self.refresh()
        sources = find_volumes(self.folder)
        problems, points = Problems(), 0
        found = ordered_map(self._count, sources, self.workers)
        for source, count in zip(sources, track(found, "checking", len(sources)), strict=True):
            if isinstance(count, str):
                problems.add(source.path, count)
            elif count < self.min_points:
                problems.add(source.path, f"{count} occupied voxels, fewer than min_points={self.min_points}")
            else:
                points += count
        problems.raise_if_any(f"{len(problems)} of {len(sources)} volumes are bad")
        return {"volumes": len(sources), "points": points}

    def verify(self, volumes: CTVolumes) -> list[str]:
        """Volumes whose index differs from what their files give now."""
        if self.precompute is False:
            raise ConfigError("precompute=false keeps no index that could be verified")
        damaged = []
        for number, source in enumerate(track(volumes.sources, "verifying", len(volumes.sources))):
            kept, fresh = volumes.bank[number], index_source(source, self.index_options)
            pairs = ((kept.positions, fresh.positions), (kept.values, fresh.values), (kept.slices, fresh.slices))
            if not all(np.array_equal(one, other) for one, other in pairs):
                damaged.append(f"{show_path(source.path)}: its index is not what the file gives")
        return damaged

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_ct_samples(folder, **self.samples)

    def _count(self, source: VolumeSource) -> int | str:
        """Occupied voxels of a volume, or what is wrong with it."""
        try:
            return len(index_source(source, self.index_options))
        except DataError as error:
            return str(error)

    def _find_few(self, bank: VolumeBank) -> set[int]:
        """Volumes with too few points, where that is known; the others are refused when they are read.

        Raises:
            DataError: There are any, and they are not to be skipped.
        """
        if bank.counts is None:
            return set()
        problems, few = Problems(), np.flatnonzero(bank.counts < self.min_points).tolist()
        for place in few:
            count = bank.counts[place]
            problems.add(bank.name(place), f"{count} occupied voxels, fewer than min_points={self.min_points}")
        what = f"{len(few)} of {len(bank)} volumes have too few points; lower data.min_points or set data.too_few=skip"
        if self.too_few == "error":
            problems.raise_if_any(what)
        elif few:
            log.warning("left out %d volumes with too few points:\n  %s", len(few), problems.report())
        return set(few)

    def _look(self, bank: VolumeBank, place: int, source: VolumeSource) -> tuple[Triple, bool]:
        """Shape of a volume, and whether it has labels."""
        if isinstance(bank, SparseStore):
            header = bank.header(place)
            return header.shape, header.labels_dtype is not None
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
