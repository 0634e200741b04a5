"""The batch size of each kind of tile, by what the net takes and what memory holds; and calls that must fit into it."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_data.errors import BatchMemoryError, ConfigError
from lit_data.inference.batches import Kind
from lit_data.inference.forward import Forward
from lit_data.out_of_memory import is_out_of_memory


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes of tensors that a call holds at one time, on any device.

    Counted from the tensors that its operations return, so what a library takes for itself within
    an operation (cuDNN's workspaces) is not in it, and torch's counters, which others may be
    reading, are left alone.
    """
    counter = _Counter()
    with counter:
        call()
    return counter.peak_bytes


def count_weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(
        tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors
    )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), known)
        return result

    def _add(self, storage: torch.UntypedStorage, known: set[torch.UntypedStorage]) -> None:
        if storage in self._seen or storage in known:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self._bytes -= size


T = TypeVar("T")

ADVICE: Final = (
    "use a smaller tile_px or model, precision=bf16, or free the device of other programs"
)


def try_twice(call: Callable[[], T], what: str, device: torch.device) -> T:
    """The result of a call for which a single tile must fit.

    Raises:
        BatchMemoryError: Memory ran out, and again after all that could be was released.
    """
    failure = ""
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0]
        release_memory(device)
    raise BatchMemoryError(f"{what} does not fit into memory ({failure}): {ADVICE}")


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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

    After a failure it is halved, or goes back to what fitted before; it grows half way towards what
    failed and never reaches it.

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
        memory_limit_bytes: What weights and the batches under way may take; None leaves it to the
            device.
        lanes: Batches that are computed at one time.
    """

    def __init__(
        self, forward: Forward, limits: BatchRange, memory_limit_bytes: int | None, lanes: int = 1
    ) -> None:
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
            peak = measure_peak_bytes(
                lambda: values_bytes.append(self._forward.call_plain(tile).nbytes)
            )
            return max(1, peak), values_bytes[0]

        return try_twice(measure, f"a single tile of {kind}", self._forward.device)
