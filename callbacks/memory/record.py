"""The measurements of a run's memory: what it holds now, its growth and its course."""

import ctypes
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

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
from lit_data.callbacks.memory.plot import SERIES, Timeline, draw_timeline


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
            torch.mps.driver_allocated_memory,
            torch.mps.current_allocated_memory,
            torch.mps.empty_cache,
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
        self,
        reserved_bytes: Callable[[], int],
        allocated_bytes: Callable[[], int],
        empty: Callable[[], None],
    ) -> None:
        self._reserved_bytes, self._allocated_bytes, self._empty = (
            reserved_bytes,
            allocated_bytes,
            empty,
        )

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
    except (
        AttributeError,
        OSError,
        TypeError,
    ):  # another C library, or none by that way on Windows
        return None
    return trim


_CAUSES: Final = {
    "host": (
        "Usual causes: outputs or losses kept with their graph (keep x.detach() or x.item()), lists that grow in a "
        "dataset or transform (each worker has its own; use arrays of fixed size), and persistent_workers=True, which "
        "keeps what they gathered"
    ),
    "device": (
        "Usual cause: tensors kept from step to step, such as losses or outputs with their graph in a list (keep "
        "x.detach() or x.item(), and empty it at the end of the epoch)"
    ),
}


class MemoryRecord:
    """Measures the memory of a device and of this process and its workers.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timeline = Timeline()
        self.gauge: MemoryGauge = open_gauge(device)
        self.reading = self.gauge.read()
        self._trees = {"step": TreeReader(), "epoch": TreeReader()}
        self._knows_pss = False
        self._began_s = time.perf_counter()
        self._growth = {name: Growth() for name in ("host", "process", "device")}
        self._alarmed: set[str] = set()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began_s

    def sample(
        self, batch_size: float, moment: Literal["step", "epoch", "event"] = "step"
    ) -> dict[str, float]:
        """Measure, and add it to the timeline.

        Args:
            batch_size: Samples that go through the model at once; NaN where that is not known.
            moment: At a step and at the end of an epoch the memory of the workers is read where it
                is due; at an event, which may come often, it is not.

        Returns:
            The values of `MemoryMonitor`'s metrics.
        """
        self.reading = self.gauge.read()
        values: dict[str, float] = _list_values(self.reading) | {"rss_bytes": read_rss_bytes()}
        pinned_bytes, workers = (
            read_pinned_bytes(),
            None if moment == "event" else self._trees[moment].read(),
        )
        if workers is not None:
            self._knows_pss = True
            values |= {"pss_bytes": workers.pss_bytes, "shared_bytes": workers.shared_bytes}
        if pinned_bytes is not None:
            values["pinned_bytes"] = pinned_bytes
        self.timeline.add(
            self.now_s,
            [{**values, "batch_size": batch_size}.get(name, math.nan) for name in SERIES],
        )
        return values

    def mark(self, kind: str, began_s: float | None = None) -> None:
        """Mark what happens now, or what began at `began_s` and ends now."""
        now_s = self.now_s
        self.timeline.marks[kind].add(now_s if began_s is None else began_s, now_s)

    def draw(self, path: Path) -> None:
        """Write the picture; nothing before the second sample."""
        if len(self.timeline) > 1:
            draw_timeline(
                self.timeline, path, device=str(self.device), limit_bytes=self.reading.limit_bytes
            )

    def end_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """An epoch of training ended with these values."""
        if "pss_bytes" in values or not self._knows_pss:
            self._growth["host"].add(epoch, values.get("pss_bytes", values["rss_bytes"]))
        self._growth["process"].add(epoch, values["rss_bytes"])
        self._growth["device"].add(epoch, values["allocated_bytes"])

    def read_growth(self) -> dict[str, float]:
        """The metrics of growth, once they are known."""
        names = {"growth_bytes_per_epoch": self._host, "allocated_growth_bytes_per_epoch": "device"}
        growth = {metric: self._growth[name].bytes_per_epoch for metric, name in names.items()}
        return {metric: value for metric, value in growth.items() if value is not None}

    def find_alarms(self, bytes_per_epoch: float) -> list[str]:
        """A sentence for the host, and one for a device with memory of its own, that grow faster; each of them once."""
        watched = (
            {"host": self._host}
            if self.device.type == "cpu"
            else {"host": self._host, "device": "device"}
        )
        found = {
            place: name
            for place, name in watched.items()
            if self._growth[name].exceeds(bytes_per_epoch)
        }
        fresh = {place: name for place, name in found.items() if place not in self._alarmed}
        self._alarmed.update(fresh)
        return [self._describe_growth(place, name) for place, name in fresh.items()]

    @property
    def _host(self) -> str:
        """Whose growth is the host's: in short epochs all processes are read now and then, the main one in each."""
        return "process" if self._growth["host"].bytes_per_epoch is None else "host"

    def _describe_growth(self, place: str, name: str) -> str:
        growth, main = (self._growth[which].bytes_per_epoch or 0.0 for which in (name, "process"))
        where = str(self.device) if place == "device" else "host"
        part = f", of which the main process {format_bytes(main)}" if name == "host" else ""
        return (
            f"{where} memory grows by {format_bytes(growth)} per epoch{part} ({self._growth[name].describe()}): it "
            f"will run out. {_CAUSES[place]}"
        )


def _list_values(reading: MemoryReading) -> dict[str, float]:
    reserved_bytes = max(reading.reserved_bytes, 1)
    return {
        "allocated_bytes": reading.allocated_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "peak_bytes": reading.peak_bytes,
        "fragmentation": max(0.0, 1 - reading.allocated_bytes / reserved_bytes)
        if reading.reserved_bytes
        else 0.0,
        "free_bytes": reading.limit_bytes - reading.reserved_bytes,
        "limit_bytes": reading.limit_bytes,
    }
