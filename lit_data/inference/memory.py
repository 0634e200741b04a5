"""What one call of a net takes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes of tensors that a call holds at one time, on any device.

    Counted from the tensors that its operations return, so what a library takes for itself within an operation (cuDNN's
    workspaces) is not in it, and torch's counters, which others may be reading, are left alone.
    """
    counter = _Counter()
    with counter:
        call()
    return counter.peak_bytes


def count_weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
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
