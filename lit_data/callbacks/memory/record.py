"""Measurements of a run's memory: its current use, its growth and its history."""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import psutil
import torch

from lit_data.callbacks.device_memory import MemoryReading, open_gauge, read_rss_bytes
from lit_data.callbacks.timeline import SERIES, Timeline, draw_memory, widen_rows

PROC = Path("/proc")
_MOST_COST_FRACTION = 0.0025
_MOST_ENDS = 20
_LEAST_ENDS = 4
_End = tuple[int, float]
"""The number of an epoch, and the bytes at its end."""

Moment = Literal["step", "epoch", "event"]
"""When a measurement is taken."""

_CURES = {
    "host": "keep x.detach() or x.item() of outputs and losses, and no growing lists in datasets",
    "device": "keep x.detach() or x.item() of outputs and losses",
}


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of this process and all processes below it.

    Attributes:
        pss_bytes: Resident memory; a page that several processes map is counted once.
        shared_bytes: Part of it that is shared: /dev/shm, memfd and anonymous shared mappings.
        processes: Number of processes that were read.
    """

    pss_bytes: int
    shared_bytes: int
    processes: int


def read_tree() -> TreeMemory | None:
    """Return the memory of this process and its workers, or None if the system has no record.

    The source is ``/proc/<pid>/smaps_rollup`` (Linux 4.14 and later). Processes that have just
    ended, or that this process may not read, are left out.
    """
    process = psutil.Process()
    main = _read_rollup(process.pid)
    if main is None:
        return None
    try:
        workers = [_read_rollup(child.pid) for child in process.children(recursive=True)]
    except psutil.Error:
        workers = []
    rollups = [main, *(worker for worker in workers if worker is not None)]
    pss_bytes = sum(pss for pss, _ in rollups)
    shared_bytes = sum(shared for _, shared in rollups)
    return TreeMemory(pss_bytes, shared_bytes, len(rollups))


def read_pinned_bytes() -> int | None:
    """Return the page-locked bytes of torch's allocator, used or cached; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


class TreeReader:
    """Reads the memory of the process tree in no more than 0.25 % of the time.

    The kernel walks all pages of each process, about 15 ms for 1 GiB in small pages, so a read is
    not repeated before 400 times as long as it took has passed.
    """

    def __init__(self) -> None:
        self._next_s = 0.0

    def read(self) -> TreeMemory | None:
        """Return the memory now; None without a record, or before the next read is due."""
        began_s = time.perf_counter()
        if began_s < self._next_s:
            return None
        memory = read_tree()
        cost_s = time.perf_counter() - began_s
        self._next_s = began_s + cost_s / _MOST_COST_FRACTION
        return memory


class Growth:
    """Memory at the ends of epochs, and its growth per epoch.

    The first end is left out, because caches, allocators and workers reach their size in the first
    epoch. Of the others, the last 20 count.
    """

    def __init__(self) -> None:
        self._ends: deque[_End] = deque(maxlen=_MOST_ENDS)
        self._is_warm = False

    def add(self, epoch: int, value_bytes: float) -> None:
        """Add the memory at the end of an epoch; epochs may be left out."""
        if self._is_warm:
            self._ends.append((epoch, value_bytes))
        self._is_warm = True

    @property
    def bytes_per_epoch(self) -> float | None:
        """Median of the slopes between all pairs of ends; None before the fifth end.

        With this Theil-Sen estimator, a fourth of the ends may be outliers.
        """
        return median(_slopes(self._ends)) if len(self._ends) >= _LEAST_ENDS else None

    def exceeds(self, bytes_per_epoch: float) -> bool:
        """Return True if memory grows faster, and neither noise nor a slow start explains it.

        The later half must grow that fast too, and three of four pairs of ends must have grown.
        """
        growth = self.bytes_per_epoch
        if growth is None or growth <= bytes_per_epoch:
            return False
        later_half = list(self._ends)[-(len(self._ends) // 2 + 1) :]
        has_levelled_off = median(_slopes(later_half)) <= bytes_per_epoch
        lower_quartile = float(np.quantile(_slopes(self._ends), 0.25))
        return not has_levelled_off and lower_quartile > 0

    def describe(self) -> str:
        """Return the span of the ends that count, for messages."""
        first_epoch, first_bytes = self._ends[0]
        last_epoch, last_bytes = self._ends[-1]
        return (
            f"{format_bytes(first_bytes)} after epoch {first_epoch}, "
            f"{format_bytes(last_bytes)} after epoch {last_epoch}"
        )


def format_bytes(value_bytes: float) -> str:
    """Return a readable size: ``512 B``, ``3.4 MiB``, ``11.2 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(value_bytes) >= 2**power:
            return f"{value_bytes / 2**power:.1f} {unit}"
    return f"{value_bytes:.0f} B"


def _slopes(ends: Iterable[_End]) -> list[float]:
    slopes = []
    for (early, early_bytes), (late, late_bytes) in itertools.combinations(ends, 2):
        slopes.append((late_bytes - early_bytes) / (late - early))
    return slopes


def _read_rollup(pid: int) -> tuple[int, int] | None:
    """Return the PSS and the shared memory of a process in bytes, if they can be read."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    kib: dict[str, int] = {}
    for line in text.splitlines()[1:]:  # the first line is the address range
        name, _, value = line.partition(":")
        if value.strip():
            kib[name] = int(value.split()[0])
    if "Pss" not in kib:
        return None
    return kib["Pss"] * 1024, kib.get("Pss_Shmem", 0) * 1024


class MemoryRecord:
    """Measures the memory of a device and of this process and its workers.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timeline = Timeline(widen_rows)
        self.gauge = open_gauge(device)
        self.reading = self.gauge.read()
        # Two readers, because each reads only now and then: steps must not use up epochs' readings.
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
        """Measure the memory, and add it to the timeline.

        Args:
            batch_size: Number of samples that go through the model at once; NaN if not known.
            moment: Occasion of the measurement. At a step and at the end of an epoch, the memory of
                the workers is read if it is due; at an event, which may come often, it is not.

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
        # Lowest and highest are equal until the timeline merges neighbors.
        row = np.array([drawn.get(name, math.nan) for name in SERIES], np.float64)
        self.timeline.add(self.now_s, np.stack([row, row]))
        return values

    def mark(self, kind: str, began_s: float | None = None) -> None:
        """Mark an event that happens now, or one that began at `began_s` and ends now."""
        now_s = self.now_s
        self.timeline.marks[kind].add(now_s if began_s is None else began_s, now_s)

    def draw(self, path: Path) -> None:
        """Write the picture if there are at least two samples."""
        if len(self.timeline) > 1:
            limit_bytes = self.reading.limit_bytes
            draw_memory(self.timeline, path, device=str(self.device), limit_bytes=limit_bytes)

    def end_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """Add the values of `sample` at the end of a training epoch."""
        # an epoch without a reading of the workers would look like a drop
        if "pss_bytes" in values or not self._knows_pss:
            self._growth["host"].add(epoch, values.get("pss_bytes", values["rss_bytes"]))
        self._growth["process"].add(epoch, values["rss_bytes"])
        self._growth["device"].add(epoch, values["allocated_bytes"])

    def read_growth(self) -> dict[str, float]:
        """Return the metrics of growth that are known."""
        growth = {
            "growth_bytes_per_epoch": self._growth[self._host].bytes_per_epoch,
            "allocated_growth_bytes_per_epoch": self._growth["device"].bytes_per_epoch,
        }
        return {metric: value for metric, value in growth.items() if value is not None}

    def find_alarms(self, bytes_per_epoch: float) -> list[str]:
        """Return a sentence for the host, and for a device with its own memory, if it grows.

        Each sentence is returned once.

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
        """Name of the growth that represents the host.

        If epochs are short, all processes are read only in some of them, the main one in each.
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
    fragmentation = 0.0  # also if nothing is reserved
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
