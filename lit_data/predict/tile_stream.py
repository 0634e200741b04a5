"""Tiles of many images in common batches, on their way through a net and back into their images."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import Array
from lit_data.predict.batch_size_table import ADVICE
from lit_data.predict.batches import ImageJob, Kind
from lit_data.predict.forward import Forward
from lit_data.predict.runner import Runner

_WAITING_IMAGES = 2
"""Images that may wait for one before them, in batches of single tiles for each thread."""


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
        return f"{samples} tiles of {self.kind}"

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
