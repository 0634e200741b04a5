"""Host memory of a run: this process, its workers, what they share, and how fast it grows."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import psutil
import torch

log = logging.getLogger(__name__)

PROC: Final = Path("/proc")
_SLOW_S: Final = 0.02
_MOST_COST_FRACTION: Final = 0.0025
_MOST_ENDS: Final = 20
_LEAST_ENDS: Final = 4
_End = tuple[int, float]
"""The number of an epoch, and the bytes at its end."""


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of this process and all processes below it.

    Attributes:
        pss_bytes: Resident memory; a page that several processes map is counted once.
        shared_bytes: Of it, shared memory: /dev/shm, memfd and anonymous shared mappings.
        processes: Number of processes that were read.
    """

    pss_bytes: int
    shared_bytes: int
    processes: int


def read_rss_bytes() -> int:
    """Return the resident memory of this process alone, shared pages included."""
    return int(psutil.Process().memory_info().rss)


def read_tree() -> TreeMemory | None:
    """Return the memory of this process and its workers, or nothing where the system has no record.

    Read from ``/proc/<pid>/smaps_rollup`` (Linux 4.14 and later). Processes that end meanwhile, or
    are not ours to read, are left out.
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
    """Return the page-locked bytes of torch's allocator, used or cached; nothing without CUDA."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


class TreeReader:
    """Reads the memory of the process tree at no more than 0.25 % of the time.

    The kernel walks all pages of each process, about 15 ms for 1 GiB in small pages, so a read is
    not repeated before 400 times as long as it took has passed.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._has_logged = False

    def read(self) -> TreeMemory | None:
        """Return the memory now; nothing without a record, or before the next read is due."""
        began_s = time.perf_counter()
        if began_s < self._next_s:
            return None
        memory = read_tree()
        cost_s = time.perf_counter() - began_s
        pause_s = cost_s / _MOST_COST_FRACTION
        self._next_s = began_s + pause_s
        if memory is not None and cost_s > _SLOW_S and not self._has_logged:
            self._has_logged = True
            log.debug(
                "reading the memory of %d processes takes %.0f ms: "
                "pss_bytes is measured every %.0f s at most",
                memory.processes,
                1e3 * cost_s,
                pause_s,
            )
        return memory


class Growth:
    """Memory at the ends of epochs, and how much an epoch adds.

    The first end is left out: caches, allocators and workers reach their size in the first epoch.
    Of the others, the last 20 count.
    """

    def __init__(self) -> None:
        self._ends: deque[_End] = deque(maxlen=_MOST_ENDS)
        self._is_warm = False

    def add(self, epoch: int, value_bytes: float) -> None:
        """Count the end of an epoch; epochs may be left out."""
        if self._is_warm:
            self._ends.append((epoch, value_bytes))
        self._is_warm = True

    @property
    def bytes_per_epoch(self) -> float | None:
        """Median of the slopes between all pairs of ends; nothing before the fifth end.

        By Theil and Sen: a fourth of the ends may be outliers.
        """
        return median(_slopes(self._ends)) if len(self._ends) >= _LEAST_ENDS else None

    def exceeds(self, bytes_per_epoch: float) -> bool:
        """Return True if memory grows faster, and neither noise nor a slow beginning explains it.

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
    """Return a size for people: ``512 B``, ``3.4 MiB``, ``11.2 GiB``."""
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
    for line in text.splitlines()[1:]:  # the first names the address range
        name, _, value = line.partition(":")
        if value.strip():
            kib[name] = int(value.split()[0])
    if "Pss" not in kib:
        return None
    return kib["Pss"] * 1024, kib.get("Pss_Shmem", 0) * 1024
