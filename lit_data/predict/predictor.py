"""`TiledPredictor`: a value for every pixel of images of any size, from a net that takes tiles."""

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
"""Images that may wait for one before them, in batches of single tiles for each thread."""


class TiledPredictor:
    """Cuts images into overlapping tiles, predicts them in common batches, and stitches values.

    Where the overlap is at least the net's receptive field, the values are those that the net gives
    for the whole image, to the rounding of float32, see `lit_inspect.tiles.weigh_tiles`. A
    side shorter than a tile is filled up to a multiple of `round_px` by repeating its edge, and cut
    back.

    If memory runs out, the batch is predicted in halves and the size that works is kept for later
    calls. The model goes to `device` (and to the format of `channels_last`) and stays there; in
    every other way it is as before when no batch is under way, its training mode too. One predictor
    may serve one thread at a time.

    Args:
        model: From [B, C, h, w] float32 to [B, K, h, w]. Whole numbers come as 0..1, floats as they
            are.
        tile_px: Tile size, one number or (height, width).
        overlap_px: Least number of pixels that neighboring tiles share.
        blend: `constant` takes a pixel from the tile in which it is farthest from a seam,
            `gaussian` averages by the distance from the middle.
        margin_px: Pixels next to a seam that count nothing. None: for `constant` half of the
            overlap, for `gaussian` as far as the net sees (measured at the first image that has
            seams, see `measure_reach_px`), or a quarter of the overlap if half does not hold that.
        multiple_px: Total stride of the net, if it has one: tiles begin at multiples of it.
        round_px: See above; None: an eighth of a tile. 1 gives each size of small images batches of
            its own.
        batch_size: Tiles of the first batch.
        min_batch_size: If so many tiles do not fit, there is a `BatchMemoryError`.
        max_batch_size: The batch grows up to this while batches go well, never to a size that
            failed. None: batch_size.
        memory_limit_bytes: Memory of the device for weights and the batches under way; batches are
            made smaller by it.
        precision: `bf16` and `fp16` by autocast.
        channels_last: Memory format of weights and tiles.
        compile: By `torch.compile`, at the first batch of a size; all tiles then have the full
            size. Needs a C++ compiler, on a GPU Triton.
        augment: Average over 4 (`flips`) or 8 (`d4`, flips and quarter turns) sides. For values
            without a direction.
        activation: `sigmoid` or `softmax` over the K channels, before anything is averaged.
        value_range: Pixels (low, high) that become 0 and 1; None: the range of the dtype.
        threads: Inference threads, which call the net side by side, each with its part of the
            cores; for the CPU, and not for a compiled net. The net must bear that: one that changes
            itself in `forward` does not.
        readers: Threads that load images, if they must be loaded.
        device: Where the net computes; None: where it is.

    Raises:
        ConfigError: Options are unknown or do not fit each other.
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
        if compile:  # for tiles of one size, to which smaller ones are filled up
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
            images: [C, H, W] each: arrays, tensors, functions that load one when its turn comes, or
                a bank.
            on_bad: Called with the number of an image that is bad, which is then left out; None
                raises.
            on_tiles: Called after each batch with its number of tiles.

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
            image: [C, H, W]; only slices of it are read, so it may be a memory map.
            path: A ``.npy`` file, which is replaced if it exists.
            dtype: Of the file; whole numbers hold values 0..1 as 0..255 or 0..65535.
            on_tiles: Called after each batch with its number of tiles.
            check: Called with rows [K, h, W] float32 before they are written; whole numbers would
                hide NaN and what goes beyond 0..1.

        Returns:
            [K, H, W], a read-only memory map of the file.

        Raises:
            StoreSpaceError: The disk has no room.
            DataError, BatchMemoryError, ConfigError: As `predict`.
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
        """Return the rules for an image; the margin of the net is measured at the first seam."""
        sides = self._tiling.sides_px
        height, width = source.size_px
        has_seams = height > sides[0] or width > sides[1]
        if self._knows_margin or not has_seams:
            return self._tiling
        channels = source.pixels.shape[0]
        multiple_px = self._tiling.multiple_px
        reach = find_reach_px(self._forward, channels, sides, multiple_px=multiple_px)
        self._knows_margin = True
        # a wider reach has no room in the overlap: the default margin stays
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
    """Refuse several inference threads for what uses all cores by itself.

    Args:
        threads: Number of threads.
        busy: Name of what does; empty where threads can work side by side.
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
    """Values of tiles on their way to the CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None = None


@dataclass(slots=True)
class TileBatch:
    """Tiles on their way through a net.

    Attributes:
        forward: The net.
        kind: Of all of them.
        tiles: [n, C, h, w] as stored, of which the first are filled.
        on_tiles: Called with the number of tiles that came back; None: nobody is.
        jobs: For each tile that is there the image it belongs to.
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
        """All of the tiles."""
        return len(self.jobs)

    @property
    def is_full(self) -> bool:
        """True if there is no room left."""
        return len(self.jobs) == len(self.tiles)

    @property
    def advice(self) -> str:
        """Cure where the smallest micro-batch does not fit, in words."""
        return ADVICE

    def describe(self, samples: int) -> str:
        """Return the words for so many tiles."""
        return f"{counted(samples, 'tile')} of {self.kind}"

    def add(self, job: ImageJob, tile: Array) -> None:
        """Copy a tile in."""
        self.tiles[len(self.jobs)] = tile
        self.jobs.append(job)

    def predict(self, start: int, stop: int, size: int) -> Arriving:
        """Return the values of some tiles."""
        tiles = self.tiles[start:stop]
        if self.forward.options.compile and len(tiles) < size:
            # Another length would be compiled again.
            zeros = np.zeros((size - len(tiles), *tiles.shape[1:]), tiles.dtype)
            tiles = np.concatenate((tiles, zeros))
        images = torch.from_numpy(tiles)
        if self.forward.device.type == "cuda":
            images = _lock_pages(images)
        return _send_back(self.forward(images)[: stop - start])

    def take(self, start: int, stop: int, values: Arriving) -> None:
        """Put values into their images, once they have arrived."""
        if values.arrived is not None:
            values.arrived.synchronize()
        for job, tile in zip(self.jobs[start:stop], values.values, strict=True):
            job.stitcher.add(tile)
        if self.on_tiles is not None:
            self.on_tiles(stop - start)


def _lock_pages(images: Tensor) -> Tensor:
    """Return a page-locked copy, so that nobody waits for the one to the device.

    Where that fails the copy is just slower.
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

    Images whose tiles have one size fill batches together. An image is yielded when all before it
    are; so that none waits long for a batch that others do not fill, such a batch goes early.

    Args:
        runner: Sends batches to the device.
        forward: The net.
        threads: Number of batches that the device computes at one time.
        on_tiles: Called with the number of tiles that came back; None: nobody is.
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
        """Add the tiles of an image to its batch, and send that whenever it is full."""
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

        Then the micro-batch that was sent first is taken back.
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
