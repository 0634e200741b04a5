"""`Runner`: the loop of all predictions, which sends batches through a net in micro-batches.

A Trainer drives it, with the batches of a loader, or a `TileStream`, with the tiles of images.
"""

import gc
import logging
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lit_data.core.batch_form import cut_evenly
from lit_data.core.out_of_memory import make_memory_error, read_failure, repeat
from lit_data.core.size_search import SizeSearch
from lit_data.predict.forward import InferenceThreads

log = logging.getLogger(__name__)

GROW_AFTER = 8
"""Number of full batches that must succeed before a larger one is tried."""
AHEAD = 2
"""Batches for each of several threads: one is computed, and one or its values wait."""


def release_memory(device: torch.device) -> None:
    """Give back memory that nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class BatchSize(SizeSearch):
    """The size for samples of one kind.

    Attributes:
        alone: True if memory holds a batch only while nothing else is in progress.
    """

    alone: bool = False

    def count_batch(self, samples: int) -> None:
        """Count a successful batch of this many samples."""
        self.succeed(samples, samples)
        if self.clean >= GROW_AFTER:
            self.grow()

    def shrink(self, samples: int) -> bool:
        """Count a batch of this many samples that did not fit.

        Returns:
            True if there is a smaller size to try.
        """
        if samples <= self.min_size:
            return False  # not remembered: a single one may fail as others hold the memory
        self.fail(samples, 0)
        return True


class BatchSizes:
    """The batch size of each kind of sample, which persists between calls of the predictor.

    Args:
        start: Size of the first batch of each kind, with its limits.
        limit: Function that calls the net to reduce a new size of a kind to a memory limit; None
            leaves the limit to the device.
    """

    def __init__(
        self, start: BatchSize, limit: Callable[[BatchSize, Any], None] | None = None
    ) -> None:
        self._start = start
        self._limit = limit
        self._sizes: dict[Hashable, BatchSize] = {}

    def must_measure(self, kind: Hashable) -> bool:
        """Return True if `of` will call the net."""
        return self._limit is not None and kind not in self._sizes

    def of(self, kind: Hashable) -> BatchSize:
        """Return the size of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if kind not in self._sizes:
            size = replace(self._start)
            if self._limit is not None:
                self._limit(size, kind)
            self._sizes[kind] = size
        return self._sizes[kind]


class Batch(Protocol):
    """Samples that go through a net together if they fit into memory."""

    @property
    def kind(self) -> Hashable:
        """Signature of the samples; those of one kind need the same amount of memory."""

    def __len__(self) -> int:
        """Number of samples."""

    @property
    def most(self) -> int:
        """Number of samples that should go through the net at once, if they fit into memory."""

    def predict(self, start: int, stop: int, size: int) -> Any:  # noqa: ANN401 - what `take` gets
        """Return the net's outputs for some samples, called by an inference thread.

        Args:
            start: Index of the first sample.
            stop: Index after the last sample.
            size: Number of samples in the largest micro-batch of this kind.
        """

    def take(self, start: int, stop: int, values: Any) -> None:  # noqa: ANN401
        """Receive the results of `predict`, in the order of the samples."""

    def describe(self, samples: int) -> str:
        """Return a text for a number of samples, for messages."""

    @property
    def advice(self) -> str:
        """Advice if the smallest micro-batch does not fit."""


class Answer(NamedTuple):
    """Outputs of a net for a micro-batch, or the reason why it does not fit into memory."""

    values: Any = None
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Samples ``start:stop`` of a batch that were sent through the net together."""

    batch: Batch
    start: int
    stop: int
    answer: "Future[Answer]"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def has_failed(self) -> bool:
        """True if it is already known not to fit."""
        return self.answer.done() and bool(self.answer.result().failure)


Send = Callable[[Batch, int, int], MicroBatch]
"""Function that sends as many of the samples ``start:stop`` of a batch as fit at once."""


class Retry:
    """Samples that did not fit together, which go through the net in smaller micro-batches.

    The smallest number has two attempts, the second one after unused memory was released.

    Args:
        failed: Micro-batch that did not fit.
        size: Batch size of its kind.
        send: Function that sends samples.
        device: Device whose memory is released.

    Attributes:
        start: First sample that has not been predicted yet.
        is_last: True if no attempt follows the current one.
    """

    def __init__(
        self, failed: MicroBatch, size: BatchSize, send: Send, device: torch.device
    ) -> None:
        self.start = failed.start
        self.is_last = False
        self._batch = failed.batch
        self._stop = failed.stop
        self._sent = failed
        self._size = size
        self._send = send
        self._device = device

    def predict_first(self) -> MicroBatch:
        """Predict as many samples as fit at once.

        Raises:
            MemoryError: The samples do not fit.
        """
        self._sent = self._send(self._batch, self.start, self._stop)
        answer = self._sent.answer.result()
        if answer.failure:
            raise MemoryError(answer.failure)
        return self._sent

    def shrink(self, failure: str) -> None:
        """Give the next attempt fewer samples, or the last one more memory.

        Raises:
            BatchMemoryError: The smallest micro-batch does not fit.
        """
        release_memory(self._device)
        samples = self._batch.describe(len(self._sent))
        if self._size.shrink(len(self._sent)):
            self.is_last = False
            log.warning(
                "%s at once ran out of memory; continuing with %d", samples, self._size.size
            )
            return
        if self.is_last:
            raise make_memory_error(
                f"a batch of {samples} does not fit into memory ({failure}): {self._batch.advice}"
            )
        self.is_last = True


class Runner:
    """Sends batches through a net, and halves those that run out of memory.

    Later batches of a kind keep the size that works. Values of a batch are collected while the next
    ones are computed, on a GPU or in several inference threads.

    Args:
        sizes: Batch size of each kind of sample.
        threads: Threads that call the net.
        device: Device of the net.
    """

    def __init__(self, sizes: BatchSizes, threads: InferenceThreads, device: torch.device) -> None:
        self._sizes = sizes
        self._threads = threads
        self._device = device
        self._under_way: deque[MicroBatch] = deque()
        if threads.count > 1:
            self._most_under_way = AHEAD * threads.count
        elif device.type == "cuda":
            self._most_under_way = 1  # computed while the values before are on their way
        else:
            self._most_under_way = 0

    @property
    def is_busy(self) -> bool:
        """True if the largest allowed number of micro-batches is in progress."""
        return len(self._under_way) >= self._most_under_way

    def size_of(self, kind: Hashable) -> BatchSize:
        """Return the batch size of samples of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if self._sizes.must_measure(kind):  # calls the net, beside which nothing may be under way
            self.collect()
        return self._sizes.of(kind)

    def release(self) -> None:
        """Give back memory that nobody refers to."""
        release_memory(self._device)

    def run(self, batch: Batch) -> None:
        """Predict a batch; its last micro-batches may still be in progress afterwards.

        Raises:
            BatchMemoryError: The smallest micro-batch does not fit.
        """
        size = self.size_of(batch.kind)
        start = 0
        while start < len(batch):
            if size.alone:
                self.collect()
            micro_batch = self._send(batch, start, len(batch))
            start = micro_batch.stop
            self._under_way.append(micro_batch)
            must_collect_all = size.alone or micro_batch.has_failed
            self.collect(0 if must_collect_all else self._most_under_way)

    def collect(self, leave: int = 0) -> None:
        """Collect the values in progress, except those of the last `leave` micro-batches."""
        while len(self._under_way) > leave:
            micro_batch = self._under_way.popleft()
            failure = micro_batch.answer.result().failure
            if failure:
                self._predict_smaller(micro_batch, failure)
            else:
                self._take(micro_batch)

    def collect_first(self) -> None:
        """Collect the values of the micro-batch that was sent first."""
        self.collect(max(len(self._under_way) - 1, 0))

    def _predict_smaller(self, failed: MicroBatch, failure: str) -> None:
        """Predict samples that did not fit together, with nothing else in progress.

        Raises:
            BatchMemoryError: The smallest micro-batch does not fit.
        """
        # What is under way holds memory until it is over.
        wait([micro_batch.answer for micro_batch in self._under_way])
        size = self._sizes.of(failed.batch.kind)
        retry = Retry(failed, size, self._send, self._device)
        retry.shrink(failure)
        while retry.start < failed.stop:
            micro_batch = repeat(retry.predict_first, retry.shrink)
            # It may have fitted only now that the other threads wait.
            size.alone = size.alone or (retry.is_last and self._threads.count > 1)
            retry.is_last = False
            retry.start = micro_batch.stop
            self._take(micro_batch)

    def _send(self, batch: Batch, start: int, stop: int) -> MicroBatch:
        """Send as many of some samples as go through the net at once."""
        size = self._sizes.of(batch.kind).size
        _, samples = cut_evenly(stop - start, min(size, batch.most))[0]
        end = start + samples
        call = partial(_predict, batch, start, end, size)
        return MicroBatch(batch, start, end, self._threads.submit(call))

    def _take(self, micro_batch: MicroBatch) -> None:
        self._sizes.of(micro_batch.batch.kind).count_batch(len(micro_batch))
        values = micro_batch.answer.result().values
        micro_batch.batch.take(micro_batch.start, micro_batch.stop, values)


def _predict(batch: Batch, start: int, stop: int, size: int) -> Answer:
    """Call the net; a memory error becomes text, because it would keep the call's tensors alive."""
    try:
        return Answer(batch.predict(start, stop, size))
    except Exception as error:
        return Answer(failure=read_failure(error))
