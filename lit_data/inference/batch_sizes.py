"""The batch size of each kind of tile, by what the net takes and what memory holds."""

from typing import Final

import numpy as np
import torch
from rich.filesize import decimal

from lit_data.errors import BatchMemoryError
from lit_data.inference.batch_size import BatchRange, BatchSize
from lit_data.inference.batches import Kind
from lit_data.inference.forward import Forward
from lit_data.inference.memory import count_weight_bytes, measure_peak_bytes
from lit_data.inference.try_twice import ADVICE, try_twice

AHEAD: Final = 2
"""Batches for each of several lanes: one that is computed, and one that waits or whose values do."""


class BatchSizes:
    """The batch size of each kind of tile; it outlives a call of the predictor.

    Args:
        forward: The net.
        limits: What the sizes may be.
        memory_limit_bytes: What weights and the batches under way may take; None leaves it to the device.
        lanes: Batches that are computed at one time.
    """

    def __init__(self, forward: Forward, limits: BatchRange, memory_limit_bytes: int | None, lanes: int = 1) -> None:
        self._forward, self._limits, self._lanes = forward, limits, lanes
        self._memory_limit_bytes = memory_limit_bytes
        self._sizes: dict[Kind, BatchSize] = {}

    def must_measure(self, kind: Kind) -> bool:
        """Whether `of` will call the net."""
        return self._memory_limit_bytes is not None and kind not in self._sizes

    def of(self, kind: Kind) -> BatchSize:
        """The size of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if kind not in self._sizes:
            limit = self._memory_limit_bytes
            self._sizes[kind] = BatchSize(self._limits) if limit is None else self._fit(kind, limit)
        return self._sizes[kind]

    def _fit(self, kind: Kind, limit_bytes: int) -> BatchSize:
        tile_bytes, values_bytes = self._measure_tile(kind)
        weight_bytes = count_weight_bytes(self._forward.model)
        left_bytes = limit_bytes - weight_bytes
        if (most := left_bytes // tile_bytes) < self._limits.smallest:
            raise BatchMemoryError(
                f"memory_limit_bytes={limit_bytes} ({decimal(limit_bytes)}) does not hold "
                f"{self._limits.smallest} tiles of {kind}: the model takes {decimal(weight_bytes)}, "
                f"each tile {decimal(tile_bytes)}; {ADVICE}"
            )
        if self._lanes == 1:
            return BatchSize(self._limits, most)
        shared = left_bytes // (self._lanes * (tile_bytes + (AHEAD - 1) * values_bytes))
        if shared < self._limits.smallest:
            return BatchSize(self._limits, most, alone=True)
        return BatchSize(self._limits, shared)

    def _measure_tile(self, kind: Kind) -> tuple[int, int]:
        """Bytes that a tile takes at most, and those of its values."""
        tile = torch.from_numpy(np.zeros((1, *kind.shape), kind.dtype))

        def measure() -> tuple[int, int]:
            values_bytes: list[int] = []
            peak = measure_peak_bytes(lambda: values_bytes.append(self._forward.call_plain(tile).nbytes))
            return max(1, peak), values_bytes[0]

        return try_twice(measure, f"a single tile of {kind}", self._forward.device)
