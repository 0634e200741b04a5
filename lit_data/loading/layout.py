"""Where the fields of a batch lie in one piece of memory."""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from lit_data.errors import DataError
from lit_data.types import COUNT_SUFFIX, Array, FieldSpec

INDICES: Final = "\0indices"
"""Name of the row of sample numbers that stands before the fields and tells a worker what to write."""

_ALIGNMENT_BYTES: Final = 64


class Layout:
    """Fields one after the other, each contiguous over the samples, ragged fields with room for the most items.

    Args:
        fields: Every key of a sample.
    """

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self.fields = dict(fields)
        self._parts: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {INDICES: ((), np.dtype(np.int64))}
        for name, field in fields.items():
            items = () if field.max_items is None else (field.max_items,)
            self._parts[name] = ((*items, *field.shape), np.dtype(field.dtype))
            if items:
                self._parts[name + COUNT_SUFFIX] = ((), np.dtype(np.int64))

    def count_bytes(self, samples: int) -> int:
        """Bytes that so many samples need."""
        return sum(self._part_bytes(shape, dtype, samples) for shape, dtype in self._parts.values())

    def arrays(self, memory: Array, samples: int) -> dict[str, Array]:
        """The fields of `samples` samples as views of the memory, the sample numbers under `INDICES`.

        Args:
            memory: [bytes] uint8, at least `count_bytes(samples)` long.
            samples: First dimension of each view.
        """
        arrays: dict[str, Array] = {}
        offset = 0
        for name, (shape, dtype) in self._parts.items():
            arrays[name] = np.ndarray((samples, *shape), dtype, memory, offset)
            offset += self._part_bytes(shape, dtype, samples)
        return arrays

    def flatten_ragged(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """The ragged fields of a written batch, flat, without the room that is left: N items of all samples each.

        Returns:
            Each field, and under ``NAME_count`` [B] int64 the items of each sample.

        Raises:
            DataError: A sample says that it has more items than there is room for.
        """
        found: dict[str, torch.Tensor] = {}
        for name, field in self.fields.items():
            if field.max_items is not None:
                counts = arrays[name + COUNT_SUFFIX]
                found[name] = _flatten(name, field, arrays[name], counts)
                found[name + COUNT_SUFFIX] = torch.from_numpy(counts.copy())
        return found

    @staticmethod
    def _part_bytes(shape: tuple[int, ...], dtype: "np.dtype[np.generic]", samples: int) -> int:
        return -(-samples * math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _flatten(name: str, field: FieldSpec, rows: Array, counts: Array) -> torch.Tensor:
    worst = int(counts.argmax())
    if counts[worst] > rows.shape[1]:
        raise DataError(
            f"{name!r} of a sample has {counts[worst]} items and there is room for {rows.shape[1]}: raise the "
            "dataset's most items per sample"
        )
    flat = np.concatenate([row[:count] for row, count in zip(rows, counts.tolist(), strict=True)])
    if field.row_column:
        flat[:, 0] = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(flat)
