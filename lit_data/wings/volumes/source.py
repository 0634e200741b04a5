"""Source of a CT dataset: its files, the index of their occupied voxels, and synthetic volumes."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from typing_extensions import override

from lit_data.core.addresses import is_sharded
from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError, DataError, Problems, show_path
from lit_data.core.machine import count_cores
from lit_data.core.progress import ordered_map, track
from lit_data.core.types import IGNORED, Ints, Stage
from lit_data.datamodules.source import Source
from lit_data.datasets.split_names import SPLITS
from lit_data.images.roots import ShardSet
from lit_data.wings.volumes.files.dicom import EXTENSIONS
from lit_data.wings.volumes.files.hounsfield import Window
from lit_data.wings.volumes.files.indexing import IndexOptions, index_source
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.files.sources import SUFFIXES, VolumeSource, find_volumes
from lit_data.wings.volumes.files.sparse import VolumeBank
from lit_data.wings.volumes.files.sparse_store import SparseStore
from lit_data.wings.volumes.sample_set import CTSampleSpec
from lit_data.wings.volumes.shards import ShardedVolumeRoot, publish_volumes
from lit_inspect.counts import counted, counted_of, inflect

log = logging.getLogger(__name__)
SampleKind = Literal["points", "windows"]
TooFew = Literal["error", "skip"]


@dataclass(frozen=True, slots=True, eq=False)
class CTVolumes:
    """The good volumes, sorted by name.

    Args:
        bank: Occupied voxels of the volumes; it may have more volumes than the splits.
        sources: Files of the volumes.
        splits: Ascending volume numbers for each of train, val, test.
        too_few: Number of volumes skipped because they have too few occupied voxels.
    """

    bank: VolumeBank
    sources: Sequence[VolumeSource]
    splits: Mapping[str, Ints]
    too_few: int

    @property
    def has_labels(self) -> bool:
        """True if any volume has labels."""
        return any(self.bank.has_labels)

    def of(self, stage: Stage) -> Ints:
        """Return the numbers of the volumes of a stage; for ``predict``, those of all splits."""
        if stage == "predict":
            return np.sort(np.concatenate([self.splits[split] for split in SPLITS]))
        return self.splits[stage]

    def labelled(self, numbers: Ints) -> Ints:
        """Return the volumes that have labels, in their order.

        Raises:
            ConfigError: No volume of the dataset has labels.
        """
        has_labels = np.array(self.bank.has_labels, np.bool_)
        if not has_labels.any():
            raise ConfigError(
                f"none of {counted(len(has_labels), 'volume')} has labels: put them next to NAME as "
                "NAME_labels, NAME_seg or NAME_mask, or in a folder labelsTr next to imagesTr"
            )
        labelled_numbers = numbers[has_labels[numbers]]
        unlabelled = Problems()
        for number in numbers[~has_labels[numbers]].tolist():
            unlabelled.add(self.bank.name(number), "no labels next to it")
        skipped = counted_of(
            len(unlabelled),
            len(numbers),
            "volume",
            "has no labels and is skipped",
            "have no labels and are skipped",
        )
        unlabelled.warn_if_any(log, skipped)
        return labelled_numbers

    def find_room(self, max_points: int | None) -> int:
        """Return the maximum number of points of a sample."""
        # Rows of a batch have room for at least one point.
        largest_count = max(1, int(self.bank.counts[self.of("predict")].max(initial=0)))
        return largest_count if max_points is None else min(max_points, largest_count)

    def describe(self) -> dict[str, Any]:
        """Return numbers for a report."""
        bank = self.bank
        numbers: dict[str, Any] = {
            "volumes": len(self.of("predict")),
            "refused": len(bank.skipped),
            "too_few": self.too_few,
            "labelled": sum(bank.has_labels),
            "points": int(bank.counts.sum()),
            "dense_bytes": bank.dense_bytes,
            "sparse_bytes": bank.nbytes,
            "sparse_share": bank.nbytes / bank.dense_bytes,
        }
        for split in SPLITS:
            numbers[f"{split}_volumes"] = len(self.splits[split])
        return numbers


def read_range(
    occupied_hu: Sequence[float | None] | None, window: Window
) -> tuple[float, float | None]:
    """Return the range of Hounsfield units of occupied voxels.

    Args:
        occupied_hu: (low, high), each None for no limit; None for everything above the window's low
            edge.
        window: Window whose lower edge replaces a missing first number.

    Returns:
        Low and high: occupied voxels are above the first number, and not above the second one if
        there is one.

    Raises:
        ConfigError: The range is not two numbers.
    """
    if occupied_hu is None:
        return window.low_hu, None
    # A single number or text is not a pair.
    is_single = isinstance(occupied_hu, str | float | int)
    pair = (occupied_hu,) if is_single else tuple(occupied_hu)
    if len(pair) != 2 or not all(value is None or _is_number(value) for value in pair):
        raise ConfigError(
            f"occupied_hu={occupied_hu!r} is not allowed: give [low, high] in HU, each a number "
            "or null for no limit"
        )
    low, high = pair
    return (window.low_hu if low is None else low), high


def read_classes(classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the labels 1, 2, ...; empty for null.

    Raises:
        ConfigError: Two names are equal, or there are more than masks can number.
    """
    if isinstance(classes, str):
        raise ConfigError(f"classes={classes!r} is not allowed: give a list of names or null")
    names = tuple(map(str, classes or ()))
    if len(set(names)) < len(names) or len(names) >= IGNORED:
        raise ConfigError(f"classes={list(names)}: give up to {IGNORED - 1} names, each once")
    return names


def read_sdf(sdf: float | str | None) -> float | None:
    """Return the largest signed distance in mm; None without a limit, or without distances.

    Raises:
        ConfigError: The value is not a distance.
    """
    if sdf is None or sdf == "exact":
        return None
    if not _is_number(sdf) or not 0 < float(sdf) < math.inf:
        raise ConfigError(
            f"sdf={sdf!r} is not allowed: give the largest distance in mm, exact, or null"
        )
    return float(sdf)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_AIR_HU = -1000


@dataclass(frozen=True, kw_only=True)
class CTSource(Source):
    """Files of a CT dataset: `.npy`, `.npz`, NIfTI and DICOM volumes in a folder, or one file.

    Args:
        occupied_hu: Voxels above the first and not above the second number are occupied, with
            `None` for no limit. By default, voxels above the lower edge of the window are occupied.
        resolution: Size or spacing that volumes are resampled to before they are indexed.
        min_points: Volumes with fewer occupied voxels are bad.
        too_few: `error` lists them and raises an error; `skip` skips and counts them.
        processes: Number of processes that index; `auto` takes the number of cores.
        nan_fill: Replaces NaN and infinite voxels, which otherwise make a volume bad.
        class_count: Highest label; volumes with a higher one are bad. None allows any.

    Raises:
        ConfigError: An option is out of its range.
    """

    occupied_hu: tuple[float, float | None]
    resolution: Resolution = field(default_factory=Resolution)
    min_points: int
    too_few: TooFew
    processes: int | Literal["auto"]
    nan_fill: float | None
    class_count: int | None = None

    takes_shards = True
    late_suffixes = (*SUFFIXES, *EXTENSIONS)
    sample_spec = CTSampleSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("too_few", self.too_few, get_args(TooFew))
        check_count("min_points", self.min_points, 0)
        if self.processes != "auto":
            check_count("processes", self.processes, 1)

    @cached_property
    @override
    def shards(self) -> ShardedVolumeRoot | None:
        return self.open_shards(ShardedVolumeRoot) if is_sharded(self.root) else None

    @override
    def write_into(self, shards: ShardSet) -> dict[str, int]:
        if shards.options.encoding != "decoded":
            raise ConfigError(
                f"prepare.encoding={shards.options.encoding} is for images: of volumes only the "
                "foreground voxels are stored, so the files cannot be kept; remove it"
            )
        sources = find_volumes(self.folder)
        # The root may be one file.
        root = self.folder if self.folder.is_dir() else self.folder.parent
        names: dict[str, str] = {}
        for source in sources:
            for path in source.all_files:
                names[path] = Path(path).relative_to(root).as_posix()
        return publish_volumes(
            shards,
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
        """Options of the index: which voxels are occupied, and how volumes are read."""
        low_hu, high_hu = self.occupied_hu
        return IndexOptions(
            low_hu=low_hu,
            high_hu=high_hu,
            resolution=self.resolution,
            nan_fill=self.nan_fill,
            classes=self.class_count,
        )

    @property
    def workers(self) -> int:
        """Number of processes that index."""
        return count_cores() if self.processes == "auto" else self.processes

    def open(self) -> CTVolumes:
        """Return the good volumes and their splits; volumes without an index are indexed first.

        Raises:
            DataError: Volumes are bad or have too few points; all of them are listed.
        """
        sources, bank = self._open_bank()
        # A bank skips bad volumes, which changes no split, because splits are made of all sources.
        names = [source.name for source in sources]
        splits = self.split(names)
        self._add_lacks(sources)
        numbers = _find_good(sources, bank)
        self._add_full([sources[number].name for number in numbers], bank)
        # Numbers in the bank.
        too_few = self._find_too_few(bank)
        bank_numbers = {number: row for row, number in enumerate(numbers) if row not in too_few}
        split_rows: dict[str, Ints] = {}
        for split in SPLITS:
            rows = [bank_numbers[n] for n in splits[split].tolist() if n in bank_numbers]
            split_rows[split] = np.array(sorted(rows), np.int64)
        good_sources = [sources[number] for number in numbers]
        return CTVolumes(bank, good_sources, split_rows, too_few=len(too_few))

    def _add_lacks(self, sources: Sequence[VolumeSource]) -> None:
        """Report volumes without labels or without a spacing, if classes or a spacing are given."""
        if self.shards is not None:
            return
        if (self.class_count or self.resolution.spacing_mm) and self.root is not None:
            spaceless = [source.name for source in sources if not source.has_spacing]
            cure = "they count as 1 mm; NIfTI, DICOM and .npz with spacing_mm=[z, y, x] state it"
            self.leftovers.add(
                "[volume does|volumes do] not state the spacing of [its|their] voxels",
                spaceless,
                cure,
            )
        unlabelled = [source.name for source in sources if source.labels is None]
        if self.class_count:
            cure = (
                "put them next to NAME as NAME_labels, NAME_seg or NAME_mask, or in a folder "
                "labelsTr next to imagesTr"
            )
            self.leftovers.add("[volume has|volumes have] no labels", unlabelled, cure)

    def _add_full(self, names: Sequence[str], bank: VolumeBank) -> None:
        """Report volumes that are foreground everywhere, although air would be below it."""
        if self.index_options.low_hu < _AIR_HU:
            return
        full = [
            name
            for name, count, shape in zip(names, bank.counts.tolist(), bank.shapes, strict=True)
            if count == math.prod(shape)
        ]
        cure = f"air has {_AIR_HU} HU: are [its|their] values Hounsfield units?"
        self.leftovers.add("[volume is|volumes are] foreground everywhere", full, cure)

    def _open_bank(self) -> tuple[Sequence[VolumeSource], VolumeBank]:
        if self.shards is not None:
            sharded_volumes = self.shards.open_volumes(self.index_options)
            return sharded_volumes.list_sources(), sharded_volumes
        bad_names = Problems()
        # Bad names are refused even if bad volumes are skipped.
        sources = find_volumes(
            self.folder, None if self.on_bad == "skip" else bad_names, self.leftovers
        )
        try:
            store = SparseStore.build(
                sources,
                self.store_folder,
                options=self.index_options,
                processes=self.workers,
                on_bad=self.on_bad,
            )
        except DataError as error:
            if not bad_names or not error.problems:
                raise
            for path, fault in error.problems:
                bad_names.add(path, fault)
            raise bad_names.make_error(
                counted(len(bad_names), "bad name or volume", "bad names and volumes")
                + f" under {self.shown_root}"
            ) from error
        names = counted(len(bad_names), "bad name")
        bad_names.raise_if_any(f"{names} under {self.shown_root}")
        return sources, store

    def check(self) -> dict[str, int]:
        """Read every volume and its labels strictly, and keep nothing.

        Raises:
            DataError: Something is wrong; all faults are listed.
        """
        self._refuse_shards()
        self.refresh()
        bad_names = Problems()
        sources = find_volumes(self.folder, bad_names, self.leftovers)
        self._add_lacks(sources)
        problems, points = Problems(), 0
        counts = ordered_map(self._count, sources, self.workers)
        for source, count in zip(sources, track(counts, "checking", len(sources)), strict=True):
            if isinstance(count, str):
                problems.add(source.path, count)
            elif count < self.min_points:
                problems.add(source.path, self._describe_too_few(count))
            else:
                points += count
        headline = counted_of(len(problems), len(sources), "volume", "is bad", "are bad")
        if bad_names:
            headline = f"{counted(len(bad_names), 'name')} and {headline}"
        bad_names.extend(problems)
        bad_names.raise_if_any(headline)
        labelled = sum(source.labels is not None for source in sources)
        return {"volumes": len(sources), "labelled": labelled, "points": points}

    def verify(self, volumes: CTVolumes) -> list[str]:
        """Return a line for each volume whose index is damaged or does not match its files."""
        damages: list[str] = []
        if volumes.bank.fetches:  # there are no files to compare with
            return volumes.bank.find_damages()
        for number, source in enumerate(track(volumes.sources, "verifying", len(volumes.sources))):
            stored, fresh = volumes.bank[number], index_source(source, self.index_options)
            is_equal = (
                np.array_equal(stored.positions, fresh.positions)
                and np.array_equal(stored.values, fresh.values)
                and np.array_equal(stored.slices, fresh.slices)
            )
            if not is_equal:
                damages.append(f"{show_path(source.path)}: its index differs from the file")
        return damages + volumes.bank.find_damages()

    def _count(self, source: VolumeSource) -> int | str:
        """Return the number of occupied voxels of a volume, or its fault."""
        try:
            return len(index_source(source, self.index_options))
        except DataError as error:
            return str(error)

    def _find_too_few(self, bank: VolumeBank) -> set[int]:
        """Return the numbers of the volumes with too few points.

        Raises:
            DataError: There are some, and they are not to be skipped.
        """
        problems = Problems()
        too_few: list[int] = np.flatnonzero(bank.counts < self.min_points).tolist()
        for number in too_few:
            problems.add(bank.name(number), self._describe_too_few(int(bank.counts[number])))
        volumes = counted_of(len(too_few), len(bank), "volume", "has", "have")
        headline = f"{volumes} too few points"
        if self.too_few == "error":
            cure = (
                "choose data.window to match their values, lower data.min_points, or set "
                "data.too_few=skip"
            )
            problems.raise_if_any(headline, cure)
        skipped = inflect("[it is|they are] skipped", len(too_few))
        problems.warn_if_any(log, f"{headline}; {skipped}")
        return set(too_few)

    def _describe_too_few(self, count: int) -> str:
        return f"{counted(count, 'foreground voxel')}, fewer than data.min_points={self.min_points}"


def _find_good(sources: Sequence[VolumeSource], bank: VolumeBank) -> list[int]:
    """Return the number among all sources of each volume of a bank, which skips bad ones."""
    numbers: list[int] = []
    for number, source in enumerate(sources):
        # Both lists have one order, so the next volume of the bank is the next equal name.
        if len(numbers) < len(bank) and bank.name(len(numbers)) == source.path:
            numbers.append(number)
    return numbers
