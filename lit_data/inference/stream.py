"""From images to finished images, in order and with bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from lit_data.inference.batches import Job, Kind, TileBatch
from lit_data.inference.runner import Runner

_WAITING: Final = 2
"""Images that may wait for one before them, in batches of single tiles for each lane."""


class TileStream:
    """Shares batches among images.

    Images whose tiles have one size fill batches together. An image is handed out when all before it are; so that none
    waits long for a batch that others do not fill, such a batch goes early.

    Args:
        runner: Sends batches to the device.
        lanes: How many batches the device computes at one time.
    """

    def __init__(self, runner: Runner, lanes: int) -> None:
        self._runner, self._lanes = runner, lanes
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
            while len(self._waiting) > _WAITING * self._lanes * self._runner.size_of(job.kind).size:
                self._hurry()
                yield from self._take_complete()
            yield from self._take_complete()
        while self._waiting:
            self._hurry()
            yield from self._take_complete()

    def _cut(self, job: Job) -> None:
        for tile in job.tiles:
            if job.kind not in self._batches:
                self._batches[job.kind] = TileBatch.make(job.kind, self._runner.size_of(job.kind).size)
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

    def _take_complete(self) -> Iterator[Job]:
        while self._waiting and self._waiting[0].stitcher.complete:
            yield self._waiting.popleft()
