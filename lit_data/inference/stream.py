"""From images to finished images, in order and with bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from lit_data.inference.batches import Job, Kind, TileBatch
from lit_data.inference.runner import BatchSizes, Runner

_WAITING: Final = 2
"""Images that may wait for one before them, in batches of single tiles."""


class TileStream:
    """Shares batches among images.

    Images whose tiles have one size fill batches together. An image is handed out when all before it are; so that none
    waits long for a batch that others do not fill, such a batch goes early.

    Args:
        runner: Sends batches to the device.
        sizes: How large they are.
    """

    def __init__(self, runner: Runner, sizes: BatchSizes) -> None:
        self._runner, self._sizes = runner, sizes
        self._waiting: deque[Job] = deque()
        self._batches: dict[Kind, TileBatch] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Predict images.

        Yields:
            Each image when it is complete, in order.
        """
        for job in jobs:
            self._waiting.append(job)
            self._cut(job)
            while len(self._waiting) > _WAITING * self._sizes.of(job.kind).size:
                self._hurry()
                yield from self._take_complete()
            yield from self._take_complete()
        while self._waiting:
            self._hurry()
            yield from self._take_complete()

    def _cut(self, job: Job) -> None:
        for tile in job.tiles:
            if job.kind not in self._batches:
                self._batches[job.kind] = TileBatch.make(job.kind, self._sizes.of(job.kind).size)
            batch = self._batches[job.kind]
            batch.add(job, tile)
            if batch.full:
                self._send(job.kind)

    def _hurry(self) -> None:
        """Finish the image for which the others wait."""
        self._runner.land()
        first = self._waiting[0]
        if not first.stitcher.complete:
            self._send(first.kind)
            self._runner.land()

    def _send(self, kind: Kind) -> None:
        self._runner.run(self._batches.pop(kind))

    def _take_complete(self) -> Iterator[Job]:
        while self._waiting and self._waiting[0].stitcher.complete:
            yield self._waiting.popleft()
