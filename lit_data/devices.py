"""What a device cannot do that others can, what is put there once, and memory of the CPU that serves again."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import torch

_LEAST_REUSED: Final = 2**20
_LEAST_THREADED: Final = 2**20
_MOST_FREE: Final = 4
free_memory: list[memoryview] = []
returned_memory: "deque[memoryview]" = deque()  # appended to by finalizers, in the midst of anything
_lock = threading.Lock()


def widest_float(device: "torch.device | None" = None) -> "torch.dtype":
    """float64, or float32 on an Apple GPU, which has none; without a device: what any tensor here may be moved with."""
    import torch

    is_mps = torch.backends.mps.is_available() if device is None else device.type == "mps"
    return torch.float32 if is_mps else torch.float64


def runs_on_cpu(tensor: "torch.Tensor") -> bool:
    """Whether NumPy and OpenCV may work on a tensor: it is on the CPU, and torch.compile does not trace the call."""
    import torch

    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def reused(shape: "Sequence[int]") -> "torch.Tensor":
    """An unset float32 tensor on the CPU; large ones lie in memory that serves again when the last reference is gone.

    The system takes back what an allocator frees in large pieces, and gives it out zeroed page by page: for batches of
    some MB that takes longer than to augment them.
    """
    import torch

    nbytes = 4 * math.prod(shape)
    if nbytes < _LEAST_REUSED:
        return torch.empty(tuple(shape))
    with _lock:
        while returned_memory:
            free_memory.append(returned_memory.popleft())
        del free_memory[:-_MOST_FREE]
        fitting = [place for place, free in enumerate(free_memory) if nbytes <= len(free) <= 2 * nbytes]
        memory = free_memory.pop(fitting[0]) if fitting else memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
    root = np.frombuffer(memory, np.float32, nbytes // 4)
    weakref.finalize(root, returned_memory.append, memory).atexit = False
    return torch.from_numpy(root.reshape(shape))


def divided(images: "torch.Tensor", divisor: float) -> "torch.Tensor":
    """Images of any dtype cast to float32 and divided."""
    import torch

    if images.device.type != "cpu":
        return torch.div(images, divisor)
    # In one pass a CPU takes five times as long: it casts value by value.
    return reused(images.shape).copy_(images).div_(divisor)


def change_each(change: "Callable[[int], None]", samples: "torch.Tensor") -> None:
    """Call a change with the number of each sample; in as many threads as torch uses where a sample is large.

    Args:
        change: Works in OpenCV and NumPy, which let other threads run.
        samples: [B, ...] on the CPU, what is changed.
    """
    import torch

    count = len(samples)
    threads = min(torch.get_num_threads(), count)
    if threads < 2 or samples[0].nbytes < _LEAST_THREADED:  # threads would mostly wait for each other
        deque(map(change, range(count)), maxlen=0)
        return
    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(change, range(count)), maxlen=0)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: "torch.device", dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Numbers on a device, brought there once: each copy of a tensor from the host makes it wait. Not to be changed.

    Args:
        values: The numbers.
        device: Where to.
        dtype: float32 by default.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype or torch.float32, device=device)
