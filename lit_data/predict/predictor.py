"""`TiledPredictor`: a value for every pixel of images of any size, from a net that takes tiles."""

import dataclasses
import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, StoreSpaceError, show_path
from lit_data.core.files import replacing
from lit_data.core.grid import pair_px
from lit_data.core.types import Array, Bytes, Floats, PathText, Size
from lit_data.images.store.files import reserve, write_all
from lit_data.predict.batch_size_table import BatchSize, BatchSizes, MemoryLimit, find_reach_px
from lit_data.predict.batches import (
    Image,
    ImageJob,
    Images,
    MemoryTarget,
    OpenedImage,
    open_source,
    open_sources,
)
from lit_data.predict.forward import (
    Activation,
    Augment,
    Forward,
    ForwardOptions,
    InferenceThreads,
    Precision,
)
from lit_data.predict.runner import Runner
from lit_data.predict.tile_stream import TileStream
from lit_data.predict.tiling import Tiling
from lit_inspect import regions
from lit_inspect.regions import Defect
from lit_inspect.tiles import Blend

FileDtype = Literal["float32", "float16", "uint8", "uint16"]

_CHUNK_BYTES = 2**20
"""Rows that are encoded at once, which stay in the processor's cache."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NpyTarget:
    """Rows of a ``.npy`` file, each written to its place.

    The rows are written and not mapped, because a full disk then is an error and not a signal that
    kills the process.

    Args:
        fd: A new, empty file.
        shape: [K, H, W].
        dtype: Of the file; whole numbers hold values 0..1 as 0..255 or 0..65535.
        check: Called with rows before they are encoded.
    """

    def __init__(
        self,
        fd: int,
        shape: tuple[int, int, int],
        dtype: FileDtype,
        check: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._fd = fd
        self._check = check
        self._shape = shape
        self._dtype = np.dtype(dtype)
        header = io.BytesIO()
        fields = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(header, fields)
        self._offset = header.tell()
        # so that a full disk shows before anything is predicted
        reserve(fd, self._offset + int(np.prod(shape)) * self._dtype.itemsize)
        write_all(fd, memoryview(header.getvalue()))

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows."""
        if self._check is not None:
            self._check(values)
        rows_at_once = max(1, _CHUNK_BYTES // values[0, 0].nbytes)
        for channel, rows in enumerate(values):
            for first in range(0, len(rows), rows_at_once):
                encoded = encode(rows[first : first + rows_at_once], self._dtype)
                row = channel * self._shape[1] + top_px + first
                offset = self._offset + row * encoded[0].nbytes
                _write_at(self._fd, encoded.data.cast("B"), offset)


@contextmanager
def replacing_file(path: Path) -> Iterator[int]:
    """Open a new file that replaces `path` at the end; after an error nothing is left of it.

    Yields:
        A descriptor open for writing.

    Raises:
        StoreSpaceError: The disk, the quota or the largest allowed file is too small.
    """
    try:
        with replacing(path) as file:
            yield file.fileno()
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        free = decimal(shutil.disk_usage(path.parent).free)
        raise StoreSpaceError(
            f"{show_path(path)}: no room for the prediction ({error.strerror}): free are "
            f"{free}; choose dtype=float16 or uint8, or another folder"
        ) from error


def encode(values: Tensor, dtype: np.dtype[Any]) -> Array:
    """Return values in the dtype of a file; for whole numbers 0..1 becomes 0..largest, clipped."""
    if dtype.kind == "f":
        return values.to(getattr(torch, dtype.name)).contiguous().numpy()
    # NaN becomes 0, as whole numbers have none
    largest = float(np.iinfo(dtype.name).max)
    return values.nan_to_num(0).clamp(0, 1).mul_(largest).round_().numpy().astype(dtype)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:  # a call may write a part only
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset = offset + count


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
        overlap_px: Least number of pixels that neighbouring tiles share.
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
        if threads < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        if threads > 1 and (compile or net_device.type != "cpu"):
            target = "what is compiled" if compile else str(net_device)
            raise ConfigError(
                f"threads={threads} is not for {target}, which uses all cores by itself: leave it "
                "out"
            )
        self._readers = readers
        self._threads = threads
        sides = pair_px("tile_px", tile_px)
        if compile:  # for tiles of one size, to which smaller ones are filled up
            round_px = max(sides)
        self._tiling = Tiling(sides, overlap_px, margin_px, blend, multiple_px, round_px)
        self._knows_margin = blend == "constant" or margin_px is not None
        largest = batch_size if max_batch_size is None else max_batch_size
        if not 1 <= min_batch_size <= batch_size <= largest:
            raise ConfigError(
                f"min_batch_size={min_batch_size}, batch_size={batch_size}, "
                f"max_batch_size={max_batch_size}: need 1 <= min <= batch <= max"
            )
        start = BatchSize(batch_size, min_batch_size, largest)
        options = ForwardOptions(
            precision, channels_last, compile, augment, activation, value_range
        )
        self._forward = Forward(model, net_device, options)
        limit = None
        if memory_limit_bytes is not None:
            limit = MemoryLimit(self._forward, memory_limit_bytes, threads)
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


def _find_device(model: nn.Module) -> torch.device:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def find_defects(
    probability: Floats,
    *,
    threshold: float = 0.5,
    min_area_px: int = 1,
    kinds: Bytes | None = None,
) -> list[Defect]:
    """Find regions of pixels (8-connected) that reach a threshold.

    Args:
        probability: [H, W] float32 in 0..1.
        threshold: Least probability of a pixel.
        min_area_px: Smaller regions are left out.
        kinds: [H, W] number of the class of each pixel.

    Returns:
        The regions by falling score.
    """
    return regions.find_defects(
        [(probability, kinds)],
        threshold=threshold,
        min_area_px=min_area_px,
        classes=0 if kinds is None else int(kinds.max()),
    )


def drop_small(classes: Bytes, least_px: int) -> Bytes:
    """Return numbers of classes [H, W] without the regions of fewer pixels."""
    import cv2

    left, top, width, height = cv2.boundingRect(classes)
    part = slice(top, top + height), slice(left, left + width)
    large_ones = np.zeros_like(classes)
    if not width:
        return large_ones
    marked = classes[part]
    _, regions, stats, _ = cv2.connectedComponentsWithStats((marked > 0).astype(np.uint8))
    is_large = stats[:, cv2.CC_STAT_AREA] >= least_px
    large_ones[part] = marked * is_large[regions]
    return large_ones
