"""Runs of batches through the net, in micro-batches that memory holds."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.errors import first_line
from lit_data.inference.batch_size_table import ADVICE, AHEAD, BatchSize, BatchSizes, release_memory
from lit_data.inference.batches import ImageJob, Kind, TileBatch
from lit_data.inference.forward import Forward, InferenceThreads
from lit_data.out_of_memory import is_out_of_memory, make_memory_error
from lit_data.types import Array

_WAITING_IMAGES = 2
"""Images that may wait for one before them, in batches of single tiles for each thread."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tiles of a batch that go through the net together, from `start` to before `stop`."""

    batch: TileBatch
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> Kind:
        """Shape and dtype of the tiles."""
        return self.batch.kind

    @property
    def tiles(self) -> Array:
        """[n, C, h, w] as stored."""
        return self.batch.tiles[self.start : self.stop]

    @property
    def jobs(self) -> Sequence[ImageJob]:
        """For each tile its image."""
        return self.batch.jobs[self.start : self.stop]

    def split(self, tiles: int) -> tuple["MicroBatch", "MicroBatch"]:
        """Return its first tiles, at most so many, and the others."""
        middle = min(self.start + tiles, self.stop)
        return MicroBatch(self.batch, self.start, middle), MicroBatch(self.batch, middle, self.stop)


class Answer(NamedTuple):
    """Values of a micro-batch on their way to the CPU, or why it does not fit into memory."""

    values: Tensor | None
    arrived: torch.cuda.Event | None = None
    failure: str = ""


class Submission(NamedTuple):
    """A micro-batch that was sent to the net."""

    micro_batch: MicroBatch
    answer: "Future[Answer]"

    @property
    def has_failed(self) -> bool:
        """True if it is known already that it does not fit."""
        return self.answer.done() and self.answer.result().values is None


class Runner:
    """Sends batches to the device.

    The values of a batch are put into their images while the next ones are computed: on a GPU, or
    in several inference threads.

    Args:
        forward: The net.
        sizes: Tiles at once, for each kind of tile.
        threads: Threads that call the net.
        on_tiles: Called with the number of tiles that came back; None: nobody is.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: BatchSizes,
        threads: InferenceThreads,
        on_tiles: Callable[[int], None] | None,
    ) -> None:
        self._forward = forward
        self._sizes = sizes
        self._threads = threads
        self._on_tiles = on_tiles
        self._submissions: deque[Submission] = deque()
        if threads.count > 1:
            self._most_submissions = AHEAD * threads.count
        elif forward.device.type == "cuda":
            self._most_submissions = 1  # computed while the values before are on their way
        else:
            self._most_submissions = 0

    @property
    def is_busy(self) -> bool:
        """True if as much is under way as may be."""
        return len(self._submissions) >= self._most_submissions

    def size_of(self, kind: Kind) -> BatchSize:
        """Return the batch size of tiles of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if self._sizes.must_measure(kind):  # calls the net, beside which nothing may be under way
            self.collect()
        return self._sizes.of(kind)

    def run(self, batch: TileBatch) -> None:
        """Predict the tiles of a batch; those of the last micro-batches may still be under way.

        Raises:
            BatchMemoryError: The smallest batch does not fit.
        """
        size = self.size_of(batch.kind)
        left = MicroBatch(batch, 0, len(batch.jobs))
        while len(left):
            if size.alone:
                self.collect()
            micro_batch, left = left.split(size.size)
            submission = Submission(micro_batch, self._submit(micro_batch, size.size))
            self._submissions.append(submission)
            must_collect_all = size.alone or submission.has_failed
            self.collect(0 if must_collect_all else self._most_submissions)

    def collect(self, leave: int = 0) -> None:
        """Put the values under way into their images, but for the last so many micro-batches."""
        while len(self._submissions) > leave:
            micro_batch, pending = self._submissions.popleft()
            answer = pending.result()
            if answer.values is None:
                self._predict_smaller(micro_batch, answer.failure)
            else:
                self._take(micro_batch, answer)

    def collect_first(self) -> None:
        """Put the values of the micro-batch that was sent first into their images."""
        self.collect(max(len(self._submissions) - 1, 0))

    def _predict_smaller(self, failed: MicroBatch, failure: str) -> None:
        """Predict a micro-batch that did not fit, in smaller ones with nothing else under way."""
        # what is under way holds memory until it is over
        wait([submission.answer for submission in self._submissions])
        size = self._sizes.of(failed.kind)
        micro_batch, answer = self._shrink(failed, failure)
        while True:
            self._take(micro_batch, answer)
            left = MicroBatch(failed.batch, micro_batch.stop, failed.stop)
            if not len(left):
                return
            micro_batch, _ = left.split(size.size)
            answer = self._submit(micro_batch, size.size).result()
            if answer.values is None:
                micro_batch, answer = self._shrink(micro_batch, answer.failure)

    def _shrink(self, failed: MicroBatch, failure: str) -> tuple[MicroBatch, Answer]:
        """Predict the first tiles of a micro-batch that did not fit, fewer each time.

        The smallest number has two attempts, the second one with all that could be released.

        Returns:
            The tiles that fitted, and their values.

        Raises:
            BatchMemoryError: The smallest batch does not fit.
        """
        size = self._sizes.of(failed.kind)
        is_second_attempt = False
        while True:
            release_memory(self._forward.device)
            can_shrink = size.shrink(len(failed))
            if not can_shrink and is_second_attempt:
                raise make_memory_error(
                    f"a batch of {len(failed)} tiles of {failed.kind} does not fit into memory "
                    f"({failure}): {ADVICE}"
                )
            is_second_attempt = not can_shrink
            micro_batch, _ = failed.split(size.size)
            answer = self._submit(micro_batch, size.size).result()
            if answer.values is not None:
                break
            failed = micro_batch
            failure = answer.failure
        # It fitted only now that the other threads wait.
        size.alone = size.alone or (is_second_attempt and self._threads.count > 1)
        return micro_batch, answer

    def _take(self, micro_batch: MicroBatch, answer: Answer) -> None:
        """Put values into their images, once they have arrived."""
        assert answer.values is not None
        self._sizes.of(micro_batch.kind).count_batch(len(micro_batch))
        if answer.arrived is not None:
            answer.arrived.synchronize()
        for job, tile in zip(micro_batch.jobs, answer.values, strict=True):
            job.stitcher.add(tile)
        if self._on_tiles is not None:
            self._on_tiles(len(micro_batch))

    def _submit(self, micro_batch: MicroBatch, size: int) -> "Future[Answer]":
        return self._threads.submit(partial(_predict, self._forward, micro_batch, size))


def _predict(forward: Forward, micro_batch: MicroBatch, size: int) -> Answer:
    """Predict some tiles.

    An error of memory becomes text, as it would keep the tensors of the attempt alive.
    """
    try:
        tiles = micro_batch.tiles
        if forward.options.compile and len(tiles) < size:
            # Another length would be compiled again.
            zeros = np.zeros((size - len(tiles), *tiles.shape[1:]), tiles.dtype)
            tiles = np.concatenate((tiles, zeros))
        images = torch.from_numpy(tiles)
        if forward.device.type == "cuda":
            images = _lock_pages(images)
        return _send_back(forward(images)[: len(micro_batch)])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Answer(None, failure=first_line(error))


def _lock_pages(images: Tensor) -> Tensor:
    """Return a page-locked copy, so that nobody waits for the one to the device.

    Where that fails the copy is just slower.
    """
    try:
        return images.pin_memory()
    except RuntimeError:
        return images


def _send_back(values: Tensor) -> Answer:
    if not values.is_cuda:
        return Answer(values.cpu())
    host = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # The stream of the values' device, which may not be the current device.
    arrived.record(torch.cuda.current_stream(values.device))
    return Answer(host, arrived)


class TileStream:
    """Fills common batches with the tiles of many images.

    Images whose tiles have one size fill batches together. An image is yielded when all before it
    are; so that none waits long for a batch that others do not fill, such a batch goes early.

    Args:
        runner: Sends batches to the device.
        threads: Number of batches that the device computes at one time.
    """

    def __init__(self, runner: Runner, threads: int) -> None:
        self._runner = runner
        self._threads = threads
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
                size = self._runner.size_of(job.kind).size
                self._batches[job.kind] = TileBatch.make(job.kind, size)
            batch = self._batches[job.kind]
            batch.add(job, tile)
            if batch.full:
                self._send(job.kind)

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
