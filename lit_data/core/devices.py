"""Capabilities and precision of devices, constants on them, and reused memory of the CPU."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_LEAST_REUSED = 2**20
_LEAST_THREADED = 2**20
_MOST_FREE = 4
_BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "svebf16"})
_CPU_INFO = Path("/proc/cpuinfo")
free_memory: list[memoryview] = []
returned_memory: "deque[memoryview]" = deque()
"""Free memory that finalizers append to; they may run at any time, so it must not need a lock."""

_lock = threading.Lock()


def widest_float(device: "torch.device | None" = None) -> "torch.dtype":
    """Return float64, or float32 on an Apple GPU, which has no float64.

    Args:
        device: The device; None for a dtype that works on every device of this machine.
    """
    import torch

    is_mps = torch.backends.mps.is_available() if device is None else device.type == "mps"
    return torch.float32 if is_mps else torch.float64


@contextmanager
def exact_products(device: "torch.device") -> Iterator[None]:
    """Multiply float32 matrices exactly on a GPU, even if a run allows TF32.

    TF32 has 11 bits: the product of the matrices of a warp would be off by half a pixel in 1,000.

    Args:
        device: Device of the matrices.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def has_fast_bf16(device_type: str) -> bool:
    """Return True if bfloat16 is faster than float32.

    This holds for CUDA from compute capability 8.0, and for CPUs with instructions for it. Measured
    on two cores against float32, the forward and backward passes of a convolution and of a linear
    layer are 1.6 and 1.9 times as fast with AVX512-BF16, 1.1 and 2.5 times as slow with only
    AVX512, and 13 and 34 times as slow with AVX2.
    """
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without oneDNN, a convolution in bfloat16 runs value by value on any processor.
    has_convolutions: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device_type != "cpu" or not has_convolutions:
        return False
    return not _BF16_INSTRUCTIONS.isdisjoint(read_cpu_flags())


def read_cpu_flags(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """Return the instruction sets of the processor, as named by torch, or else by Linux.

    The result is empty if neither knows.

    Args:
        cpu_info: File of Linux that is read if torch has no ``torch.cpu.get_capabilities``.
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
    """Return True if NumPy and OpenCV may work on a tensor.

    The tensor must be on the CPU, and torch.compile must not trace the call.
    """
    import torch

    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def reused(shape: "Sequence[int]") -> "torch.Tensor":
    """Return an uninitialized float32 tensor on the CPU.

    The memory of a large tensor is reused when its last reference is gone. The system takes back
    large blocks that an allocator frees, and returns them zeroed page by page, which takes longer
    for batches of some MB than their augmentation.
    """
    import torch

    nbytes = 4 * math.prod(shape)
    if nbytes < _LEAST_REUSED:
        return torch.empty(tuple(shape))
    with _lock:
        memory = _take_memory(nbytes)
    root = np.frombuffer(memory, np.float32, nbytes // 4)
    weakref.finalize(root, returned_memory.append, memory).atexit = False
    return torch.from_numpy(root.reshape(shape))


def _take_memory(nbytes: int) -> memoryview:
    """Return free memory of one to two times the given bytes, or new memory."""
    while returned_memory:
        free_memory.append(returned_memory.popleft())
    del free_memory[:-_MOST_FREE]
    for position, memory in enumerate(free_memory):
        if nbytes <= len(memory) <= 2 * nbytes:
            return free_memory.pop(position)
    return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]


def divided(images: "torch.Tensor", divisor: float) -> "torch.Tensor":
    """Return images of any dtype, cast to float32 and divided."""
    import torch

    if images.device.type != "cpu":
        return torch.div(images, divisor)
    # A single pass takes a CPU five times as long, because it casts value by value.
    return reused(images.shape).copy_(images).div_(divisor)


def change_each(change: "Callable[[int], None]", samples: "torch.Tensor") -> None:
    """Call a change with the number of each sample.

    Large samples are changed in as many threads as torch uses.

    Args:
        change: Function that uses OpenCV and NumPy, which let other threads run.
        samples: [B, ...] samples on the CPU, which are changed in place.
    """
    import torch

    count = len(samples)
    threads = min(torch.get_num_threads(), count)
    # threads with small samples would mostly wait for each other
    if threads < 2 or samples[0].nbytes < _LEAST_THREADED:
        for number in range(count):
            change(number)
        return
    with ThreadPoolExecutor(threads) as pool:
        changes = [pool.submit(change, number) for number in range(count)]
        for submitted in changes:
            submitted.result()  # raises the error of a change


@lru_cache(maxsize=256)
def constant(
    values: tuple[float, ...], device: "torch.device", dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """Return numbers on a device, copied once, because each copy from the host makes it wait.

    The tensor is shared and must not be changed.

    Args:
        values: The numbers.
        device: Their device.
        dtype: Dtype; float32 by default.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype or torch.float32, device=device)
