"""The batch size of each kind of tile, by what the net takes and what memory holds."""

import gc
import itertools
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
    """Return the most bytes of tensors that a call holds at one time, on any device.

    Counted from the tensors that its operations return, so memory that a library takes for itself
    within an operation (cuDNN's workspaces) is not in it, and torch's counters, which others may be
    reading, are left alone.
    """
    counter = _Counter()
    with counter:
        call()
    return counter.peak_bytes


def count_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum(tensor.nbytes for tensor in tensors)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new storages, and of those that are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        inputs = _list_storages((args, kwargs))
        for storage in _list_storages(result) - inputs:  # a view holds no memory of its own
            self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self._bytes -= size


def _list_storages(values: Any) -> set[torch.UntypedStorage]:  # noqa: ANN401 - any nesting
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


T = TypeVar("T")

ADVICE: Final = (
    "use a smaller tile_px or model, precision=bf16, or free the device of other programs"
)


def try_twice(call: Callable[[], T], needs: str, device: torch.device) -> T:
    """Return the result of a call for which a single tile must fit.

    Args:
        call: The call.
        needs: Name of what must fit, for the message.
        device: Whose memory is released before the second attempt.

    Raises:
        BatchMemoryError: Memory ran out, and again after all that could be was released.
    """
    failure = ""  # text, as an error would keep the tensors of the attempt alive
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0]
        release_memory(device)
    raise BatchMemoryError(f"{needs} does not fit into memory ({failure}): {ADVICE}")


def release_memory(device: torch.device) -> None:
    """Give back memory that nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


GROW_AFTER: Final = 8
"""Full batches that must go well before a larger one is tried."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Limits of the batch size.

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
                f"min_batch_size={self.smallest}, batch_size={self.start}, "
                f"max_batch_size={self.largest}: need 1 <= min <= batch <= max"
            )

    @property
    def top(self) -> int:
        """Largest size."""
        return self.start if self.largest is None else self.largest


class BatchSize:
    """The size for tiles of one kind.

    After a failure it is halved, or goes back to a size that fitted before; it grows half way
    towards the size that failed and never reaches it.

    Args:
        limits: Limits of the size.
        most: Tiles that memory is known to hold; None if that is not known.
        alone: See below.

    Attributes:
        size: Tiles of the next batch.
        fails: Smallest size that failed, if one did.
        alone: Memory holds a batch only if nothing else is under way.
    """

    def __init__(self, limits: BatchRange, most: int | None = None, *, alone: bool = False) -> None:
        self._smallest = limits.smallest
        self._top = limits.top if most is None else min(limits.top, most)
        self.size = min(limits.start, self._top)
        self.fails: int | None = None
        self.alone = alone
        self._largest_fitting = 0
        self._full_batches = 0  # since the size moved

    def succeed(self, tiles: int) -> None:
        """Count a batch of so many tiles that went well."""
        self._largest_fitting = max(self._largest_fitting, tiles)
        self._full_batches += tiles >= self.size
        top = self._top if self.fails is None else min(self._top, self.fails - 1)
        if self._full_batches < GROW_AFTER or top <= self.size:
            return
        # fast while nothing has failed, then half way
        self.size = min(2 * self.size, top) if self.fails is None else (self.size + top + 1) // 2
        self._full_batches = 0

    def fail(self, tiles: int) -> bool:
        """Count a batch of so many tiles that did not fit.

        Returns:
            True if there is a smaller size to try.
        """
        if tiles <= self._smallest:
            return False  # not remembered: a single tile may fail as others hold the memory
        self.fails = tiles if self.fails is None else min(self.fails, tiles)
        if self._largest_fitting >= tiles:  # somebody else took memory since then
            self._largest_fitting = 0
        self.size = max(self._largest_fitting or tiles // 2, self._smallest)
        self._full_batches = 0
        return True


AHEAD: Final = 2
"""Batches for each of several threads: one is computed, and one or its values wait."""


class BatchSizes:
    """The batch size of each kind of tile; it outlives a call of the predictor.

    Args:
        forward: The net.
        limits: Limits of the sizes.
        memory_limit_bytes: Memory for weights and the batches under way; None leaves it to the
            device.
        threads: Batches that are computed at one time.
    """

    def __init__(
        self, forward: Forward, limits: BatchRange, memory_limit_bytes: int | None, threads: int = 1
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._threads = threads
        self._memory_limit_bytes = memory_limit_bytes
        self._sizes: dict[Kind, BatchSize] = {}

    def must_measure(self, kind: Kind) -> bool:
        """Return True if `of` will call the net."""
        return self._memory_limit_bytes is not None and kind not in self._sizes

    def of(self, kind: Kind) -> BatchSize:
        """Return the size of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if kind not in self._sizes:
            limit = self._memory_limit_bytes
            self._sizes[kind] = BatchSize(self._limits) if limit is None else self._fit(kind, limit)
        return self._sizes[kind]

    def _fit(self, kind: Kind, limit_bytes: int) -> BatchSize:
        """Return a size with which the batches of all threads stay below a limit."""
        tile_bytes, values_bytes = self._measure_tile(kind)
        weight_bytes = count_weight_bytes(self._forward.model)
        left_bytes = limit_bytes - weight_bytes
        most = left_bytes // tile_bytes
        if most < self._limits.smallest:
            raise BatchMemoryError(
                f"memory_limit_bytes={limit_bytes} ({decimal(limit_bytes)}) does not hold "
                f"{self._limits.smallest} tiles of {kind}: "
                f"the model takes {decimal(weight_bytes)}, each tile {decimal(tile_bytes)}; "
                f"{ADVICE}"
            )
        if self._threads == 1:
            return BatchSize(self._limits, most)
        # beside the batch that a thread computes lie the values of those ahead
        thread_tile_bytes = tile_bytes + (AHEAD - 1) * values_bytes
        most_per_thread = left_bytes // (self._threads * thread_tile_bytes)
        if most_per_thread < self._limits.smallest:
            return BatchSize(self._limits, most, alone=True)
        return BatchSize(self._limits, most_per_thread)

    def _measure_tile(self, kind: Kind) -> tuple[int, int]:
        """Return the bytes that a tile takes at most, and those of its values."""
        tile = torch.from_numpy(np.zeros((1, *kind.shape), kind.dtype))

        def measure() -> tuple[int, int]:
            values_bytes: list[int] = []
            peak = measure_peak_bytes(
                lambda: values_bytes.append(self._forward.call_plain(tile).nbytes)
            )
            return max(1, peak), values_bytes[0]

        return try_twice(measure, f"a single tile of {kind}", self._forward.device)
