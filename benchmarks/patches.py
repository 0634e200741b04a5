"""Suite ``patches``: patches of large images, from a warm and from a cold page cache."""

import gc
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.grid import PatchGrid
from lit_data.io import DecodedStore, ImageDecoder, ImageSource, StoreOptions
from lit_data.io.discovery import find_images
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.readers import read_image
from lit_data.io.progress import track
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.options import WorkerKind
from lit_data.types import Array

COLUMNS = (
    "way", "cold_per_s", "warm_per_s", "cold_ratio", "warm_ratio", "amplification", "stored_share",
    "note",
)  # fmt: skip
_HEADINGS = {name: name.replace("_", " ") for name in COLUMNS[:-1]}
_CHANNELS = 3
_BATCH = 32
_TILE_PX = 128
_SHARD_PX = 1024

Open = Callable[[], Iterator[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchesSuite(Suite):
    """Patches of large images in random order, from a cold and from a warm page cache.

    A row for each way: ``bands`` and ``whole`` are the store of lit_data in bands and without,
    with its own loader; ``tiff`` (tiles of 128 px, read
    by tifffile), ``zarr`` (chunks of 64 px in shards of 1,024) and ``hdf5`` (chunks of 64 px) are
    read in the workers of torch's DataLoader, none of them compressed. Columns: patches per second
    ``cold_per_s`` and ``warm_per_s`` after the first batch; their ratios to ``whole``;
    ``amplification``, bytes read from the disk over bytes of the patches; ``stored_share``, bytes
    on the disk over bytes of the pixels; ``note``, why a way was not measured. The warm lap takes
    the patches of the cold one again.

    Args:
        images: Number of images that are made.
        photos: Folder of photographs that they are put together from; without it they are noise.
        side_px: Their height and width, 3 channels of uint8.
        patch_px: Side of a patch.
        stride_px: Distance between patches of the grid.
        batches: Measured in each repeat.
        workers: Of each loader.
        worker_kind: Of lit_data's loader: `inline`, `thread` or `process`.
        band_px: Of the store in bands.
    """

    images: int = 24
    photos: str = ""
    side_px: int = 4096
    patch_px: int = 128
    stride_px: int = 112
    batches: int = 60
    workers: int = 2
    worker_kind: WorkerKind = "process"
    band_px: int = 64

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        folder = Path(cfg.paths.run)
        cache = Path(cfg.paths.get("cache") or folder)
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix="patches-") as temp:
            ways = _make_ways(Path(temp), self)
            laps: dict[str, list[_Lap]] = {name: [] for name in ways}
            files = [path for path in Path(temp).rglob("*") if path.is_file()]
            for _ in range(self.repeats):
                for name in filter(_is_installed, ways):
                    drop_from_cache(files)
                    laps[name].append(_measure(ways[name], self, warm=False))
                    laps[name].append(_measure(ways[name], self, warm=True))
            sizes = {name: _count_bytes(Path(temp) / name) for name in ways}
        pixels_bytes = _CHANNELS * self.images * self.side_px**2
        lines = []
        for name in ways:
            line = _make_line(name, laps[name], laps["whole"])
            line["stored_share"] = sizes[name] / pixels_bytes or math.nan
            lines.append(line)
        side = self.side_px
        title = (
            f"{self.images} images of {side} x {side} x {_CHANNELS}, patches of {self.patch_px} px"
        )
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS)
        return collect(lines, COLUMNS[:-1])


@dataclass(frozen=True, slots=True)
class _Lap:
    is_warm: bool
    per_s: float
    amplification: float


class RegionPatches(Dataset[Array]):
    """Patches of images in files of another format, opened in each worker.

    Args:
        open_images: Gives an object for each image that is read by slices.
        grid: Of the patches.
    """

    def __init__(self, open_images: Callable[[], Sequence[Any]], grid: PatchGrid) -> None:
        self._open = open_images
        self._grid = grid
        self._images: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self._grid)

    def __getitem__(self, index: int) -> Array:
        if self._images is None:
            self._images = self._open()
        (image,), (y,), (x,) = (values.tolist() for values in self._grid.locate(np.array([index])))
        height, width = self._grid.patch_px
        return np.asarray(self._images[image][:, y : y + height, x : x + width])


def drop_from_cache(files: Sequence[Path]) -> None:
    """Have the kernel forget the pages of files that nobody maps."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _make_ways(folder: Path, options: PatchesSuite) -> dict[str, Open]:
    sources = _make_images(folder, options)
    sizes = np.full(options.images, options.side_px)
    grid = PatchGrid(sizes, sizes, options.patch_px, options.stride_px)
    layouts = {
        "bands": StoreOptions(band_px=options.band_px),
        "whole": StoreOptions(band_px=None),
    }
    ways: dict[str, Open] = {}
    stores = {}
    for name, layout in layouts.items():
        store = DecodedStore.build(sources, folder / name, decoder=ImageDecoder(), store=layout)
        stores[name] = store
        ways[name] = partial(_open_ours, store.path, grid, options)
    readers: dict[str, Callable[[], Sequence[Any]]] = {
        "tiff": partial(_open_tiff, folder / "tiff", options.images),
        "zarr": partial(_open_zarr, folder / "zarr", options.images),
        "hdf5": partial(_open_hdf5, folder / "hdf5" / "images.h5"),
    }
    for name, write in (("tiff", _write_tiff), ("zarr", _write_zarr), ("hdf5", _write_hdf5)):
        if _is_installed(name):
            write(stores["whole"], folder)
        ways[name] = partial(_open_torch, RegionPatches(readers[name], grid), options)
    return ways


def _make_images(folder: Path, options: PatchesSuite) -> list[ImageSource]:
    photos = _read_photos(Path(options.photos)) if options.photos else []
    sources: list[ImageSource] = []
    for number in track(range(options.images), "making images", options.images):
        path = folder / f"{number}.npy"
        if photos:
            np.save(path, _join(photos, number, options.side_px))
        else:
            np.save(path, _draw(number, options.side_px))
        sources.append(ImageSource((str(path),)))
    return sources


def _read_photos(folder: Path) -> list[Array]:
    """Read the photographs of a folder that have three channels."""
    photos = []
    for path in find_images(folder).paths:
        photo = read_image(path, ReadOptions(gray_to_rgb=True))
        if len(photo) == _CHANNELS:
            photos.append(photo)
    return photos


def _draw(number: int, side_px: int) -> Array:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (_CHANNELS, side_px, side_px), np.uint8)


def _join(photos: Sequence[Array], number: int, side_px: int) -> Array:
    """Join photographs side by side to a large image [C, side_px, side_px]."""
    rng = np.random.default_rng(number)
    image = np.zeros((_CHANNELS, side_px, side_px), np.uint8)
    top = 0
    while top < side_px:
        row: list[Array] = []
        while sum(photo.shape[2] for photo in row) < side_px:
            row.append(photos[int(rng.integers(len(photos)))])
        height = min(side_px - top, *(photo.shape[1] for photo in row))
        joined = np.concatenate([photo[:, :height] for photo in row], axis=2)
        image[:, top : top + height] = joined[:, :, :side_px]
        top += height
    return image


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _open_ours(path: Path, grid: PatchGrid, options: PatchesSuite) -> Iterator[Mapping[str, Any]]:
    kind = LoaderOptions(
        batch_size=_BATCH,
        num_workers=options.workers,
        worker_kind=options.worker_kind,
        drop_last=True,
    )
    loader = MicroBatchLoader(
        PatchDataset(DecodedStore.open(path), GridPatches(grid)), kind, shuffle=True
    )
    try:
        yield from loader
    finally:
        loader.close()


def _open_torch(dataset: Dataset[Array], options: PatchesSuite) -> Iterator[Mapping[str, Tensor]]:
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        dataset, _BATCH, shuffle=True, num_workers=options.workers, drop_last=True, generator=order
    )
    for images in loader:
        yield {"image": images}


def _open_tiff(folder: Path, count: int) -> Sequence[Any]:
    import tifffile
    import zarr

    images = []
    for number in range(count):
        tiles = tifffile.imread(folder / f"{number}.tif", aszarr=True)
        images.append(zarr.open(tiles, mode="r"))
    return images


def _open_zarr(folder: Path, count: int) -> Sequence[Any]:
    import zarr

    return [zarr.open(str(folder / f"{number}.zarr"), mode="r") for number in range(count)]


def _open_hdf5(path: Path) -> Sequence[Any]:
    import h5py

    file = h5py.File(path, "r")
    return [file[str(number)] for number in range(len(file))]


def _write_tiff(store: DecodedStore, folder: Path) -> None:
    import tifffile

    (folder / "tiff").mkdir()
    for number in range(len(store)):
        tile = (_TILE_PX, _TILE_PX)
        path = folder / "tiff" / f"{number}.tif"
        tifffile.imwrite(path, store[number], tile=tile, photometric="rgb", planarconfig="separate")


def _write_zarr(store: DecodedStore, folder: Path) -> None:
    import zarr

    for number in range(len(store)):
        image = store[number]
        chunks = -(-int(store.heights_px[number]) // 64)  # along a side, rounded up
        side = min(_SHARD_PX, 64 * chunks)
        array = zarr.create_array(
            str(folder / "zarr" / f"{number}.zarr"),
            shape=image.shape,
            dtype="u1",
            chunks=(_CHANNELS, 64, 64),
            shards=(_CHANNELS, side, side),
            compressors=None,
        )
        array[...] = image


def _write_hdf5(store: DecodedStore, folder: Path) -> None:
    import h5py

    (folder / "hdf5").mkdir(exist_ok=True)
    with h5py.File(folder / "hdf5" / "images.h5", "w") as file:
        for number in range(len(store)):
            file.create_dataset(str(number), data=store[number], chunks=(_CHANNELS, 64, 64))


def _is_installed(way: str) -> bool:
    """Return True if the packages that a way needs are there."""
    packages = {"tiff": ("zarr",), "zarr": ("zarr",), "hdf5": ("h5py",)}.get(way, ())
    return all(importlib.util.find_spec(package) for package in packages)


def _measure(open_batches: Open, options: PatchesSuite, *, warm: bool) -> _Lap:
    read_before_bytes = _count_read_bytes()
    patches = patch_bytes = 0
    began_s = 0.0
    batches = open_batches()
    for number, batch in enumerate(islice(batches, options.batches + 1)):
        patch_bytes += batch["image"].nbytes
        if number == 0:  # workers start before the first batch
            began_s = time.perf_counter()
        else:
            patches += len(batch["image"])
    elapsed_s = time.perf_counter() - began_s
    del batches  # ends the workers, whose reading then counts as ours
    gc.collect()
    read_bytes = _count_read_bytes() - read_before_bytes
    return _Lap(warm, patches / elapsed_s, read_bytes / patch_bytes)


def _count_read_bytes() -> int:
    """Count the bytes that this process and its ended children had read from the disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def _make_line(name: str, laps: Sequence[_Lap], laps_of_whole: Sequence[_Lap]) -> dict[str, Any]:
    line: dict[str, Any] = {"way": name, "note": "" if laps else f"{name} is not installed"}
    for is_warm, word in ((False, "cold"), (True, "warm")):
        per_s = _find_median_speed(laps, is_warm=is_warm)
        line[f"{word}_per_s"] = per_s
        line[f"{word}_ratio"] = per_s / _find_median_speed(laps_of_whole, is_warm=is_warm)
    amplifications = [lap.amplification for lap in laps if not lap.is_warm]
    line["amplification"] = median(amplifications or [math.nan])
    return line


def _find_median_speed(laps: Sequence[_Lap], *, is_warm: bool) -> float:
    speeds = [lap.per_s for lap in laps if lap.is_warm is is_warm]
    return median(speeds or [math.nan])
