"""Batches go through the net, in smaller pieces where memory runs out; every tile comes back once and in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_data.errors import BatchMemoryError
from lit_data.inference.batch_size_table import ADVICE, AHEAD, BatchSize, BatchSizes, release_memory
from lit_data.inference.batches import ImageJob, Kind, TileBatch
from lit_data.inference.cpu_parallel import Lanes
from lit_data.inference.forward import Forward
from lit_data.out_of_memory import is_out_of_memory


@dataclass(frozen=True, slots=True)
class Piece:
    """Tiles of a batch that go through the net together, from `start` to before `stop`."""

    batch: TileBatch
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tiles(self) -> NDArray[Any]:
        """[n, C, h, w] as stored."""
        return self.batch.tiles[self.start : self.stop]

    @property
    def jobs(self) -> Sequence[ImageJob]:
        """For each tile its image."""
        return self.batch.jobs[self.start : self.stop]

    def part(self, start: int, tiles: int) -> "Piece":
        """At most so many of its tiles, from `start` on."""
        return Piece(self.batch, start, min(start + tiles, self.stop))


class Answer(NamedTuple):
    """What came of a piece: values on their way to the CPU, or why they do not fit into memory."""

    values: Tensor | None
    arrived: torch.cuda.Event | None = None
    failure: str = ""


class Flight(NamedTuple):
    """A piece under way."""

    piece: Piece
    answer: "Future[Answer]"

    @property
    def failed(self) -> bool:
        """Whether it is known already that it does not fit."""
        return self.answer.done() and self.answer.result().values is None


class Runner:
    """Sends batches to the device.

    The values of a batch are put into their images while the next ones are computed: on a GPU, or
    in several lanes.

    Args:
        forward: The net.
        sizes: How many tiles at once.
        lanes: Where the net is called.
        on_tiles: Called with the number of tiles that came back.
    """

    def __init__(
        self, forward: Forward, sizes: BatchSizes, lanes: Lanes, on_tiles: Callable[[int], None]
    ) -> None:
        self._forward, self._sizes, self._lanes, self._on_tiles = forward, sizes, lanes, on_tiles
        self._flights: deque[Flight] = deque()
        self._depth = AHEAD * lanes.count if lanes.count > 1 else int(forward.device.type == "cuda")

    @property
    def busy(self) -> bool:
        """Whether as much is under way as may be."""
        return len(self._flights) >= self._depth

    def size_of(self, kind: Kind) -> BatchSize:
        """The batch size of tiles of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if self._sizes.must_measure(kind):
            self.land()
        return self._sizes.of(kind)

    def run(self, batch: TileBatch) -> None:
        """Predict the tiles of a batch; those of the last pieces may still be under way.

        Raises:
            BatchMemoryError: The smallest batch does not fit.
        """
        size, start = self.size_of(batch.kind), 0
        whole = Piece(batch, 0, len(batch.jobs))
        while start < whole.stop:
            if size.alone:
                self.land()
            piece = whole.part(start, size.size)
            flight = Flight(piece, self._submit(piece, size.size))
            self._flights.append(flight)
            self.land(0 if size.alone or flight.failed else self._depth)
            start = piece.stop

    def land(self, leave: int = 0) -> None:
        """Put what is under way into its images, but for the last so many pieces."""
        while len(self._flights) > leave:
            flight = self._flights.popleft()
            answer = flight.answer.result()
            if answer.values is None:
                self._retry(flight.piece, answer.failure)
            else:
                self._take(flight.piece, answer.values, answer.arrived)

    def land_one(self) -> None:
        """The same for the piece that was sent first, if there is one."""
        self.land(max(len(self._flights) - 1, 0))

    def _retry(self, piece: Piece, failure: str) -> None:
        """Predict a piece that did not fit, in smaller ones and with nothing else under way."""
        wait([flight.answer for flight in self._flights])
        size, start, failed, again = (
            self._sizes.of(piece.batch.kind),
            piece.start,
            len(piece),
            False,
        )
        while start < piece.stop:
            if failed:
                release_memory(self._forward.device)
                smallest = not size.fail(failed)
                if smallest and again:
                    raise BatchMemoryError(
                        f"a batch of {failed} tiles of {piece.batch.kind} does not fit into memory ({failure}): "
                        f"{ADVICE}"
                    )
                again = smallest  # a second chance, with what was released
            part = piece.part(start, size.size)
            values, arrived, failure = self._submit(part, size.size).result()
            if values is None:
                failed = len(part)
                continue
            size.alone = size.alone or (again and self._lanes.count > 1)
            self._take(part, values, arrived)
            start, failed, again = part.stop, 0, False

    def _take(self, piece: Piece, values: Tensor, arrived: torch.cuda.Event | None) -> None:
        self._sizes.of(piece.batch.kind).succeed(len(piece))
        if arrived is not None:
            arrived.synchronize()
        for job, tile in zip(piece.jobs, values, strict=True):
            job.stitcher.add(tile)
        self._on_tiles(len(piece))

    def _submit(self, piece: Piece, size: int) -> "Future[Answer]":
        return self._lanes.submit(partial(_attempt, self._forward, piece, size))


def _attempt(forward: Forward, piece: Piece, size: int) -> Answer:
    """Predict some tiles; what was out of memory is text by the end, as an error would keep its tensors alive."""
    try:
        tiles = piece.tiles
        if forward.options.compile and len(tiles) < size:
            tiles = _fill_up(tiles, size)  # another length would be compiled again
        images = torch.from_numpy(tiles)
        return _send_back(
            forward(_lock(images) if forward.device.type == "cuda" else images)[: len(piece)]
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Answer(None, failure=str(error).partition("\n")[0])


def _lock(images: Tensor) -> Tensor:
    """A page-locked copy, so that nobody waits for the one to the device; where that fails, it is just slower."""
    try:
        return images.pin_memory()
    except RuntimeError:
        return images


def _send_back(values: Tensor) -> Answer:
    if not values.is_cuda:
        return Answer(values.cpu())
    host = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(
        torch.cuda.current_stream(values.device)
    )  # which may not be that of the current device
    return Answer(host, arrived)


def _fill_up(tiles: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate((tiles, np.zeros((size - len(tiles), *tiles.shape[1:]), tiles.dtype)))


_WAITING: Final = 2
"""Images that may wait for one before them, in batches of single tiles for each lane."""


class TileStream:
    """Shares batches among images.

    Images whose tiles have one size fill batches together. An image is handed out when all before
    it are; so that none waits long for a batch that others do not fill, such a batch goes early.

    Args:
        runner: Sends batches to the device.
        lanes: How many batches the device computes at one time.
    """

    def __init__(self, runner: Runner, lanes: int) -> None:
        self._runner, self._lanes = runner, lanes
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
            while len(self._waiting) > _WAITING * self._lanes * self._runner.size_of(job.kind).size:
                self._hurry()
                yield from self._take_complete()
            yield from self._take_complete()
        while self._waiting:
            self._hurry()
            yield from self._take_complete()

    def _cut(self, job: ImageJob) -> None:
        for tile in job.tiles:
            if job.kind not in self._batches:
                self._batches[job.kind] = TileBatch.make(
                    job.kind, self._runner.size_of(job.kind).size
                )
            batch = self._batches[job.kind]
            batch.add(job, tile)
            if batch.full:
                self._send(job.kind)

    def _hurry(self) -> None:
        """Send what the first image waits for, and the next ones while lanes are free; take one piece back."""
        for place, job in enumerate(self._waiting):
            if place and self._runner.busy:
                break
            if job.kind in self._batches and job in self._batches[job.kind].jobs:
                self._send(job.kind)
        self._runner.land_one()

    def _send(self, kind: Kind) -> None:
        self._runner.run(self._batches.pop(kind))

    def _take_complete(self) -> Iterator[ImageJob]:
        while self._waiting and self._waiting[0].stitcher.complete:
            yield self._waiting.popleft()
