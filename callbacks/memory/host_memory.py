"""Host memory of a run: this process, its workers, what they share, what is page-locked, and how fast it grows."""

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
_COST_SHARE: Final = 0.0025
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
        processes: How many were read.
    """

    pss_bytes: int
    shared_bytes: int
    processes: int


def read_rss_bytes() -> int:
    """Resident memory of this process alone, shared pages included."""
    return int(psutil.Process().memory_info().rss)


def read_tree() -> TreeMemory | None:
    """Memory of this process and its workers, from ``/proc/<pid>/smaps_rollup`` (Linux 4.14 and
    later).

    Returns:
        Nothing where the system does not tell. Processes that end meanwhile, or are not ours to
        read, are left out.
    """
    me = psutil.Process()
    own = _read_rollup(me.pid)
    if own is None:
        return None
    try:
        below = [_read_rollup(child.pid) for child in me.children(recursive=True)]
    except psutil.Error:
        below = []
    found = [own, *(rollup for rollup in below if rollup is not None)]
    return TreeMemory(sum(pss for pss, _ in found), sum(shared for _, shared in found), len(found))


def read_pinned_bytes() -> int | None:
    """Page-locked memory that torch's allocator holds, in use or cached; nothing without CUDA."""
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
        self._told = False

    def read(self) -> TreeMemory | None:
        """The memory now; nothing where the system does not tell, or before the next read is due."""
        began_s = time.perf_counter()
        if began_s < self._next_s:
            return None
        memory = read_tree()
        cost_s = time.perf_counter() - began_s
        self._next_s = began_s + cost_s / _COST_SHARE
        if memory is not None and cost_s > _SLOW_S and not self._told:
            self._told = True
            text = "reading the memory of %d processes takes %.0f ms: pss_bytes is measured every %.0f s at most"
            log.debug(text, memory.processes, 1e3 * cost_s, cost_s / _COST_SHARE)
        return memory


class Growth:
    """Memory at the ends of epochs, and how much an epoch adds.

    The first end is left out: caches, allocators and workers reach their size in the first epoch.
    Of the others, the last 20 count.
    """

    def __init__(self) -> None:
        self._ends: deque[_End] = deque(maxlen=_MOST_ENDS)
        self._warm = False

    def add(self, epoch: int, value_bytes: float) -> None:
        """An epoch ended; epochs may be left out."""
        if self._warm:
            self._ends.append((epoch, value_bytes))
        self._warm = True

    @property
    def bytes_per_epoch(self) -> float | None:
        """Median of the slopes between all pairs of ends (Theil and Sen); nothing before the fifth end."""
        return median(_slopes(self._ends)) if len(self._ends) >= _LEAST_ENDS else None

    def exceeds(self, bytes_per_epoch: float) -> bool:
        """Whether memory grows faster than that, and neither noise nor a beginning that levels off
        explains it.

        The later half must grow that fast too, and three of four pairs of ends must have grown.
        """
        growth = self.bytes_per_epoch
        if growth is None or growth <= bytes_per_epoch:
            return False
        late = list(self._ends)[-(len(self._ends) // 2 + 1) :]
        return (
            median(_slopes(late)) > bytes_per_epoch
            and float(np.quantile(_slopes(self._ends), 0.25)) > 0
        )

    def describe(self) -> str:
        """The span of the ends that count, for messages."""
        (first, low), (last, high) = self._ends[0], self._ends[-1]
        return f"{format_bytes(low)} after epoch {first}, {format_bytes(high)} after epoch {last}"


def format_bytes(value_bytes: float) -> str:
    """A size for people: ``512 B``, ``3.4 MiB``, ``11.2 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(value_bytes) >= 2**power:
            return f"{value_bytes / 2**power:.1f} {unit}"
    return f"{value_bytes:.0f} B"


def _slopes(ends: Iterable[_End]) -> list[float]:
    return [
        (late[1] - early[1]) / (late[0] - early[0])
        for early, late in itertools.combinations(ends, 2)
    ]


def _read_rollup(pid: int) -> tuple[int, int] | None:
    """PSS and shared memory of a process in bytes."""
    try:
        lines = (
            (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        )  # the first names the address range
    except OSError:
        return None
    kib = {
        name: int(words.split()[0])
        for name, _, words in (line.partition(":") for line in lines)
        if words.strip()
    }
    return (kib["Pss"] * 1024, kib.get("Pss_Shmem", 0) * 1024) if "Pss" in kib else None
