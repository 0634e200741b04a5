"""Calls that must fit into memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_data.errors import BatchMemoryError
from lit_data.out_of_memory import is_out_of_memory


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


T = TypeVar("T")

ADVICE: Final = "use a smaller tile_px or model, precision=bf16, or free the device of other programs"


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
