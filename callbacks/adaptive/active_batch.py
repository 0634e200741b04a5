"""Into which pieces a batch is cut, and how what a step returned of them is put together again."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_data.batch_form import cut_evenly, like_mapping
from lit_data.callbacks.adaptive.batch_size_search import SizeSearch
from lit_data.callbacks.adaptive.snapshot import Restore
from lit_data.lightning_internals import Metric, Results, show_value, shown_value
from lit_data.types import COUNT_SUFFIX

Slicer = Callable[[Any, int, int], Any]
"""Called with a batch, the first sample of a piece and the one behind its last."""


def merge_outputs(outputs: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - what a step returns
    """What a step would have returned for the whole batch, from what it returned for the pieces.

    Tensors, arrays, lists and tuples with one entry per sample are joined in order, fractions
    become means over the samples, mappings and tuples of such parts are merged by their entries, as
    is a list of tensors with one entry per sample each; of anything else the last is kept.

    Args:
        outputs: One for each piece.
        counts: Samples of each piece.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return outputs[-1]
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in output for output in outputs)]
        return like_mapping(
            first, {key: merge_outputs([output[key] for output in outputs], counts) for key in keys}
        )
    if isinstance(first, list | tuple) and all(
        _has_parts(o, n) for o, n in zip(outputs, counts, strict=True)
    ):
        parts = [merge_outputs(part, counts) for part in zip(*outputs, strict=False)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, list | tuple):
        return type(first)(item for output in outputs for item in output)
    if getattr(first, "ndim", 0) and all(len(o) == n for o, n in zip(outputs, counts, strict=True)):
        return torch.cat(list(outputs)) if isinstance(first, Tensor) else np.concatenate(outputs)
    is_fraction = (
        first.is_floating_point() and not first.ndim
        if isinstance(first, Tensor)
        else isinstance(first, float)
    )
    return mean(outputs, counts) if is_fraction else outputs[-1]


def mean(values: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - numbers or tensors
    """Mean of values, each weighted by its samples."""
    return sum(value * (count / sum(counts)) for value, count in zip(values, counts, strict=True))


def describe_shapes(batch: Any, samples: int) -> str:  # noqa: ANN401 - any nesting
    """Shapes and types of the tensors of one sample, for messages and as a key: ``image 3x128x128
    uint8``.

    Args:
        batch: Of any nesting.
        samples: Of the batch; what is ragged or has another length is left out.
    """
    return ", ".join(
        f"{name} {'x'.join(map(str, tensor.shape[1:])) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in _walk(batch, "")
        if tensor.ndim and len(tensor) == samples
    )


def kind_of(batch: Any) -> Hashable:  # noqa: ANN401
    """What tells batches of other shapes apart at little cost; none where the parts are not all tensors."""
    parts = (
        batch.items()
        if type(batch) is dict
        else enumerate(batch)
        if type(batch) in (list, tuple)
        else ()
    )
    kind: list[Hashable] = []
    for name, value in parts:
        if not isinstance(value, Tensor):
            return None
        kind += name, value.shape[1:], value.dtype
    return tuple(kind) or None


def _has_parts(output: Sequence[Any], samples: int) -> bool:
    """Whether a list or tuple holds values of all samples in each entry, and not one thing per sample."""
    whole = [getattr(part, "ndim", 0) > 0 and len(part) == samples for part in output]
    if isinstance(output, tuple):
        return hasattr(output, "_fields") or len(output) != samples or any(whole)
    return bool(whole) and all(whole)


def _walk(batch: Any, name: str) -> list[tuple[str, Tensor]]:  # noqa: ANN401
    if isinstance(batch, Tensor):
        return [(name or "tensor", batch)]
    if isinstance(batch, Mapping):
        plain = [key for key in batch if f"{key}{COUNT_SUFFIX}" not in batch]
        return [found for key in plain for found in _walk(batch[key], str(key))]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _walk(
            {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}, name
        )
    if isinstance(batch, list | tuple):
        return [
            found for number, part in enumerate(batch) for found in _walk(part, f"{name}[{number}]")
        ]
    return []


@dataclass(slots=True)
class Hand:
    """One batch between its arrival and the end of its step.

    Attributes:
        host: The batch before its transfer.
        samples: Of it.
        index: Number of the batch.
        search: The sizes for its stage and shapes.
        move: Transfers a batch or a piece to the device, augmentation included.
        cut: Cuts a piece out of the batch.
        restore_random: Undoes the transfer of the whole batch: random generators, plain attributes
            of the module.
        started_s: When the transfer began.
        fixed_bytes: What was allocated then, if this step is measured.
        whole: The batch on the device, if it was moved as a whole.
        largest: Samples of the largest piece of the attempt that went through.
        pieces: Pieces of that attempt.
    """

    host: Any
    samples: int
    index: int
    search: SizeSearch
    move: Callable[[Any], Any]
    cut: Slicer
    restore_random: Restore | None
    started_s: float
    fixed_bytes: int | None = None
    whole: Any = None
    largest: int = 0
    pieces: int = 0

    @property
    def size(self) -> int:
        """Samples of the largest piece, as the search has it now."""
        if self.samples <= self.search.size:
            return self.samples
        return cut_evenly(self.samples, self.search.size)[0][1]

    def parts(self) -> Iterator[tuple[Any, int]]:
        """The pieces on the device, one at a time, and how many samples each has."""
        pieces = cut_evenly(self.samples, self.search.size)
        self.largest, self.pieces = pieces[0][1], len(pieces)
        for start, stop in pieces:
            yield self.part(start, stop), stop - start

    def part(self, start: int, stop: int) -> Any:  # noqa: ANN401 - a batch
        """Some samples on the device."""
        if (start, stop) != (0, self.samples):
            return self.move(self.cut(self.host, start, stop))
        return self.move(self.host) if self.whole is None else self.whole


class LoggedPieces:
    """Collects the values of each piece from Lightning's results; epoch means weight pieces by
    their samples anyway.

    A torchmetrics object, which is right at the end of the epoch, shows its last piece at a step.

    Args:
        results: Of the loop that runs; none outside of a loop.
    """

    def __init__(self, results: Results | None) -> None:
        self.results = results
        self._batch = results.batch if results is not None else None
        self._values: dict[str, list[tuple[Any, int]]] = {}
        self._count = 0  # samples of the piece under way
        self._before: dict[str, Any] = {}

    def begin(self, part: Any, count: int) -> None:  # noqa: ANN401 - a piece of any structure
        """A piece begins: values that are logged count for its samples."""
        self._count = count
        self._before = {key: shown_value(metric) for key, metric in self._step_metrics()}
        self._show(part)

    def end(self) -> None:
        """A piece is done: keep what it logged for this step."""
        for key, metric in self._step_metrics():
            if shown_value(metric) is not self._before.get(
                key
            ):  # otherwise another hook logged it, or another step
                self._values.setdefault(key, []).append((shown_value(metric), self._count))

    def merge(self) -> None:
        """All pieces are done."""
        for key, metric in self._step_metrics():
            found = self._values.get(key, [])
            if len(found) > 1:
                show_value(
                    metric,
                    _reduce(metric, [value for value, _ in found], [count for _, count in found]),
                )
        self.close()

    def close(self) -> None:
        """Let go of the last piece."""
        self._show(self._batch)

    def _show(self, batch: Any) -> None:  # noqa: ANN401
        if self.results is not None:
            self.results.batch, self.results.batch_size = batch, None

    def _step_metrics(self) -> list[tuple[str, Metric]]:
        found = [] if self.results is None else self.results.items()
        return [
            (key, m)
            for key, m in found
            if m.is_tensor and m.meta.on_step and shown_value(m) is not None
        ]


def _reduce(metric: Metric, values: list[Any], counts: list[int]) -> Any:  # noqa: ANN401
    if metric.meta.is_mean_reduction:
        return mean(values, counts)
    total = values[0]
    for value in values[1:]:
        total = (
            total + value if metric.meta.is_sum_reduction else metric.meta.reduce_fx(total, value)
        )
    return total
