"""The batch of the current step, its micro-batches, and the merging of the values they log."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_data.callbacks.adaptive.merge import mean
from lit_data.callbacks.adaptive.snapshot import Restore
from lit_data.core.batch_form import cut_evenly
from lit_data.core.lightning_internals import Metric, Results, show_value, shown_value
from lit_data.core.size_search import SizeSearch
from lit_data.core.types import COUNT_SUFFIX

T = TypeVar("T")
Cut = Callable[[Any, int, int], Any]
"""Function that returns the samples ``start:stop`` of a batch."""


def describe_shapes(batch: Any, samples: int) -> str:  # noqa: ANN401 - any nesting
    """Return shapes and types of the tensors of one sample: ``image 3x128x128 uint8``.

    They are part of messages, and the key of a search.

    Args:
        batch: Batch of any nesting.
        samples: Number of samples in the batch; ragged values and those of another length are left
            out.
    """
    descriptions = []
    for name, tensor in _walk(batch, ""):
        if tensor.ndim and len(tensor) == samples:
            descriptions.append(_describe_sample(name, tensor.shape[1:], tensor.dtype))
    return ", ".join(descriptions)


@functools.lru_cache(maxsize=256)  # each step asks for the same few
def _describe_sample(name: str, shape: torch.Size, dtype: torch.dtype) -> str:
    sizes = "x".join(map(str, shape)) or "1"
    return f"{name} {sizes} {str(dtype).removeprefix('torch.')}"


def _walk(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Yield the tensors of a batch of any nesting with their names, without ragged ones."""
    if isinstance(batch, Tensor):
        yield name or "tensor", batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            if f"{key}{COUNT_SUFFIX}" not in batch:
                yield from _walk(part, str(key))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
        yield from _walk(values, name)
    elif isinstance(batch, list | tuple):
        for number, part in enumerate(batch):
            yield from _walk(part, f"{name}[{number}]")


@dataclass(slots=True)
class ActiveBatch:
    """One batch between its arrival and the end of its step.

    Attributes:
        host: The batch before its transfer.
        samples: Number of samples in the batch.
        index: Number of the batch.
        key: Stage and shapes of the batch.
        search: Search for the size of such batches.
        move: Function that transfers a batch or a micro-batch to the device and augments it.
        cut: Function that cuts the samples ``start:stop`` out of `host`.
        is_measured: True if the memory peak is that of this step.
        is_manual: True if the module cuts the batch itself.
        whole: The batch after its transfer, which hooks get; None if its smallest micro-batch did
            not fit, or those that did could not be joined.
        cut_whole: Function that cuts a micro-batch out of `whole`; None if each one has to be
            transferred again.
        to_device: Function that moves a part of `whole` to the device if `whole` itself does not
            fit there.
        moved_versions: Versions of the tensors of `whole` right after the transfer, if that can be
            repeated.
        restore_random: Function that restores the random generators to before that transfer.
        largest: Number of samples in the largest micro-batch of the successful attempt.
        micro_batch_count: Number of micro-batches in that attempt.
    """

    host: Any
    samples: int
    index: int
    key: str
    search: SizeSearch
    move: Callable[[Any], Any]
    cut: Cut
    is_measured: bool = False
    is_manual: bool = False
    whole: Any = None
    cut_whole: Cut | None = None
    to_device: Callable[[Any], Any] | None = None
    moved_versions: list[int | None] | None = None
    restore_random: Restore | None = None
    largest: int = 0
    micro_batch_count: int = 0

    @property
    def size(self) -> int:
        """Number of samples in the largest micro-batch, at the current size of the search."""
        return self.counts()[0]

    @property
    def is_at_once(self) -> bool:
        """True if the whole batch goes through the model at once, at the current size of the search."""
        return self.search.size >= self.samples

    def ranges(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of each micro-batch, at the current size of the search."""
        if self.is_at_once:
            return [(0, self.samples)]
        return cut_evenly(self.samples, self.search.size)

    def counts(self) -> list[int]:
        """Number of samples in each micro-batch, at the current size of the search."""
        return [stop - start for start, stop in self.ranges()]

    def begin_attempt(self) -> None:
        """Note the sizes of an attempt."""
        counts = self.counts()
        self.largest = counts[0]
        self.micro_batch_count = len(counts)

    def run(self, step: Callable[[Any, int], T], results: Results | None) -> list[T]:
        """Call `step` with each micro-batch on the device, and merge what they log.

        Args:
            step: Function that runs forward, and in training backward, given a micro-batch and its
                number of samples.
            results: Values logged in the running loop; None in prediction, which logs none.

        Returns:
            The result of `step` for each micro-batch.
        """
        self.begin_attempt()
        logged = LoggedMicroBatches(results)
        outputs = []
        try:
            for start, stop in self.ranges():
                micro_batch = self._load(start, stop)
                logged.begin(micro_batch, stop - start)
                outputs.append(step(micro_batch, stop - start))
                logged.end()
            logged.merge()
        finally:
            logged.close()
        return outputs

    def release(self) -> None:
        """Release all memory before the next batch arrives."""
        self.host = self.whole = self.restore_random = self.cut_whole = None

    def _load(self, start: int, stop: int) -> Any:  # noqa: ANN401 - a batch
        is_all = stop - start == self.samples
        if self.whole is None or (self.cut_whole is None and not is_all):
            return self.move(self.host if is_all else self.cut(self.host, start, stop))
        piece = self.whole
        if not is_all:
            assert self.cut_whole is not None
            piece = self.cut_whole(self.whole, start, stop)
        return piece if self.to_device is None else self.to_device(piece)


class LoggedMicroBatches:
    """Collects the values that each micro-batch logs for its step.

    Means over an epoch already weight micro-batches by their samples. A torchmetrics object is
    correct at the end of the epoch, but at a step it shows its last micro-batch.

    Args:
        results: Values logged in the running loop; None outside of a loop.
    """

    def __init__(self, results: Results | None) -> None:
        self.results = results
        self._batch = results.batch if results is not None else None
        self._values: dict[str, list[Any]] = {}
        self._counts: dict[str, list[int]] = {}  # samples behind each value
        self._count = 0  # samples of the current micro-batch
        self._before: dict[str, Any] = {}

    def begin(self, micro_batch: Any, count: int) -> None:  # noqa: ANN401 - of any structure
        """Weight values that are logged from now on by the samples of a micro-batch."""
        self._count = count
        self._before = {key: shown_value(metric) for key, metric in self._step_metrics()}
        self._show(micro_batch)

    def end(self) -> None:
        """Keep what the micro-batch logged for this step."""
        for key, metric in self._step_metrics():
            value = shown_value(metric)
            # The same object as before was logged by another hook, or in another step.
            if value is not self._before.get(key):
                self._values.setdefault(key, []).append(value)
                self._counts.setdefault(key, []).append(self._count)

    def merge(self) -> None:
        """Set each value to that of the whole batch."""
        for key, metric in self._step_metrics():
            values = self._values.get(key, [])
            if len(values) > 1:
                show_value(metric, _reduce(metric, values, self._counts[key]))

    def close(self) -> None:
        """Release the last micro-batch."""
        self._show(self._batch)

    def _show(self, batch: Any) -> None:  # noqa: ANN401
        if self.results is not None:
            self.results.batch = batch
            self.results.batch_size = None  # Lightning counts again

    def _step_metrics(self) -> Iterator[tuple[str, Metric]]:
        if self.results is None:
            return
        for key, metric in self.results.items():
            if metric.is_tensor and metric.meta.on_step and shown_value(metric) is not None:
                yield key, metric


def _reduce(metric: Metric, values: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401
    if metric.meta.is_mean_reduction:
        return mean(values, counts)
    if metric.meta.is_sum_reduction:
        return functools.reduce(operator.add, values)
    return functools.reduce(metric.meta.reduce_fx, values)
