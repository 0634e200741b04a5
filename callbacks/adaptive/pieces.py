"""Into which pieces a batch is cut, and how what a step returned of them is put together again."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_data.batch_form import like_mapping
from lit_data.types import COUNT_SUFFIX

Slicer = Callable[[Any, int, int], Any]
"""Called with a batch, the first sample of a piece and the one behind its last."""


def spread(samples: int, size: int) -> list[tuple[int, int]]:
    """The fewest pieces of at most `size` samples, as even as can be: 9 samples at most 8 at once are 5 and 4.

    Even pieces need less memory than full ones with a remainder, for as many steps, and batch norm never meets a
    single sample where it could meet more.
    """
    pieces = -(-samples // size)
    least, more = divmod(samples, pieces)
    ends = [least * piece + min(piece, more) for piece in range(pieces + 1)]  # larger ones first: errors show at once
    return list(itertools.pairwise(ends))


def merge_outputs(outputs: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - what a step returns
    """What a step would have returned for the whole batch, from what it returned for the pieces.

    Tensors, arrays, lists and tuples with one entry per sample are joined in order, fractions become means over the
    samples, mappings and tuples of such parts are merged by their entries, as is a list of tensors with one entry per
    sample each; of anything else the last is kept.

    Args:
        outputs: One for each piece.
        counts: Samples of each piece.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return outputs[-1]
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in output for output in outputs)]
        return like_mapping(first, {key: merge_outputs([output[key] for output in outputs], counts) for key in keys})
    if isinstance(first, list | tuple) and all(_has_parts(o, n) for o, n in zip(outputs, counts, strict=True)):
        parts = [merge_outputs(part, counts) for part in zip(*outputs, strict=False)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, list | tuple):
        return type(first)(item for output in outputs for item in output)
    if getattr(first, "ndim", 0) and all(len(o) == n for o, n in zip(outputs, counts, strict=True)):
        return torch.cat(list(outputs)) if isinstance(first, Tensor) else np.concatenate(outputs)
    is_fraction = (
        first.is_floating_point() and not first.ndim if isinstance(first, Tensor) else isinstance(first, float)
    )
    return mean(outputs, counts) if is_fraction else outputs[-1]


def mean(values: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - numbers or tensors
    """Mean of values, each weighted by its samples."""
    return sum(value * (count / sum(counts)) for value, count in zip(values, counts, strict=True))


def describe_shapes(batch: Any, samples: int) -> str:  # noqa: ANN401 - any nesting
    """Shapes and types of the tensors of one sample, for messages and as a key: ``image 3x128x128 uint8``.

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
    parts = batch.items() if type(batch) is dict else enumerate(batch) if type(batch) in (list, tuple) else ()
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
        return _walk({item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}, name)
    if isinstance(batch, list | tuple):
        return [found for number, part in enumerate(batch) for found in _walk(part, f"{name}[{number}]")]
    return []
