"""The batch of the step under way, its micro-batches, and how what a step returned of them is joined."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lit_data.batch_form import cut_evenly, like_mapping
from lit_data.callbacks.adaptive.snapshot import Restore
from lit_data.lightning_internals import Metric, Results, show_value, shown_value
from lit_data.size_search import SizeSearch
from lit_data.types import COUNT_SUFFIX

T = TypeVar("T")


def merge_outputs(outputs: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - what a step returns
    """Return what a step would have returned for the whole batch.

    Tensors, arrays, lists and tuples with one entry per sample are joined in order, fractions
    become means over the samples, mappings and tuples of such parts are merged by their entries, as
    is a list of tensors with one entry per sample each; of anything else the last is kept.

    Args:
        outputs: One for each micro-batch.
        counts: Samples of each micro-batch.
    """
    first, last = outputs[0], outputs[-1]
    if any(type(output) is not type(first) for output in outputs):
        return last
    if isinstance(first, Mapping):
        return _merge_mappings(outputs, counts)
    if isinstance(first, list | tuple):
        return _merge_sequences(outputs, counts)
    if _have_samples(outputs, counts):
        return torch.cat(list(outputs)) if isinstance(first, Tensor) else np.concatenate(outputs)
    if isinstance(first, Tensor):
        is_fraction = first.is_floating_point() and first.ndim == 0
    else:
        is_fraction = isinstance(first, float)
    return mean(outputs, counts) if is_fraction else last


def _merge_mappings(outputs: Sequence[Any], counts: Sequence[int]) -> Mapping[Any, Any]:
    merged = {}
    for key in outputs[0]:
        if all(key in output for output in outputs):
            merged[key] = merge_outputs([output[key] for output in outputs], counts)
    return like_mapping(outputs[0], merged)


def _merge_sequences(outputs: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401
    kind: Any = type(outputs[0])
    if not all(map(_holds_fields, outputs, counts)):  # an entry for each sample
        return kind(item for output in outputs for item in output)
    fields = [merge_outputs(field, counts) for field in zip(*outputs, strict=False)]
    is_named_tuple = hasattr(kind, "_fields")
    return kind(*fields) if is_named_tuple else kind(fields)


def _have_samples(outputs: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return True if tensors or arrays have one entry for each sample."""
    if not getattr(outputs[0], "ndim", 0):
        return False
    return all(len(output) == count for output, count in zip(outputs, counts, strict=True))


def _holds_fields(output: Sequence[Any], samples: int) -> bool:
    """Return True if each entry of a list or tuple holds values of all samples."""
    is_field = [getattr(part, "ndim", 0) > 0 and len(part) == samples for part in output]
    if isinstance(output, tuple):
        return hasattr(output, "_fields") or len(output) != samples or any(is_field)
    return bool(is_field) and all(is_field)


def mean(values: Iterable[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - numbers or tensors
    """Mean of values, each weighted by its samples."""
    total = sum(counts)
    return sum(value * (count / total) for value, count in zip(values, counts, strict=True))


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
        search: The sizes for its stage and shapes.
        move: Transfers a batch or a micro-batch to the device, augmentation included.
        cut: Cuts a micro-batch out of the batch, from its first sample to the one behind its last.
        is_measured: The peak of the memory is that of this step.
        on_device: The batch on the device, if it was moved as a whole.
        restore_random: Puts random generators back to before that transfer.
        largest: Samples of the largest micro-batch of the attempt that went through.
        micro_batch_count: Micro-batches of that attempt.
    """

    host: Any
    samples: int
    index: int
    search: SizeSearch
    move: Callable[[Any], Any]
    cut: Callable[[Any, int, int], Any]
    is_measured: bool = False
    on_device: Any = None
    restore_random: Restore | None = None
    largest: int = 0
    micro_batch_count: int = 0

    @property
    def size(self) -> int:
        """Samples of the largest micro-batch, as the search has it now."""
        return self.counts()[0]

    def counts(self) -> list[int]:
        """Samples of each micro-batch, as the search has it now."""
        return [stop - start for start, stop in self._cuts()]

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
            for start, stop in self._cuts():
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
        self.host = self.on_device = self.restore_random = None

    def _cuts(self) -> list[tuple[int, int]]:
        return cut_evenly(self.samples, min(self.search.size, self.samples))

    def _load(self, start: int, stop: int) -> Any:  # noqa: ANN401 - a batch
        if stop - start < self.samples:
            return self.move(self.cut(self.host, start, stop))
        return self.move(self.host) if self.on_device is None else self.on_device


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
