"""Suite ``shards``: a set on a slow server, of which a quarter may be here at a time."""

import math
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.slow_s3 import BUCKET
from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.datamodules.stripe import StripeFiles
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.grid import PatchGrid
from lit_data.io.images.writing import write_png
from lit_data.io.remote import RemoteOptions
from lit_data.loading import LoaderOptions, MicroBatchLoader

COLUMNS = (*("way", "first_batch_s", "epoch_s", "fetched_share", "kept_share", "earlier", "note"),)
_HEADINGS = {name: name.replace("_", " ") for name in COLUMNS[:-1]}
_CHANNELS = 3
_BATCH = 32
_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}

Epochs = Callable[[Path, str], Iterator[Iterator[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsSuite(Suite):
    """Patches of a set on a server that answers late and slowly, from an empty cache on.

    A row for each way: ``shards``, a set of shards with a cache of a fraction of it; ``mirror``,
    the files of the set brought here first, all of them, and decoded into a store; ``litdata``, its
    patches as samples of litdata's StreamingDataset, with the same cache. Columns:
    ``first_batch_s``, seconds to the first batch from an empty cache; ``epoch_s``, of the second
    epoch; ``fetched_share``, bytes that the server sent in it over bytes of the set;
    ``kept_share``, most bytes on the disk over bytes of the set; ``earlier``, first batch of
    ``mirror`` over this one.

    Args:
        images: Number of images that are made, of noise.
        side_px: Their height and width, 3 channels of uint8.
        patch_px: Side of the patches, side by side.
        cache_share: Of the set that may be kept.
        shard_bytes: Of a shard, and of a chunk of litdata.
        latency_ms: Of each request.
        megabytes_per_s: Of all answers together.
        workers: Of each loader.
    """

    images: int = 300
    side_px: int = 1024
    patch_px: int = 128
    cache_share: float = 0.25
    shard_bytes: int = 8_000_000
    latency_ms: float = 20.0
    megabytes_per_s: float = 100.0
    workers: int = 2

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        folder = Path(cfg.paths.run)
        laps: dict[str, list[dict[str, float]]] = {"shards": [], "mirror": [], "litdata": []}
        with TemporaryDirectory(
            dir=cfg.paths.get("cache") or folder, prefix="shards-", ignore_cleanup_errors=True
        ) as temp:
            ways = _make_ways(Path(temp), self)
            with serve(Path(temp) / "bucket", self) as url:
                for _ in range(self.repeats):
                    for name, epochs in ways.items():
                        laps[name].append(_measure(Path(temp) / "here", epochs, url, self))
        lines = [_make_line(name, laps[name], laps["mirror"]) for name in laps]
        server = f"{self.latency_ms:g} ms, {self.megabytes_per_s:g} MB/s"
        title = f"{self.images} images of {self.side_px} px, {server}"
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS)
        return collect(lines, COLUMNS[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels."""
        return self.images * _CHANNELS * self.side_px**2

    @property
    def grid(self) -> PatchGrid:
        """The patches of all images."""
        sizes = np.full(self.images, self.side_px)
        return PatchGrid(sizes, sizes, self.patch_px, self.patch_px)


def _make_ways(folder: Path, options: ShardsSuite) -> dict[str, Epochs]:
    photos = folder / "bucket" / "photos"
    for number in range(options.images):
        rng = np.random.default_rng(number)
        shape = (options.side_px, options.side_px, _CHANNELS)
        image = rng.integers(0, 256, shape, np.uint8)
        write_png(photos / f"{number:04}.png", image)
    files = _open_files(str(photos), folder / "made", options)
    files.publish(str(folder / "bucket/set.shards"), options.shard_bytes)
    ways: dict[str, Epochs] = {
        "shards": partial(_read_ours, f"s3://{BUCKET}/set.shards", options),
        "mirror": partial(_read_ours, f"s3://{BUCKET}/photos", options),
    }
    if find_spec("litdata") is not None:
        _write_litdata(folder, options)
        ways["litdata"] = partial(_read_litdata, options)
    return ways


def _open_files(
    root: str, cache: Path, options: ShardsSuite, url: str | None = None
) -> StripeFiles:
    return StripeFiles(
        root=root,
        patterns=("*",),
        masks=None,
        layout="channels",
        channels=(0, 1, 2),
        files=None,
        cache="store",
        cache_bytes=int(options.cache_share * options.nbytes),
        cache_dir=str(cache),
        on_bad="error",
        remote=RemoteOptions(endpoint_url=url),
    )


def _read_ours(root: str, options: ShardsSuite, here: Path, url: str) -> Iterator[Iterator[Any]]:
    files = _open_files(root, here, options, url)
    files.refresh()
    dataset = PatchDataset(files.open_images(), GridPatches(options.grid))
    kind = LoaderOptions(batch_size=_BATCH, num_workers=options.workers, worker_kind="thread")
    loader = MicroBatchLoader(dataset, kind, shuffle=True)
    for epoch in range(2):
        loader.set_epoch(epoch)
        yield iter(loader)
    loader.close()


def _write_litdata(folder: Path, options: ShardsSuite) -> None:
    from litdata.streaming.cache import Cache

    store = _open_files(str(folder / "bucket/photos"), folder / "made", options).open_images()
    cache = Cache(str(folder / "bucket/litdata"), chunk_bytes=options.shard_bytes)
    grid, patch_px = options.grid, options.patch_px
    for index in range(len(grid)):
        (image,), (y,), (x,) = (values.tolist() for values in grid.locate(np.array([index])))
        cache[index] = store[image][:, y : y + patch_px, x : x + patch_px].copy()
    cache.done()
    cache.merge()


def _read_litdata(options: ShardsSuite, here: Path, url: str) -> Iterator[Iterator[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # its fast client refuses http otherwise
    getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = True
    dataset = StreamingDataset(
        f"s3://{BUCKET}/litdata",
        cache_dir=str(here),
        shuffle=True,
        max_cache_size=int(options.cache_share * options.nbytes),
        storage_options={"endpoint_url": url},
    )
    loader = StreamingDataLoader(dataset, batch_size=_BATCH, num_workers=options.workers)
    for _ in range(2):
        yield iter(loader)


def _measure(here: Path, epochs: Epochs, url: str, options: ShardsSuite) -> dict[str, float]:
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    os.environ.update(_SETTINGS)
    began_s = time.perf_counter()
    first_s = epoch_began_s = 0.0
    most_bytes = 0
    for batches in epochs(here, url):
        _count(url)  # from zero for this epoch
        epoch_began_s = time.perf_counter()
        samples = 0
        for batch in batches:
            if first_s == 0:
                first_s = time.perf_counter() - began_s
            samples += len(batch["image"] if isinstance(batch, dict) else batch)
            if samples % (32 * _BATCH) == 0:  # not each time: counting takes long
                most_bytes = max(most_bytes, _count_bytes(here))
        most_bytes = max(most_bytes, _count_bytes(here))
        if samples != len(options.grid):
            raise AssertionError(f"an epoch of {samples} samples, not {len(options.grid)}")
    fetched_bytes = _count(url)
    return {
        "first_batch_s": first_s,
        "epoch_s": time.perf_counter() - epoch_began_s,
        "fetched_share": fetched_bytes / options.nbytes,
        "kept_share": most_bytes / options.nbytes,
    }


def _count(url: str) -> int:
    """Ask the server for the bytes that it sent since it was asked last."""
    with urllib.request.urlopen(f"{url}/count") as answer:
        return int(answer.read())


def _count_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # evicted meanwhile
                total += (Path(parent) / name).stat().st_size
    return total


@contextmanager
def serve(folder: Path, options: ShardsSuite) -> Iterator[str]:
    """Serve a folder over S3 with the delays of the options; gives the address."""
    delays = [str(options.latency_ms), str(options.megabytes_per_s)]
    words = [sys.executable, "-m", "benchmarks.slow_s3", str(folder), *delays]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def _make_line(
    name: str, laps: list[dict[str, float]], mirror: list[dict[str, float]]
) -> Mapping[str, Any]:
    line: dict[str, Any] = {"way": name, "note": "" if laps else f"{name} is not installed"}
    for column in COLUMNS[1:5]:
        line[column] = _find_median(laps, column)
    line["earlier"] = _find_median(mirror, "first_batch_s") / line["first_batch_s"]
    return line


def _find_median(laps: list[dict[str, float]], column: str) -> float:
    return median([lap[column] for lap in laps] or [math.nan])
