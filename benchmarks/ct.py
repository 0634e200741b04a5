"""Mode ``ct``: how fast the occupied voxels of a volume are there, beside the ways in which people get them."""

import logging
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.checks import check_count, check_share
from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.commands.configuration.targets import instantiate
from lit_data.datamodules.ct import CTDataModule
from lit_data.datasets.ct.points import choose_points, write_coordinates, write_values
from lit_data.errors import ConfigError, DataError
from lit_data.io.progress import track
from lit_data.io.volumes.hounsfield import WINDOWS
from lit_data.io.volumes.indexing import IndexOptions, index_volume
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.sources import VolumeSource, find_volumes
from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_store import SparseStore

log = logging.getLogger(__name__)


_WINDOW = WINDOWS["bone"]
_ARCHIVED: Final = ("positions", "values", "slices", "shape", "spacing_mm")


class Cloud(NamedTuple):
    """A sample.

    Attributes:
        coords: [N, 4] int32 (row, z, y, x).
        feats: [N, 1] float32 in 0..1.
    """

    coords: NDArray[np.int32]
    feats: NDArray[np.float32]


Load = Callable[[int, int], Cloud]
"""Makes the sample of a volume in an epoch."""

Way = tuple[Callable[[], object] | None, Load]
"""What is done once before the first epoch, if anything is, and what is done for each sample."""


class Ways:
    """Every way, for volumes and for what is kept of them.

    Args:
        sources: The volumes.
        options: Which voxels are occupied.
        folder: For what the ways keep.
        subset_points: Points that the way ``subset`` draws.
    """

    def __init__(
        self,
        sources: Sequence[VolumeSource],
        options: IndexOptions,
        folder: Path,
        *,
        subset_points: int,
    ) -> None:
        self.sources, self.options, self.folder, self.subset_points = (
            sources,
            options,
            folder,
            subset_points,
        )
        self.store: SparseStore
        self._kept: dict[int, SparseVolume] = {}
        self._rows: dict[int, Cloud] = {}

    def by_name(self) -> dict[str, Way]:
        """The ways by the names of `lit_data.commands.benchmark.run`."""
        return {
            "argwhere": (None, lambda number, _: self.search_dense(number, _find_argwhere)),
            "nonzero": (None, lambda number, _: self.search_dense(number, _find_nonzero)),
            "memory_map": (None, lambda number, _: self.write(number, self.index(number))),
            "sparse_file": (
                self.write_files,
                lambda number, _: self.write(number, self.read_file(number)),
            ),
            "store": (self.build, lambda number, _: self.write(number, self.store[number])),
            "subset": (None, self.draw_subset),
            "cached": (None, lambda number, _: self.write(number, self.keep(number))),
        }

    def forget_rows(self) -> None:
        """Let the next sample need rows of its own."""
        self._rows.clear()

    def write(
        self, number: int, volume: SparseVolume, chosen: NDArray[np.int64] | None = None
    ) -> Cloud:
        """Write a sample of all occupied voxels, or of some, into rows that are used again, as a loader's are."""
        positions = volume.positions if chosen is None else volume.positions[chosen]
        if number not in self._rows or len(self._rows[number].coords) < len(positions):
            coords, feats = (
                np.zeros((len(positions), 4), np.int32),
                np.zeros((len(positions), 1), np.float32),
            )
            self._rows[number] = Cloud(coords, feats)
        rows = self._rows[number]
        cloud = Cloud(rows.coords[: len(positions)], rows.feats[: len(positions)])
        write_coordinates(positions, volume.shape, cloud.coords)
        write_values(
            volume.values if chosen is None else volume.values[chosen], _WINDOW, cloud.feats[:, 0]
        )
        return cloud

    def search_dense(
        self, number: int, find: Callable[[NDArray[np.bool_]], NDArray[np.int64]]
    ) -> Cloud:
        """Read a whole volume and search it."""
        volume, high_hu = self._read(number), self.options.high_hu
        mask = volume > self.options.low_hu
        places = find(mask if high_hu is None else mask & (volume <= high_hu))
        rows = np.zeros((len(places), 4), np.int32)
        rows[:, 1:] = places
        return Cloud(rows, _WINDOW.scale(volume[tuple(places.T)])[:, None])

    def index(self, number: int) -> SparseVolume:
        """Find a volume's occupied voxels slab by slab."""
        with open_volume(self.sources[number], nan_fill=self.options.nan_fill) as volume:
            return index_volume(volume, self.options.low_hu, self.options.high_hu)

    def write_files(self) -> None:
        """Write a compressed archive for each volume."""
        for number in range(len(self.sources)):
            volume = self.index(number)
            arrays = {name: getattr(volume, name) for name in _ARCHIVED}
            self.file(number).parent.mkdir(exist_ok=True)
            np.savez_compressed(self.file(number), allow_pickle=False, **arrays)

    def read_file(self, number: int) -> SparseVolume:
        """Read the archive of a volume."""
        with np.load(self.file(number), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in _ARCHIVED}
        shape = tuple(arrays.pop("shape").tolist())
        spacing_mm = tuple(arrays.pop("spacing_mm").tolist())
        return SparseVolume(shape=shape, spacing_mm=spacing_mm, **arrays)

    def file(self, number: int) -> Path:
        """The archive of a volume."""
        return self.folder / "files" / f"{number}.npz"

    def build(self) -> None:
        """Index all volumes into the store."""
        self.store = SparseStore.build(
            self.sources, self.folder / "store", options=self.options, progress=False
        )

    def draw_subset(self, number: int, epoch: int) -> Cloud:
        """Some of a volume's occupied voxels from the store, others in each epoch."""
        volume = self.store[number]
        chosen = choose_points(len(volume), self.subset_points, seed=0, epoch=epoch, index=number)
        return self.write(number, volume, chosen)

    def keep(self, number: int) -> SparseVolume:
        """A volume from the memory of this process."""
        if number not in self._kept:
            self._kept[number] = self.index(number)
        return self._kept[number]

    def _read(self, number: int) -> NDArray[Any]:
        source = self.sources[number]
        if source.kind == "npy":
            dense: NDArray[Any] = np.load(source.path, allow_pickle=False)
            return dense
        with open_volume(source, nan_fill=self.options.nan_fill) as volume:
            return np.array(volume.read(0, volume.shape[0]))


def _find_argwhere(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.argwhere(mask)


def _find_nonzero(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.stack(np.nonzero(mask), axis=1)


COLUMNS: Final = (
    "method", "prepare_ms", "first_epoch_ms", "load_ms_mean", "load_ms_std", "ratio_to_argwhere", "memory_mib",
    "points", "samples",
)  # fmt: skip
_LOW_HU: Final = 150.0
_SLICES: Final = 16  # of a made volume, drawn at once


@dataclass(slots=True)
class Times:
    """What was measured of a way, in seconds for a volume."""

    prepare_s: float = math.nan
    epochs_s: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0
    points: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CTSuite(Suite):
    """How fast the occupied voxels of a volume are there, beside the ways in which people get them.

    A row for each way, in turn, as points and values: ``argwhere`` and ``nonzero`` read the dense
    file and search it, ``memory_map`` searches it slab by slab as lit_data does, ``sparse_file``
    reads compressed archives, ``store`` maps the index, ``subset`` draws some points of it,
    ``cached`` takes it from memory. All but ``subset`` give equal samples, which is checked.
    Columns: ``prepare_ms``, making of files or store, for a volume; ``first_epoch_ms``,
    ``load_ms_mean``, ``load_ms_std`` of a sample in the first and in all later epochs;
    ``ratio_to_argwhere``; ``memory_mib``, most memory that a sample allocates (pages of memory maps
    belong to the page cache); ``points`` found in an epoch; ``samples`` in later epochs.

    Args:
        volumes: How many volumes are made; None measures the experiment's.
        volume_side: Voxels of a made volume along each axis.
        occupied_share: Share of its voxels that are occupied.
        subset_points: Points of the row that draws some.

    Raises:
        ConfigError: A value is out of its range.
    """

    volumes: int | None = 2
    volume_side: int = 512
    occupied_share: float = 0.005
    subset_points: int = 100_000

    def __post_init__(self) -> None:
        """Check every range."""
        Suite.__post_init__(self)
        check_share("suite.occupied_share", self.occupied_share)
        if self.volumes is not None:
            check_count("suite.volumes", self.volumes, 1)

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        folder = Path(cfg.paths.run)
        with TemporaryDirectory(dir=folder, prefix="volumes-") as temp:
            if self.volumes is None:
                sources, index = _read_set(cfg)
            else:
                sources, index = _make_set(Path(temp), self), IndexOptions(low_hu=_LOW_HU)
            times = _measure(sources, index, Path(temp), self)
        lines = [_make_line(method, found, times["argwhere"]) for method, found in times.items()]
        title = (
            f"{len(sources)} volumes, {lines[0]['points'] / len(sources):,.0f} occupied voxels each"
        )
        report_lines(lines, COLUMNS, folder, title)
        return collect(lines, COLUMNS) | {
            "benchmark/volumes": len(sources),
            "benchmark/points": lines[0]["points"],
        }


def _read_set(cfg: DictConfig) -> tuple[Sequence[VolumeSource], IndexOptions]:
    datamodule = instantiate(cfg.data)
    if not isinstance(datamodule, CTDataModule):
        raise ConfigError(
            "suite.volumes=null measures the experiment's volumes: add +experiment=ct"
        )
    return find_volumes(datamodule.source.folder), datamodule.source.index_options


def _make_set(folder: Path, options: CTSuite) -> list[VolumeSource]:
    """Volumes of noise in which a given share of voxels, anywhere, is bone."""
    side = options.volume_side
    for number in track(range(options.volumes or 0), "making volumes", options.volumes or 0):
        rng = np.random.default_rng(number)
        path = folder / f"{number}.npy"
        volume = np.lib.format.open_memmap(path, "w+", np.int16, (side, side, side))
        for begin in range(0, side, _SLICES):
            slab = volume[begin : begin + _SLICES]
            slab[...] = rng.integers(-1000, int(_LOW_HU), slab.shape, dtype=np.int16, endpoint=True)
            bone = rng.permutation(slab.size)[: round(options.occupied_share * slab.size)]
            slab.reshape(-1)[bone] = rng.integers(int(_LOW_HU) + 1, 1500, len(bone), dtype=np.int16)
        volume.flush()
    return find_volumes(folder)


def _measure(
    sources: Sequence[VolumeSource], index: IndexOptions, folder: Path, options: CTSuite
) -> dict[str, Times]:
    """Every way in turn, epoch by epoch."""
    all_ways = Ways(sources, index, folder, subset_points=options.subset_points)
    ways = all_ways.by_name()
    times = {method: Times() for method in ways}
    for method, (prepare, _) in ways.items():
        if prepare is not None:
            times[method].prepare_s = _time(prepare)[0] / len(sources)
    rounds = [(epoch, *item) for epoch in range(options.repeats + 1) for item in ways.items()]
    expected: list[Cloud] = []
    for epoch, method, (_, load) in track(rounds, "measuring", len(rounds)):
        timed = [_time(partial(load, number, epoch)) for number in range(len(sources))]
        times[method].epochs_s.append([seconds for seconds, _ in timed])
        times[method].points = sum(len(cloud.coords) for _, cloud in timed)
        if epoch == 0 and method != "subset":
            check_equal(method, [cloud for _, cloud in timed], expected)
    for method, (_, load) in ways.items():
        all_ways.forget_rows()
        times[method].memory_bytes = _measure_memory(partial(load, 0, 0))
    return times


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result


def check_equal(method: str, clouds: Sequence[Cloud], expected: list[Cloud]) -> None:
    """Hold the samples of a way against those of the first one.

    Raises:
        DataError: They differ, so the comparison would mean nothing.
    """
    if not expected:
        expected.extend(clouds)
    for one, other in zip(clouds, expected, strict=True):
        if not (
            np.array_equal(one.coords, other.coords) and np.array_equal(one.feats, other.feats)
        ):
            raise DataError(
                f"{method} finds {len(one.coords)} other voxels than argwhere, which finds {len(other.coords)}"
            )


def _measure_memory(work: Callable[[], object]) -> int:
    """Most bytes that are allocated at a time; memory maps are not counted, they are the page cache's."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _make_line(method: str, found: Times, reference: Times) -> dict[str, Any]:
    later, usual = (
        [1e3 * seconds for epoch in times.epochs_s[1:] for seconds in epoch]
        for times in (found, reference)
    )
    return {
        "method": method,
        "prepare_ms": 1e3 * found.prepare_s,
        "first_epoch_ms": 1e3 * fmean(found.epochs_s[0]),
        "load_ms_mean": fmean(later),
        "load_ms_std": pstdev(later),
        "ratio_to_argwhere": fmean(usual) / fmean(later),
        "memory_mib": found.memory_bytes / 2**20,
        "points": found.points,
        "samples": len(later),
    }
