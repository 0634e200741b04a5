"""Joins the outputs of a step for each micro-batch into that of the whole batch."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_data.core.batch_form import like_mapping
from lit_data.core.errors import ConfigError

_PLAIN = (str, bytes, int, complex, type(None), np.generic, PurePath, Enum, Tensor, type)


def mean(values: Iterable[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - numbers or tensors
    """Return the mean of values, each weighted by its samples."""
    total = sum(counts)
    return sum(value * (count / total) for value, count in zip(values, counts, strict=True))


class Merger:
    """Joins what a step returned for each micro-batch.

    Tensors, arrays, lists and tuples with one entry per sample are joined in order. The samples are
    the first dimension if its length is that of the micro-batch, so [n, n] has n samples. Otherwise
    they are the only other dimension whose length follows that of micro-batches of different sizes.
    Fractions become means over the samples. Mappings, tuples, lists of parts, dataclasses and
    objects are joined by their entries. Values that are equal in all micro-batches stay; of any
    other values, the last one is kept.

    Args:
        counts: Number of samples in each micro-batch.

    Attributes:
        lost: Places where only the last value was kept, such as ``['scores'][0]``.
        guessed: Places where a mean was taken.
        ambiguous: Places where the first dimension was joined and another one is as long.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self.lost: list[str] = []
        self.guessed: list[str] = []
        self.ambiguous: list[str] = []

    def merge(self, outputs: Sequence[Any], place: str = "") -> Any:  # noqa: ANN401
        """Return the joined outputs of all micro-batches; `place` is their place in the result."""
        first = outputs[0]
        if any(type(output) is not type(first) for output in outputs):
            return self._lose(outputs, place)
        if isinstance(first, Mapping):
            return like_mapping(first, self._mapping(outputs, place))
        if isinstance(first, list | tuple):
            return self._sequence(outputs, place)
        if getattr(first, "ndim", 0):
            return self._rows(outputs, place)
        if _is_fraction(first):
            return self._fraction(outputs, place)
        if isinstance(first, _PLAIN):
            return self._plain(outputs, place)
        return self._object(outputs, place)

    def refuse_losses(self, first: object, remedy: str) -> None:
        """Refuse predictions that are not those of the whole batch.

        Args:
            first: Result of the step for the first micro-batch.
            remedy: Alternative to returning something else, for the message.

        Raises:
            ConfigError: A part was lost.
        """
        if not self.lost:
            return
        raise ConfigError(
            f"predict_step returned a {type(first).__name__} for each of {len(self.counts)} micro-batches, and "
            f"{list_places(self.lost)} cannot be joined to that of the whole batch: return tensors, arrays or "
            "lists with one entry for each sample in their first dimension, in dicts, tuples or "
            f"dataclasses, or {remedy}"
        )

    def _lose(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        self.lost.append(place)
        return outputs[-1]

    def _fraction(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        if all(bool(output == outputs[0]) for output in outputs):
            return outputs[0]
        self.guessed.append(place)
        return mean(outputs, self.counts)

    def _plain(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        """Join numbers, texts and the like: equal ones, or numbers of samples."""
        first = outputs[0]
        is_number = not isinstance(first, bool | str | bytes)
        if is_number and list(outputs) == list(self.counts):
            if len(set(self.counts)) == 1:  # the number could be the same in any batch
                self.lost.append(place)
            return sum(outputs)
        if all(bool(output == first) for output in outputs):
            return first
        return self._lose(outputs, place)

    def _mapping(self, outputs: Sequence[Any], place: str) -> dict[Any, Any]:
        merged = {}
        for key in dict.fromkeys(key for output in outputs for key in output):
            if all(key in output for output in outputs):
                merged[key] = self.merge([output[key] for output in outputs], f"{place}[{key!r}]")
            else:
                self.lost.append(f"{place}[{key!r}]")
        return merged

    def _sequence(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        kind: Any = type(outputs[0])
        if not self._hold_fields(outputs):
            if [len(output) for output in outputs] != list(self.counts):
                self.lost.append(place)
            return kind(item for output in outputs for item in output)
        fields = []
        for number, field in enumerate(zip(*outputs, strict=True)):
            fields.append(self.merge(field, f"{place}[{number}]"))
        is_named_tuple = hasattr(kind, "_fields")
        return kind(*fields) if is_named_tuple else kind(fields)

    def _hold_fields(self, outputs: Sequence[Sequence[Any]]) -> bool:
        """Return True if the entries of lists or tuples hold values of all samples."""
        first = outputs[0]
        if hasattr(first, "_fields"):
            return True
        if len({len(output) for output in outputs}) > 1:
            return False
        if [len(output) for output in outputs] != list(self.counts):
            return True
        are_fields = []
        for output, count in zip(outputs, self.counts, strict=True):
            are_fields += [_is_field(part, count) for part in output]
        return any(are_fields) if isinstance(first, tuple) else all(are_fields)

    def _rows(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        """Join tensors or arrays along the dimension of the samples."""
        dimensions = self._find_dimensions([output.shape for output in outputs])
        if not dimensions:
            are_equal = all(np.array_equal(_to_array(o), _to_array(outputs[0])) for o in outputs)
            return outputs[0] if are_equal else self._lose(outputs, place)
        if len(dimensions) > 1:
            self.ambiguous.append(place)
        if isinstance(outputs[0], Tensor):
            return torch.cat(list(outputs), dimensions[0])
        return np.concatenate(outputs, dimensions[0])

    def _find_dimensions(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """Return the possible sample dimensions if the first dimension or only one is possible."""
        possible = []
        for dimension in range(len(shapes[0])):
            lengths = [shape[dimension] for shape in shapes if len(shape) > dimension]
            rests = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
            if lengths == list(self.counts) and len(rests) == 1:
                possible.append(dimension)
        # A later dimension has to follow counts that differ: [n, 2] could hold two samples.
        are_different = len(set(self.counts)) > 1
        if 0 in possible or (len(possible) == 1 and are_different):
            return possible
        return []

    def _object(self, outputs: Sequence[Any], place: str) -> Any:  # noqa: ANN401
        """Join dataclasses and other objects by their attributes."""
        names = _list_attributes(outputs[0])
        if not names or any(_list_attributes(output) != names for output in outputs):
            return self._lose(outputs, place)
        merged = copy.copy(outputs[0])
        for name in names:
            values = [getattr(output, name) for output in outputs]
            # This also works for a frozen dataclass.
            object.__setattr__(merged, name, self.merge(values, f"{place}.{name}"))
        return merged


def fill_batch(batch: Any, joined: Any) -> Any:  # noqa: ANN401 - any form
    """Give a batch what a step has written into its micro-batches, for hooks that read it there.

    Args:
        batch: The whole batch; None if there is none.
        joined: The joined micro-batches.

    Returns:
        The batch; for types that cannot be changed, the joined micro-batches.
    """
    if type(batch) is not type(joined):
        return joined
    if isinstance(batch, MutableMapping):
        batch.update(joined)
        return batch
    names = _list_attributes(joined)
    for name in names:
        object.__setattr__(batch, name, getattr(joined, name))
    return batch if names else joined


def list_places(places: Sequence[str]) -> str:
    """Return a text that names the first places of an output."""
    return ", ".join(f"output{name}" for name in places[:3])


def _is_fraction(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, float | np.floating)


def _is_field(part: Any, samples: int) -> bool:  # noqa: ANN401 - an entry of a list
    """Return True if a part, or all parts of a nested list or tuple, have one entry for each sample."""
    if isinstance(part, list | tuple):
        return bool(part) and all(_is_field(inner, samples) for inner in part)
    return getattr(part, "ndim", 0) > 0 and len(part) == samples


def _to_array(value: Any) -> Any:  # noqa: ANN401 - a tensor or an array
    return value.detach().cpu().float().numpy() if isinstance(value, Tensor) else value


def _list_attributes(value: Any) -> list[str]:  # noqa: ANN401
    if dataclasses.is_dataclass(value):
        return [item.name for item in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", ()))
