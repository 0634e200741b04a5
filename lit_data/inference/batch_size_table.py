"""The batch size of each kind of tile, by what the net takes and what memory holds."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from rich.filesize import decimal

from lit_data.errors import BatchMemoryError, ConfigError
from lit_data.inference.batches import Kind
from lit_data.inference.forward import Forward
from lit_data.inference.oom_retry import ADVICE, count_weight_bytes, measure_peak_bytes, try_twice

GROW_AFTER: Final = 8
"""Full batches that must go well before a larger one is tried."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What the batch size may be.

    Args:
        start: Tiles of the first batch.
        smallest: If so many tiles do not fit, prediction ends.
        largest: After batches that went well the size grows up to this; None stays at `start`.

    Raises:
        ConfigError: They are not in order.
    """

    start: int
    smallest: int = 1
    largest: int | None = None

    def __post_init__(self) -> None:
        """Check the order."""
        if not 1 <= self.smallest <= self.start <= self.top:
            raise ConfigError(
                f"min_batch_size={self.smallest}, batch_size={self.start}, max_batch_size={self.largest}: "
                "need 1 <= min <= batch <= max"
            )

    @property
    def top(self) -> int:
        """Largest size."""
        return self.start if self.largest is None else self.largest


class BatchSize:
    """The size for tiles of one kind.

    After a failure it is halved, or goes back to what fitted before; it grows half way towards what failed and never
    reaches it.

    Args:
        limits: What it may be.
        most: What memory is known to hold; None if that is not known.
        alone: See below.

    Attributes:
        size: Tiles of the next batch.
        fails: Smallest size that failed, if one did.
        alone: Whether memory holds a batch only if nothing else is under way.
    """

    def __init__(self, limits: BatchRange, most: int | None = None, *, alone: bool = False) -> None:
        self._smallest = limits.smallest
        self._top = limits.top if most is None else min(limits.top, most)
        self.size = min(limits.start, self._top)
        self.fails: int | None = None
        self.alone = alone
        self._fits = self._clean = 0

    def succeed(self, tiles: int) -> None:
        """A batch of so many tiles went well."""
        self._fits = max(self._fits, tiles)
        self._clean += tiles >= self.size
        top = self._top if self.fails is None else min(self._top, self.fails - 1)
        if self._clean < GROW_AFTER or top <= self.size:
            return
        self.size = min(2 * self.size, top) if self.fails is None else (self.size + top + 1) // 2
        self._clean = 0

    def fail(self, tiles: int) -> bool:
        """A batch of so many tiles did not fit; whether there is a smaller size to try."""
        if tiles <= self._smallest:
            return False
        self.fails = tiles if self.fails is None else min(self.fails, tiles)
        if self._fits >= tiles:  # somebody else took memory since then
            self._fits = 0
        self.size, self._clean = max(self._fits or tiles // 2, self._smallest), 0
        return True


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
