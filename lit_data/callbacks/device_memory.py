"""Memory of a device: what is used, what is available, and what torch caches."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import psutil
import torch

from lit_data.core.heap import trim_heap
from lit_data.core.machine import available_memory_bytes


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory at one moment, in bytes.

    Attributes:
        allocated_bytes: Memory in tensors; on the CPU the resident set of this process.
        reserved_bytes: Memory held by torch's caching allocator; on the CPU the resident set again.
        peak_bytes: Largest `allocated_bytes` since the last `MemoryGauge.reset_peak`.
        limit_bytes: Most that this process could hold: what it has and what is free.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    limit_bytes: int

    @property
    def used_fraction(self) -> float:
        """Peak as a fraction of the limit."""
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else 0.0


class MemoryGauge(Protocol):
    """Reads the memory of one device, and never waits for its work."""

    def read(self) -> MemoryReading:
        """Return the memory now."""
        ...

    def reset_peak(self) -> None:
        """Begin a new peak."""
        ...


def open_gauge(device: torch.device) -> MemoryGauge:
    """Return the gauge for a device: CUDA's allocator, or the host's memory for anything else."""
    return CudaGauge(device) if device.type == "cuda" else HostGauge()


class CudaGauge:
    """Memory of one CUDA device.

    Each gauge has its own peak, although CUDA has one counter for all of them.

    Args:
        device: A CUDA device.
    """

    # weak references, so that a gauge is freed with its owner
    _gauges: ClassVar["weakref.WeakSet[CudaGauge]"] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak_bytes = 0
        self._gauges.add(self)

    def read(self) -> MemoryReading:
        """Return the memory now."""
        free, total = torch.cuda.mem_get_info(self.device)
        # `free` leaves out what other processes hold; the fraction bounds this one
        allowed = int(total * _find_fraction(self.device))
        stats = self._stats()
        if not stats:  # CUDA was not used yet
            return MemoryReading(0, 0, 0, min(free, allowed))
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        return MemoryReading(
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved,
            peak_bytes=max(self._peak_bytes, allocated["peak"]),
            limit_bytes=min(reserved + free, allowed),
        )

    def reset_peak(self) -> None:
        """Begin a new peak without changing those of other gauges."""
        stats = self._stats()
        peak_bytes = stats["allocated_bytes"]["all"]["peak"] if stats else 0
        # This resets CUDA's counter for all gauges of the device, so they note its value first.
        for gauge in self._gauges:
            if gauge.device == self.device:
                gauge._peak_bytes = max(gauge._peak_bytes, peak_bytes)
        self._peak_bytes = 0
        torch.cuda.reset_peak_memory_stats(self.device)

    def _stats(self) -> dict[str, Any]:
        return torch.cuda.memory_stats_as_nested_dict(self.device)


def _find_fraction(device: torch.device) -> float:
    """Return the fraction of the device that this process may use; 1 if torch cannot say."""
    try:
        return float(torch.cuda.get_per_process_memory_fraction(device))
    except RuntimeError:  # another allocator, or another device of this name
        return 1.0


class HostGauge:
    """Memory of this process on the host; its peak is the largest value read."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    def read(self) -> MemoryReading:
        """Return the memory now."""
        used = read_rss_bytes()
        self._peak_bytes = max(self._peak_bytes, used)
        return MemoryReading(used, used, self._peak_bytes, used + available_memory_bytes())

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._peak_bytes = 0


@dataclass(frozen=True, slots=True)
class CachedMemory:
    """Memory that torch or the C library keeps for later use.

    Attributes:
        held_bytes: Function that returns the bytes that this process holds, used or not.
        empty: Function that releases unused memory, as far as possible.
        used_bytes: Function that returns the bytes in tensors; None if that is not known.
    """

    held_bytes: Callable[[], int]
    empty: Callable[[], object]
    used_bytes: Callable[[], int] | None = None

    def measure_unused(self) -> float:
        """Return the fraction of the held memory that is in no tensor, 0 to 1; 0 if not known."""
        held_bytes = self.held_bytes()
        if self.used_bytes is None or not held_bytes:
            return 0.0
        return 1 - self.used_bytes() / held_bytes


def open_cache(device: torch.device) -> CachedMemory:
    """Return the cache of a device: the allocator of an accelerator, else the heap."""
    if device.type == "cpu":
        return CachedMemory(read_rss_bytes, trim_heap)
    if device.type == "mps":
        return CachedMemory(
            torch.mps.driver_allocated_memory,
            torch.mps.empty_cache,
            torch.mps.current_allocated_memory,
        )
    module = torch.cuda if device.type == "cuda" else torch.accelerator
    return CachedMemory(
        partial(module.memory_reserved, device),
        module.empty_cache,
        partial(module.memory_allocated, device),
    )


def read_rss_bytes() -> int:
    """Return the resident memory of this process alone, shared pages included."""
    return int(_open_process(os.getpid()).memory_info().rss)


@lru_cache(maxsize=1)
def _open_process(pid: int) -> psutil.Process:
    # Opened once, because opening takes longer than reading. A fork has its own process ID.
    return psutil.Process(pid)
