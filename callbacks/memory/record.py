"""The measurements of a run's memory: what it holds now, its growth and its course."""

import ctypes
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import psutil
import torch

from lit_data.callbacks.device_memory import MemoryGauge, MemoryReading, open_gauge
from lit_data.callbacks.memory.host_memory import (
    Growth,
    TreeReader,
    format_bytes,
    read_pinned_bytes,
    read_rss_bytes,
)
from lit_data.callbacks.memory.plot import SERIES, draw_timeline
from lit_data.callbacks.timeline import Timeline, widen_rows


class CachedMemory(Protocol):
    """The cache of one device."""

    def held_bytes(self) -> int:
        """Return the bytes that this process holds there, used or not."""
        ...

    def measure_unused(self) -> float:
        """Return the fraction of it that is in no tensor, 0 to 1; 0 where that is not known."""
        ...

    def empty(self) -> None:
        """Give back what is not used."""
        ...


def open_cache(device: torch.device) -> CachedMemory:
    """Return the cache of a device: the allocator of an accelerator, else the heap."""
    if device.type == "cpu":
        return HeapCache()
    if device.type == "mps":
        return AllocatorCache(
            torch.mps.driver_allocated_memory,
            torch.mps.current_allocated_memory,
            torch.mps.empty_cache,
        )
    module = torch.cuda if device.type == "cuda" else torch.accelerator
    return AllocatorCache(
        partial(module.memory_reserved, device),
        partial(module.memory_allocated, device),
        module.empty_cache,
    )


class AllocatorCache:
    """Cache of one of torch's caching allocators.

    Args:
        reserved_bytes: Returns the memory it holds.
        allocated_bytes: Returns the memory in tensors.
        empty: Gives back the rest, as far as it can.
    """

    def __init__(
        self,
        reserved_bytes: Callable[[], int],
        allocated_bytes: Callable[[], int],
        empty: Callable[[], None],
    ) -> None:
        self._reserved_bytes = reserved_bytes
        self._allocated_bytes = allocated_bytes
        self._empty = empty

    def held_bytes(self) -> int:
        """Return the bytes that the allocator holds."""
        return self._reserved_bytes()

    def measure_unused(self) -> float:
        """Return the fraction of it that is in no tensor, 0 to 1."""
        reserved = self._reserved_bytes()
        return 1 - self._allocated_bytes() / reserved if reserved else 0.0

    def empty(self) -> None:
        """Give back what is not used."""
        self._empty()


class HeapCache:
    """Freed memory of this process that the C library has not given back to the system.

    Only glibc can be asked to; with another library nothing happens.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._trim = _find_trim()

    def held_bytes(self) -> int:
        """Return the bytes of the resident set."""
        return int(self._process.memory_info().rss)

    def measure_unused(self) -> float:
        """Return 0, as it is not known."""
        return 0.0

    def empty(self) -> None:
        """Give back free heap, where that can be asked for."""
        if self._trim is not None:
            self._trim(0)


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; on Windows no such handle
        return None
    return trim


Moment = Literal["step", "epoch", "event"]
"""When a measurement is taken."""

_CURES: Final = {
    "host": "keep x.detach() or x.item() of outputs and losses, and no growing lists in datasets",
    "device": "keep x.detach() or x.item() of outputs and losses",
}


class MemoryRecord:
    """Measures the memory of a device and of this process and its workers.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timeline = Timeline(widen_rows)
        self.gauge: MemoryGauge = open_gauge(device)
        self.reading: MemoryReading = self.gauge.read()
        # Two readers, as one reads only now and then: steps must not use up what epochs are due.
        self._tree_readers = {"step": TreeReader(), "epoch": TreeReader()}
        self._knows_pss = False
        self._began_s = time.perf_counter()
        self._growth = {name: Growth() for name in ("host", "process", "device")}
        self._alarmed: set[str] = set()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began_s

    def sample(self, batch_size: float, moment: Moment = "step") -> dict[str, float]:
        """Measure, and add it to the timeline.

        Args:
            batch_size: Samples that go through the model at once; NaN where that is not known.
            moment: At a step and at the end of an epoch the memory of the workers is read where it
                is due; at an event, which may come often, it is not.

        Returns:
            The values of `MemoryMonitor`'s metrics.
        """
        self.reading = self.gauge.read()
        values = _list_values(self.reading)
        values["rss_bytes"] = read_rss_bytes()
        pinned_bytes = read_pinned_bytes()
        if pinned_bytes is not None:
            values["pinned_bytes"] = pinned_bytes
        tree = None if moment == "event" else self._tree_readers[moment].read()
        if tree is not None:
            self._knows_pss = True
            values["pss_bytes"] = tree.pss_bytes
            values["shared_bytes"] = tree.shared_bytes
        drawn = {**values, "batch_size": batch_size}
        row = np.array([drawn.get(name, math.nan) for name in SERIES], np.float64)
        self.timeline.add(self.now_s, np.stack([row, row]))
        return values

    def mark(self, kind: str, began_s: float | None = None) -> None:
        """Mark what happens now, or what began at `began_s` and ends now."""
        now_s = self.now_s
        self.timeline.marks[kind].add(now_s if began_s is None else began_s, now_s)

    def draw(self, path: Path) -> None:
        """Write the picture; nothing before the second sample."""
        if len(self.timeline) > 1:
            limit_bytes = self.reading.limit_bytes
            draw_timeline(self.timeline, path, device=str(self.device), limit_bytes=limit_bytes)

    def end_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """Count the values of `sample` at the end of an epoch of training."""
        # an epoch at which the workers were not due would look like a fall
        if "pss_bytes" in values or not self._knows_pss:
            self._growth["host"].add(epoch, values.get("pss_bytes", values["rss_bytes"]))
        self._growth["process"].add(epoch, values["rss_bytes"])
        self._growth["device"].add(epoch, values["allocated_bytes"])

    def read_growth(self) -> dict[str, float]:
        """Return the metrics of growth, once they are known."""
        growth = {
            "growth_bytes_per_epoch": self._growth[self._host].bytes_per_epoch,
            "allocated_growth_bytes_per_epoch": self._growth["device"].bytes_per_epoch,
        }
        return {metric: value for metric, value in growth.items() if value is not None}

    def find_alarms(self, bytes_per_epoch: float) -> list[str]:
        """Return a sentence for the host, and for a device with memory of its own, if it grows.

        Each of them comes once.

        Args:
            bytes_per_epoch: Growth above which there is an alarm.
        """
        watched = {"host": self._host}  # the memory, and the name of its growth
        if self.device.type != "cpu":
            watched["device"] = "device"
        sentences = []
        for memory, name in watched.items():
            if memory not in self._alarmed and self._growth[name].exceeds(bytes_per_epoch):
                self._alarmed.add(memory)
                sentences.append(self._describe_growth(memory, name))
        return sentences

    @property
    def _host(self) -> str:
        """Name of the growth that stands for the host.

        In short epochs all processes are read now and then, the main one in each.
        """
        return "process" if self._growth["host"].bytes_per_epoch is None else "host"

    def _describe_growth(self, memory: str, name: str) -> str:
        growth = format_bytes(self._growth[name].bytes_per_epoch or 0.0)
        span = self._growth[name].describe()
        where = str(self.device) if memory == "device" else "host"
        main = ""
        if name == "host":
            main_growth = format_bytes(self._growth["process"].bytes_per_epoch or 0.0)
            main = f", of which the main process {main_growth}"
        return (
            f"{where} memory grows by {growth} per epoch{main} ({span}): it will run out; "
            f"{_CURES[memory]}"
        )


def _list_values(reading: MemoryReading) -> dict[str, float]:
    fragmentation = 0.0  # also where nothing is reserved
    if reading.reserved_bytes:
        fragmentation = max(0.0, 1 - reading.allocated_bytes / reading.reserved_bytes)
    return {
        "allocated_bytes": reading.allocated_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "peak_bytes": reading.peak_bytes,
        "fragmentation": fragmentation,
        "free_bytes": reading.limit_bytes - reading.reserved_bytes,
        "limit_bytes": reading.limit_bytes,
    }
