"""`TiledPredictor`: a value for every pixel of images of any size, predicted in tiles."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import pair_px
from lit_data.core.types import Array, PathText, Size
from lit_data.predict.forward import (
    Activation,
    Augment,
    Forward,
    ForwardOptions,
    InferenceThreads,
    Precision,
)
from lit_data.predict.memory_limit import ADVICE, MemoryLimit
from lit_data.predict.npy_target import FileDtype, NpyTarget, replacing_file
from lit_data.predict.reach import find_reach_px
from lit_data.predict.runner import BatchSize, BatchSizes, Runner
from lit_data.predict.tiles import (
    Image,
    ImageJob,
    Images,
    Kind,
    MemoryTarget,
    OpenedImage,
    Tiling,
    open_source,
    open_sources,
)
from lit_inspect.counts import counted
from lit_inspect.tiles import Blend

_WAITING_IMAGES = 2
"""Images that may wait for one before them, in batches of single tiles, for each thread."""


class TiledPredictor:
    """Cuts images into overlapping tiles, predicts them in common batches, and stitches values.

    If the overlap is at least the net's receptive field, the values are those that the net gives
    for the whole image, up to rounding in float32; see `lit_inspect.tiles.weigh_tiles`. A side
    shorter than a tile is padded to a multiple of `round_px` by repeating its edge, and cropped
    afterwards.

    If memory runs out, the batch is predicted in halves, and later calls keep the size that works.
    The model moves to `device` (and to the format of `channels_last`) and stays there. Otherwise it
    is unchanged while no batch is in progress, including its training mode. Only one thread at a
    time may use a predictor.

    Args:
        model: Net from [B, C, h, w] float32 to [B, K, h, w]. Integer images are scaled to 0..1,
            float images are passed unchanged.
        tile_px: Tile size, one number or (height, width).
        overlap_px: Smallest number of pixels that neighboring tiles share.
        blend: `constant` uses a pixel from the tile in which it is farthest from a seam, `gaussian`
            averages by the distance from the center.
        margin_px: Number of pixels next to a seam that are ignored. With None, `constant` ignores
            half of the overlap, and `gaussian` the reach of the net (measured on the first image
            with seams, see `measure_reach_px`), or a quarter of the overlap if the reach exceeds
            half of it.
        multiple_px: Total stride of the net, if it has one; tiles begin at multiples of it.
        round_px: Multiple to which short sides are padded; None uses an eighth of a tile. With 1,
            each size of small images has its own batches.
        batch_size: Number of tiles in the first batch.
        min_batch_size: Smallest number of tiles; if they do not fit, a `BatchMemoryError` is raised.
        max_batch_size: Largest number of tiles. The batch grows up to it while batches succeed, but
            never to a size that failed. None means `batch_size`.
        memory_limit_bytes: Device memory for weights and the batches in progress; batches are made
            smaller to stay below it.
        precision: Precision of the net; `bf16` and `fp16` use autocast.
        channels_last: Use this memory format for weights and tiles.
        compile: Run `torch.compile` at the first batch of a size; all tiles then have the full
            size. This needs a C++ compiler, or Triton on a GPU.
        augment: Average over 4 (`flips`) or 8 (`d4`, flips and quarter turns) orientations, for
            values without a direction.
        activation: `sigmoid` or `softmax` over the K channels, before anything is averaged.
        value_range: Pixel values (low, high) that become 0 and 1; None uses the range of the dtype.
        threads: Number of inference threads, which call the net in parallel, each with its part of
            the cores; for the CPU, and not for a compiled net. The net must allow this: one that
            changes itself in `forward` does not.
        readers: Number of threads that load images, if they must be loaded.
        device: Device of the net; None keeps its current one.

    Raises:
        ConfigError: Options are unknown or do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tile_px: int | Size,
        overlap_px: int,
        blend: Blend = "constant",
        margin_px: int | None = None,
        multiple_px: int = 1,
        round_px: int | None = None,
        batch_size: int = 8,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        memory_limit_bytes: int | None = None,
        precision: Precision = "fp32",
        channels_last: bool = False,
        compile: bool = False,
        augment: Augment | None = None,
        activation: Activation = "none",
        value_range: tuple[float, float] | None = None,
        threads: int = 1,
        readers: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if readers < 1:
            raise ConfigError(f"readers={readers} must be at least 1")
        net_device = torch.device(device) if device else _find_device(model)
        busy = "" if net_device.type == "cpu" else str(net_device)
        _check_threads(threads, "what is compiled" if compile else busy)
        self._readers = readers
        self._threads = threads
        sides = pair_px("tile_px", tile_px)
        if compile:  # for tiles of one size, to which smaller ones are padded
            round_px = max(sides)
        self._tiling = Tiling(sides, overlap_px, margin_px, blend, multiple_px, round_px)
        self._knows_margin = blend == "constant" or margin_px is not None
        start = _limit_size(batch_size, min_batch_size, max_batch_size)
        options = ForwardOptions(
            precision, channels_last, compile, augment, activation, value_range
        )
        self._forward = Forward(model, net_device, options)
        limit = None
        if memory_limit_bytes is not None:
            limit = MemoryLimit(self._forward, memory_limit_bytes, threads).fit
        self._sizes = BatchSizes(start, limit)

    def predict(
        self,
        images: Images,
        *,
        on_bad: Callable[[int, DataError], None] | None = None,
        on_tiles: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Predict images of any sizes.

        Memory holds the images whose tiles share a batch, and a few that were read ahead.

        Args:
            images: Arrays or tensors [C, H, W], functions that load one when it is needed, or a
                bank.
            on_bad: Function called with the number of a bad image, which is then skipped, and the
                error; None raises the error.
            on_tiles: Function called after each batch with its number of tiles.

        Yields:
            (number in the input, [K, H, W] float32 on the CPU), in the order of the input, as soon
            as all images before are complete.

        Raises:
            DataError: An image is bad.
            BatchMemoryError: The smallest batch does not fit.
            ConfigError: The net does not give a value for every pixel.
        """
        sources = open_sources(images, readers=self._readers, on_bad=on_bad)
        jobs = (ImageJob(source, self._tiling_of(source), MemoryTarget) for source in sources)
        for job in self._stream(jobs, on_tiles):
            yield job.number, cast(MemoryTarget, job.stitcher.target).values

    def predict_to_file(
        self,
        image: Image,
        path: PathText,
        *,
        dtype: FileDtype = "float32",
        on_tiles: Callable[[int], None] | None = None,
        check: Callable[[Tensor], None] | None = None,
    ) -> Array:
        """Predict an image that is larger than memory.

        Rows of tiles are read and written one after the other. The file appears when it is
        complete.

        Args:
            image: Image [C, H, W]; only slices of it are read, so it may be a memory map.
            path: A ``.npy`` file, which is replaced if it exists.
            dtype: Data type of the file; integers hold values 0..1 as 0..255 or 0..65535.
            on_tiles: Function called after each batch with its number of tiles.
            check: Function called with rows [K, h, W] float32 before they are written, because
                integers would hide NaN and values outside 0..1.

        Returns:
            A read-only memory map [K, H, W] of the file.

        Raises:
            StoreSpaceError: The disk is full.
            DataError, BatchMemoryError, ConfigError: As for `predict`.
        """
        path = Path(path)
        check_choice("dtype", dtype, get_args(FileDtype))
        if path.suffix != ".npy":
            raise ConfigError(f"{path.name}: a prediction is written as a .npy file")
        source = open_source(0, image)
        with replacing_file(path) as fd:

            def open_target(shape: tuple[int, int, int]) -> NpyTarget:
                return NpyTarget(fd, shape, dtype, check)

            job = ImageJob(source, self._tiling_of(source), open_target)
            list(self._stream([job], on_tiles))
        values: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return values

    def _tiling_of(self, source: OpenedImage) -> Tiling:
        """Return the tiling of an image; the net's margin is measured at the first seam."""
        sides = self._tiling.sides_px
        height, width = source.size_px
        has_seams = height > sides[0] or width > sides[1]
        if self._knows_margin or not has_seams:
            return self._tiling
        channels = source.pixels.shape[0]
        multiple_px = self._tiling.multiple_px
        reach = find_reach_px(self._forward, channels, sides, multiple_px=multiple_px)
        self._knows_margin = True
        # a wider reach does not fit into the overlap, so the default margin stays
        if reach is not None and reach <= self._tiling.overlap_px // 2:
            self._tiling = dataclasses.replace(self._tiling, margin_px=reach)
        return self._tiling

    def _stream(
        self, jobs: Iterable[ImageJob], on_tiles: Callable[[int], None] | None
    ) -> Iterator[ImageJob]:
        with closing(InferenceThreads(self._threads)) as threads:
            runner = Runner(self._sizes, threads, self._forward.device)
            yield from TileStream(runner, self._forward, threads.count, on_tiles).run(jobs)


def _check_threads(threads: int, busy: str) -> None:
    """Refuse several inference threads if something already uses all cores.

    Args:
        threads: Number of threads.
        busy: Name of what uses all cores; empty if threads can work in parallel.
    """
    if threads < 1:
        raise ConfigError(f"threads={threads} must be at least 1")
    if threads > 1 and busy:
        raise ConfigError(
            f"threads={threads} has no effect on {busy}, which uses all cores by itself: remove it"
        )


def _limit_size(batch_size: int, min_size: int, max_size: int | None) -> BatchSize:
    """Return the size of the first batch, with its limits."""
    largest = batch_size if max_size is None else max_size
    if not 1 <= min_size <= batch_size <= largest:
        raise ConfigError(
            f"min_batch_size={min_size}, batch_size={batch_size}, max_batch_size={max_size}: need "
            "1 <= min <= batch <= max"
        )
    return BatchSize(batch_size, min_size, largest)


def _find_device(model: nn.Module) -> torch.device:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


class Arriving(NamedTuple):
    """Values of tiles in transfer to the CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None = None


@dataclass(slots=True)
class TileBatch:
    """A batch of tiles for a net.

    Attributes:
        forward: The net.
        kind: Kind of all tiles.
        tiles: [n, C, h, w] stored pixels, of which the first `jobs` are filled.
        on_tiles: Function called with the number of finished tiles; None calls nothing.
        jobs: Image of each filled tile.
    """

    forward: Forward
    kind: Kind
    tiles: Array
    on_tiles: Callable[[int], None] | None = None
    jobs: list[ImageJob] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def most(self) -> int:
        """Number of filled tiles."""
        return len(self.jobs)

    @property
    def is_full(self) -> bool:
        """True if all tiles are filled."""
        return len(self.jobs) == len(self.tiles)

    @property
    def advice(self) -> str:
        """Advice if the smallest micro-batch does not fit."""
        return ADVICE

    def describe(self, samples: int) -> str:
        """Return a text for a number of tiles."""
        return f"{counted(samples, 'tile')} of {self.kind}"

    def add(self, job: ImageJob, tile: Array) -> None:
        """Copy a tile into the batch."""
        self.tiles[len(self.jobs)] = tile
        self.jobs.append(job)

    def predict(self, start: int, stop: int, size: int) -> Arriving:
        """Return the values of some tiles."""
        tiles = self.tiles[start:stop]
        if self.forward.options.compile and len(tiles) < size:
            # Another length would trigger another compilation.
            zeros = np.zeros((size - len(tiles), *tiles.shape[1:]), tiles.dtype)
            tiles = np.concatenate((tiles, zeros))
        images = torch.from_numpy(tiles)
        if self.forward.device.type == "cuda":
            images = _lock_pages(images)
        return _send_back(self.forward(images)[: stop - start])

    def take(self, start: int, stop: int, values: Arriving) -> None:
        """Write values into their images once they have arrived."""
        if values.arrived is not None:
            values.arrived.synchronize()
        for job, tile in zip(self.jobs[start:stop], values.values, strict=True):
            job.stitcher.add(tile)
        if self.on_tiles is not None:
            self.on_tiles(stop - start)


def _lock_pages(images: Tensor) -> Tensor:
    """Return a page-locked copy, so that nothing waits for the copy to the device.

    If that fails, the copy is only slower.
    """
    try:
        return images.pin_memory()
    except RuntimeError:
        return images


def _send_back(values: Tensor) -> Arriving:
    if not values.is_cuda:
        return Arriving(values.cpu())
    host = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # The stream of the values' device, which may not be the current device.
    arrived.record(torch.cuda.current_stream(values.device))
    return Arriving(host, arrived)


class TileStream:
    """Fills common batches with the tiles of many images.

    Images whose tiles have one size share batches. Images are yielded in order. If an image would
    wait long for others to fill its batch, that batch is sent early.

    Args:
        runner: Runner that sends batches to the device.
        forward: The net.
        threads: Number of batches that the device computes at the same time.
        on_tiles: Function called with the number of finished tiles; None calls nothing.
    """

    def __init__(
        self,
        runner: Runner,
        forward: Forward,
        threads: int,
        on_tiles: Callable[[int], None] | None,
    ) -> None:
        self._runner = runner
        self._forward = forward
        self._threads = threads
        self._on_tiles = on_tiles
        self._waiting: deque[ImageJob] = deque()
        self._batches: dict[Kind, TileBatch] = {}

    def run(self, jobs: Iterable[ImageJob]) -> Iterator[ImageJob]:
        """Predict images.

        Yields:
            Each image when it is complete, in order.
        """
        for job in jobs:
            self._waiting.append(job)
            self._cut(job)
            while len(self._waiting) > self._most_waiting(job.kind):
                self._send_early()
                yield from self._take_complete()
            yield from self._take_complete()
        while self._waiting:
            self._send_early()
            yield from self._take_complete()

    def _most_waiting(self, kind: Kind) -> int:
        return _WAITING_IMAGES * self._threads * self._runner.size_of(kind).size

    def _cut(self, job: ImageJob) -> None:
        """Add the tiles of an image to its batch, and send the batch whenever it is full."""
        for tile in job.tiles:
            if job.kind not in self._batches:
                self._batches[job.kind] = self._open_batch(job.kind)
            batch = self._batches[job.kind]
            batch.add(job, tile)
            if batch.is_full:
                self._send(job.kind)

    def _open_batch(self, kind: Kind) -> TileBatch:
        tiles = np.empty((self._runner.size_of(kind).size, *kind.shape), kind.dtype)
        return TileBatch(self._forward, kind, tiles, self._on_tiles)

    def _send_early(self) -> None:
        """Send the batch of the first image, and of the next ones while threads are free.

        Then collect the micro-batch that was sent first.
        """
        for position, job in enumerate(self._waiting):
            if position > 0 and self._runner.is_busy:
                break
            if job.kind in self._batches and job in self._batches[job.kind].jobs:
                self._send(job.kind)
        self._runner.collect_first()

    def _send(self, kind: Kind) -> None:
        self._runner.run(self._batches.pop(kind))

    def _take_complete(self) -> Iterator[ImageJob]:
        while self._waiting and self._waiting[0].stitcher.complete:
            yield self._waiting.popleft()
