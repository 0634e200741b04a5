"""`MemoryLimit`: the number of tiles that fit below a limit, from the memory that the net needs for one."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_data.core.out_of_memory import make_memory_error, repeat
from lit_data.predict.forward import Forward
from lit_data.predict.runner import AHEAD, BatchSize, release_memory
from lit_data.predict.tiles import Kind
from lit_inspect.counts import counted

T = TypeVar("T")
ADVICE = "use a smaller tile_px or model, precision=bf16, or stop other programs on the device"


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Measure the peak memory of the tensors of a call, in bytes, on any device.

    The tensors that operations return are counted. Memory that a library allocates inside an
    operation (cuDNN's workspaces) is not included. Torch's own counters, which other code may read,
    are not reset.
    """
    counter = PeakCounter()
    with counter:
        call()
    return counter.peak_bytes


def count_weight_bytes(model: nn.Module) -> int:
    """Return the size of the parameters and buffers, bytes."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum(tensor.nbytes for tensor in tensors)


class PeakCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are allocated and freed.

    Attributes:
        peak_bytes: The most that were allocated at one time.
    """

    peak_bytes: int

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


def try_twice(call: Callable[[], T], needs: str, device: torch.device) -> T:
    """Return the result of a call that must fit into memory, because it has a single tile.

    Args:
        call: The call.
        needs: Name of what must fit, for the message.
        device: Whose memory is released before the second attempt.

    Raises:
        BatchMemoryError: Memory ran out twice, the second time after all free memory was released.
    """
    failures: list[str] = []

    def release(failure: str) -> None:
        failures.append(failure)
        if len(failures) == 2:
            raise make_memory_error(f"{needs} does not fit into memory ({failure}): {ADVICE}")
        release_memory(device)

    return repeat(call, release)


class MemoryLimit:
    """Limits the memory of a net's weights and of the tiles in progress.

    Args:
        forward: The net.
        limit_bytes: The limit.
        threads: Number of batches that are computed in parallel.
    """

    def __init__(self, forward: Forward, limit_bytes: int, threads: int) -> None:
        self._forward = forward
        self._limit_bytes = limit_bytes
        self._threads = threads

    def fit(self, size: BatchSize, kind: Kind) -> None:
        """Reduce a batch size until the batches of all threads fit below the limit; this calls the net.

        Raises:
            BatchMemoryError: The smallest batch exceeds the memory limit.
        """
        tile_bytes, values_bytes = self._measure_tile(kind)
        weight_bytes = count_weight_bytes(self._forward.model)
        left_bytes = self._limit_bytes - weight_bytes
        most = left_bytes // tile_bytes
        if most < size.min_size:
            raise make_memory_error(
                f"memory_limit_bytes={self._limit_bytes} ({decimal(self._limit_bytes)}) is too "
                f"small for {counted(size.min_size, 'tile')} of {kind}: the model needs "
                f"{decimal(weight_bytes)}, each tile {decimal(tile_bytes)}; {ADVICE}"
            )
        if self._threads > 1:
            # Beside the batch that a thread computes lie the values of those ahead.
            thread_tile_bytes = tile_bytes + (AHEAD - 1) * values_bytes
            most_per_thread = left_bytes // (self._threads * thread_tile_bytes)
            size.alone = most_per_thread < size.min_size
            most = most if size.alone else most_per_thread
        size.limit(min(most, size.max_size or most))

    def _measure_tile(self, kind: Kind) -> tuple[int, int]:
        """Return the bytes that a tile takes at most, and those of its values."""
        tile = torch.from_numpy(np.zeros((1, *kind.shape), kind.dtype))

        def measure() -> tuple[int, int]:
            counter = PeakCounter()
            with counter:
                values = self._forward.call_plain(tile)
            return max(1, counter.peak_bytes), values.nbytes

        return try_twice(measure, f"a single tile of {kind}", self._forward.device)
