"""What a device cannot do that others can, what is put there once, and memory of the CPU that serves again."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import torch

_LEAST_REUSED: Final = 2**20
_LEAST_THREADED: Final = 2**20
_MOST_FREE: Final = 4
_BF16_INSTRUCTIONS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "svebf16"})
_CPU_INFO: Final = Path("/proc/cpuinfo")
free_memory: list[memoryview] = []
returned_memory: "deque[memoryview]" = (
    deque()
)  # appended to by finalizers, in the midst of anything
_lock = threading.Lock()


def widest_float(device: "torch.device | None" = None) -> "torch.dtype":
    """float64, or float32 on an Apple GPU, which has none; without a device: what any tensor here may be moved with."""
    import torch

    is_mps = torch.backends.mps.is_available() if device is None else device.type == "mps"
    return torch.float32 if is_mps else torch.float64


def has_fast_bf16(device_type: str) -> bool:
    """Return True if bfloat16 is faster than float32: CUDA from compute capability 8.0, CPUs with
    instructions for it.

    Measured on two cores, forward and backward of a convolution and of a linear layer against
    float32: 1.6 and 1.9 times as fast with AVX512-BF16, 1.1 and 2.5 times as slow with AVX512
    alone, 13 and 34 times as slow with AVX2.
    """
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without oneDNN a convolution in bfloat16 goes value by value, whatever the processor has.
    has_convolutions: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device_type != "cpu" or not has_convolutions:
        return False
    return not _BF16_INSTRUCTIONS.isdisjoint(read_cpu_flags())


def read_cpu_flags(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """Return the instruction sets that the processor has, as torch names them, or else Linux; none
    if nobody says.

    Args:
        cpu_info: Linux's file, which is read if torch is older than ``torch.cpu.get_capabilities``.
    """
    import torch

    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return frozenset(name for name, value in capabilities.items() if value is True)
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # macOS and Windows have no such file
        return frozenset()
    flags: set[str] = set()
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86 and ARM
            flags.update(values.split())
    return frozenset(flags)


def runs_on_cpu(tensor: "torch.Tensor") -> bool:
    """Whether NumPy and OpenCV may work on a tensor: it is on the CPU, and torch.compile does not trace the call."""
    import torch

    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def reused(shape: "Sequence[int]") -> "torch.Tensor":
    """An unset float32 tensor on the CPU; large ones lie in memory that serves again when the last
    reference is gone.

    The system takes back what an allocator frees in large pieces, and gives it out zeroed page by
    page: for batches of some MB that takes longer than to augment them.
    """
    import torch

    nbytes = 4 * math.prod(shape)
    if nbytes < _LEAST_REUSED:
        return torch.empty(tuple(shape))
    with _lock:
        while returned_memory:
            free_memory.append(returned_memory.popleft())
        del free_memory[:-_MOST_FREE]
        fitting = [
            place for place, free in enumerate(free_memory) if nbytes <= len(free) <= 2 * nbytes
        ]
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
    """Call a change with the number of each sample; in as many threads as torch uses where a sample
    is large.

    Args:
        change: Works in OpenCV and NumPy, which let other threads run.
        samples: [B, ...] on the CPU, what is changed.
    """
    import torch

    count = len(samples)
    threads = min(torch.get_num_threads(), count)
    if (
        threads < 2 or samples[0].nbytes < _LEAST_THREADED
    ):  # threads would mostly wait for each other
        deque(map(change, range(count)), maxlen=0)
        return
    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(change, range(count)), maxlen=0)


@lru_cache(maxsize=256)
def constant(
    values: tuple[float, ...], device: "torch.device", dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """Numbers on a device, brought there once: each copy of a tensor from the host makes it wait.
    Not to be changed.

    Args:
        values: The numbers.
        device: Where to.
        dtype: float32 by default.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype or torch.float32, device=device)
