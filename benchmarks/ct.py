"""Suite ``ct``: time to the occupied voxels of a volume, beside the ways of others."""

import logging
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
from lit_data.io.volumes.sources import VolumeSource, find_volumes, open_volume
from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_store import SparseStore

log = logging.getLogger(__name__)


_WINDOW = WINDOWS["bone"]
_ARCHIVED = ("positions", "values", "slices", "shape", "spacing_mm")


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
"""Work before the first epoch, if there is any, and work for each sample."""


class Ways:
    """Every way to the occupied voxels of some volumes.

    Args:
        sources: The volumes.
        options: The values of occupied voxels.
        folder: For files and store of the ways.
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
        self.sources = sources
        self.options = options
        self.folder = folder
        self.subset_points = subset_points
        self.store: SparseStore
        self._cached: dict[int, SparseVolume] = {}
        self._rows: dict[int, Cloud] = {}

    def by_name(self) -> dict[str, Way]:
        """Return the ways by the names of `CTSuite`."""
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
            "cached": (None, lambda number, _: self.write(number, self.cache(number))),
        }

    def forget_rows(self) -> None:
        """Let the next sample need rows of its own."""
        self._rows.clear()

    def write(
        self, number: int, volume: SparseVolume, chosen: NDArray[np.int64] | None = None
    ) -> Cloud:
        """Write a sample of all occupied voxels, or of some.

        The rows are used again for the next sample of the volume, as a loader's are.
        """
        positions, values = volume.positions, volume.values
        if chosen is not None:
            positions, values = positions[chosen], values[chosen]
        points = len(positions)
        if number not in self._rows or len(self._rows[number].coords) < points:
            coords = np.zeros((points, 4), np.int32)
            self._rows[number] = Cloud(coords, np.zeros((points, 1), np.float32))
        rows = self._rows[number]
        cloud = Cloud(rows.coords[:points], rows.feats[:points])
        write_coordinates(positions, volume.shape, cloud.coords)
        write_values(values, _WINDOW, cloud.feats[:, 0])
        return cloud

    def search_dense(
        self, number: int, find: Callable[[NDArray[np.bool_]], NDArray[np.int64]]
    ) -> Cloud:
        """Read a whole volume and search it."""
        volume = self._read(number)
        mask = volume > self.options.low_hu
        if self.options.high_hu is not None:
            mask &= volume <= self.options.high_hu
        positions = find(mask)
        coords = np.zeros((len(positions), 4), np.int32)
        coords[:, 1:] = positions
        return Cloud(coords, _WINDOW.scale(volume[tuple(positions.T)])[:, None])

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
        """Path of the archive of a volume."""
        return self.folder / "files" / f"{number}.npz"

    def build(self) -> None:
        """Index all volumes into the store."""
        self.store = SparseStore.build(
            self.sources, self.folder / "store", options=self.options, progress=False
        )

    def draw_subset(self, number: int, epoch: int) -> Cloud:
        """Draw some of a volume's occupied voxels from the store, others in each epoch."""
        volume = self.store[number]
        chosen = choose_points(len(volume), self.subset_points, seed=0, epoch=epoch, index=number)
        return self.write(number, volume, chosen)

    def cache(self, number: int) -> SparseVolume:
        """Return a volume from the memory of this process."""
        if number not in self._cached:
            self._cached[number] = self.index(number)
        return self._cached[number]

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


COLUMNS = (
    "method", "prepare_ms", "first_epoch_ms", "load_ms_mean", "load_ms_std", "ratio_to_argwhere",
    "memory_mib", "points", "samples",
)  # fmt: skip
_LOW_HU = 150.0
_SLICES = 16  # of a made volume, drawn at once


@dataclass(slots=True)
class Times:
    """Measurements of a way, in seconds for a volume."""

    prepare_s: float = math.nan
    epochs_s: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0
    points: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CTSuite(Suite):
    """Time to the occupied voxels of a volume, beside the ways of others.

    A row for each way, in turn, as points and values: ``argwhere`` and ``nonzero`` read the dense
    file and search it, ``memory_map`` searches it slab by slab as lit_data does, ``sparse_file``
    reads compressed archives, ``store`` maps the index, ``subset`` draws some points of it,
    ``cached`` takes it from memory. All but ``subset`` give equal samples, which is checked.
    Columns: ``prepare_ms``, making of files or store, for a volume; ``first_epoch_ms``,
    ``load_ms_mean``, ``load_ms_std`` of a sample in the first and in all later epochs;
    ``ratio_to_argwhere``; ``memory_mib``, most memory that a sample allocates (pages of memory maps
    belong to the page cache); ``points`` found in an epoch; ``samples`` in later epochs.

    Args:
        volumes: Number of synthetic volumes; None measures the experiment's.
        volume_side: Voxels of a synthetic volume along each axis.
        occupied_share: Fraction of its voxels that are occupied.
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
        argwhere = times["argwhere"]
        lines = [_make_line(method, each, argwhere) for method, each in times.items()]
        points = argwhere.points / len(sources)
        title = f"{len(sources)} volumes, {points:,.0f} occupied voxels each"
        report_lines(lines, COLUMNS, folder, title)
        return collect(lines, COLUMNS) | {
            "benchmark/volumes": len(sources),
            "benchmark/points": argwhere.points,
        }


def _read_set(cfg: DictConfig) -> tuple[Sequence[VolumeSource], IndexOptions]:
    datamodule = instantiate(cfg.data)
    if not isinstance(datamodule, CTDataModule):
        raise ConfigError(
            "suite.volumes=null measures the experiment's volumes: add +experiment=ct"
        )
    return find_volumes(datamodule.source.folder), datamodule.source.index_options


def _make_set(folder: Path, options: CTSuite) -> list[VolumeSource]:
    """Make volumes of noise in which a fraction of the voxels, anywhere, is bone."""
    side, count = options.volume_side, options.volumes or 0
    for number in track(range(count), "making volumes", count):
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
    """Measure every way in turn, epoch by epoch."""
    all_ways = Ways(sources, index, folder, subset_points=options.subset_points)
    ways = all_ways.by_name()
    times = {method: Times() for method in ways}
    for method, (prepare, _) in ways.items():
        if prepare is not None:
            times[method].prepare_s = _time(prepare)[0] / len(sources)
    rounds = list(product(range(options.repeats + 1), ways))
    expected: list[Cloud] = []
    for epoch, method in track(rounds, "measuring", len(rounds)):
        _, load = ways[method]
        seconds, clouds = [], []
        for number in range(len(sources)):
            load_s, cloud = _time(partial(load, number, epoch))
            seconds.append(load_s)
            clouds.append(cloud)
        times[method].epochs_s.append(seconds)
        times[method].points = sum(len(cloud.coords) for cloud in clouds)
        if epoch == 0 and method != "subset":
            check_equal(method, clouds, expected)
    for method, (_, load) in ways.items():
        all_ways.forget_rows()
        times[method].memory_bytes = _measure_memory(partial(load, 0, 0))
    return times


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result


def check_equal(method: str, clouds: Sequence[Cloud], expected: list[Cloud]) -> None:
    """Compare the samples of a way with those of the first one.

    Raises:
        DataError: They differ, so the comparison would mean nothing.
    """
    if not expected:
        expected.extend(clouds)
    for one, other in zip(clouds, expected, strict=True):
        is_equal = np.array_equal(one.coords, other.coords)
        if not is_equal or not np.array_equal(one.feats, other.feats):
            raise DataError(
                f"{method} finds {len(one.coords)} other voxels than argwhere, which finds "
                f"{len(other.coords)}"
            )


def _measure_memory(work: Callable[[], object]) -> int:
    """Measure the most bytes that are allocated at a time; memory maps do not count."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _make_line(method: str, times: Times, argwhere: Times) -> dict[str, Any]:
    loads_ms = _list_later_loads(times)
    mean_ms = fmean(loads_ms)
    return {
        "method": method,
        "prepare_ms": 1e3 * times.prepare_s,
        "first_epoch_ms": 1e3 * fmean(times.epochs_s[0]),
        "load_ms_mean": mean_ms,
        "load_ms_std": pstdev(loads_ms),
        "ratio_to_argwhere": fmean(_list_later_loads(argwhere)) / mean_ms,
        "memory_mib": times.memory_bytes / 2**20,
        "points": times.points,
        "samples": len(loads_ms),
    }


def _list_later_loads(times: Times) -> list[float]:
    """List the milliseconds of each sample behind the first epoch."""
    loads_ms = []
    for seconds in times.epochs_s[1:]:
        loads_ms += [1e3 * load_s for load_s in seconds]
    return loads_ms
