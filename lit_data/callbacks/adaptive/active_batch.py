"""The batch of the step under way, its micro-batches, and how what they log is joined."""

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
"""Returns samples of a batch: from a first one to the one behind the last."""


def describe_shapes(batch: Any, samples: int) -> str:  # noqa: ANN401 - any nesting
    """Shapes and types of the tensors of one sample: ``image 3x128x128 uint8``.

    They are a part of messages, and the key of a search.

    Args:
        batch: Of any nesting.
        samples: Of the batch; what is ragged or has another length is left out.
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
    """Tensors of a batch of any nesting with their names, ragged ones left out."""
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
        samples: Of it.
        index: Number of the batch.
        key: Its stage and shapes.
        search: The sizes for them.
        move: Transfers a batch or a micro-batch to the device, augmentation included.
        cut: Cuts a micro-batch out of `host`, from its first sample to the one behind its last.
        is_measured: The peak of the memory is that of this step.
        is_manual: The module cuts it by itself.
        whole: The batch after its transfer, which hooks get; none if its smallest micro-batch did
            not fit, or those that did could not be joined.
        cut_whole: Cuts a micro-batch out of `whole`; none if each has to be moved anew.
        to_device: Moves what was cut out of `whole`, where that has no room on the device.
        moved_versions: Of the tensors of `whole` right after the transfer, where that can be repeated.
        restore_random: Puts random generators back to before that transfer.
        largest: Samples of the largest micro-batch of the attempt that went through.
        micro_batch_count: Micro-batches of that attempt.
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
        """Samples of the largest micro-batch, as the search has it now."""
        return self.counts()[0]

    @property
    def is_at_once(self) -> bool:
        """True if the whole batch goes through the model at once, as the search has it now."""
        return self.search.size >= self.samples

    def ranges(self) -> list[tuple[int, int]]:
        """First sample of each micro-batch and the one behind its last, as the search has it now."""
        if self.is_at_once:
            return [(0, self.samples)]
        return cut_evenly(self.samples, self.search.size)

    def counts(self) -> list[int]:
        """Samples of each micro-batch, as the search has it now."""
        return [stop - start for start, stop in self.ranges()]

    def begin_attempt(self) -> None:
        """Note the sizes of an attempt."""
        counts = self.counts()
        self.largest = counts[0]
        self.micro_batch_count = len(counts)

    def run(self, step: Callable[[Any, int], T], results: Results | None) -> list[T]:
        """Call `step` with each micro-batch on the device and its samples, and join what they log.

        Args:
            step: Forward, and in training backward.
            results: The values logged in the loop that runs; none in prediction, which has none.

        Returns:
            What `step` returned for each micro-batch.
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
        """Let go of all memory before the next batch arrives."""
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

    Means over an epoch weight micro-batches by their samples anyway. A torchmetrics object, which
    is right at the end of the epoch, shows its last micro-batch at a step.

    Args:
        results: Of the loop that runs; none outside of a loop.
    """

    def __init__(self, results: Results | None) -> None:
        self.results = results
        self._batch = results.batch if results is not None else None
        self._values: dict[str, list[Any]] = {}
        self._counts: dict[str, list[int]] = {}  # samples behind each value
        self._count = 0  # samples of the micro-batch under way
        self._before: dict[str, Any] = {}

    def begin(self, micro_batch: Any, count: int) -> None:  # noqa: ANN401 - of any structure
        """Let values that are logged from now on count for the samples of a micro-batch."""
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
        """Let each value show what it is for the whole batch."""
        for key, metric in self._step_metrics():
            values = self._values.get(key, [])
            if len(values) > 1:
                show_value(metric, _reduce(metric, values, self._counts[key]))

    def close(self) -> None:
        """Let go of the last micro-batch."""
        self._show(self._batch)

    def _show(self, batch: Any) -> None:  # noqa: ANN401
        if self.results is not None:
            self.results.batch = batch
            self.results.batch_size = None  # Lightning counts anew

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
