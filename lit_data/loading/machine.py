"""What this process may use of its machine."""

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_CGROUP: Final = Path("/sys/fs/cgroup")


def count_cores(ranks: int = 1) -> int:
    """Cores for each of `ranks` processes here: those of the CPU mask, no more than a container's quota, at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = read_limit(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores // ranks)


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping or reaching a container's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used = read_limit(_CGROUP / "memory.max"), read_limit(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        cached = [line.split() for line in read_limit(_CGROUP / "memory.stat").splitlines()]
        reclaimable = sum(
            int(value) for name, value in cached if name in ("active_file", "inactive_file")
        )
        free = min(free, int(limit) - int(used) + reclaimable)
    return free


def count_disk_bytes() -> int:
    """What this process and all that it started have read from disks so far; 0 where the system does not say."""
    total, own = 0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(
            psutil.Error, AttributeError, OSError
        ):  # ended meanwhile, not on this system, not allowed
            total += int(process.io_counters().read_bytes)
    return total


def count_files() -> tuple[int, int]:
    """How many files this process may have open (``ulimit -n``), and how many it has."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(list(Path("/proc/self/fd").iterdir()))


def count_local_ranks(world_size: int) -> int:
    """Ranks on this machine, as the launcher says; otherwise all of them."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return min(int(value), world_size)
    return world_size


def read_limit(path: Path) -> str:
    """What a file of the control group says; nothing where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
