"""Memory that torch, or on the CPU the C library, keeps for later: how much, and how to give it back."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Protocol

import psutil
import torch


class CachedMemory(Protocol):
    """The cache of one device."""

    def held_bytes(self) -> int:
        """Memory that this process holds there, used or not."""
        ...

    def measure_unused(self) -> float:
        """Share of what is held that is in no tensor, 0 to 1; 0 where nobody knows."""
        ...

    def empty(self) -> None:
        """Give back what is not used."""
        ...


def open_cache(device: torch.device) -> CachedMemory:
    """The cache of a device: CUDA's or another accelerator's allocator, else the heap of this process."""
    if device.type == "cuda":
        return AllocatorCache(
            partial(torch.cuda.memory_reserved, device),
            partial(torch.cuda.memory_allocated, device),
            torch.cuda.empty_cache,
        )
    if device.type == "mps":
        return AllocatorCache(
            torch.mps.driver_allocated_memory, torch.mps.current_allocated_memory, torch.mps.empty_cache
        )
    if device.type == "cpu":
        return HeapCache()
    return AllocatorCache(
        partial(torch.accelerator.memory_reserved, device),
        partial(torch.accelerator.memory_allocated, device),
        torch.accelerator.empty_cache,
    )


class AllocatorCache:
    """What a caching allocator of torch keeps.

    Args:
        reserved_bytes: Memory it holds.
        allocated_bytes: Memory in tensors.
        empty: Gives back the rest, as far as it can.
    """

    def __init__(
        self, reserved_bytes: Callable[[], int], allocated_bytes: Callable[[], int], empty: Callable[[], None]
    ) -> None:
        self._reserved_bytes, self._allocated_bytes, self._empty = reserved_bytes, allocated_bytes, empty

    def held_bytes(self) -> int:
        """Memory that the allocator holds."""
        return self._reserved_bytes()

    def measure_unused(self) -> float:
        """Share of it that is in no tensor, 0 to 1."""
        reserved = self._reserved_bytes()
        return 1 - self._allocated_bytes() / reserved if reserved else 0.0

    def empty(self) -> None:
        """Give back what is not used."""
        self._empty()


class HeapCache:
    """Freed memory of this process that the C library has not given back; glibc alone can be asked to."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._trim = _find_trim()

    def held_bytes(self) -> int:
        """The resident set."""
        return int(self._process.memory_info().rss)

    def measure_unused(self) -> float:
        """Not known: 0."""
        return 0.0

    def empty(self) -> None:
        """Give back free heap, where that can be asked for."""
        if self._trim is not None:
            self._trim(0)


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none by that way on Windows
        return None
    return trim
