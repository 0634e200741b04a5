"""Cores, memory and files of the machine that this process may use."""

import os
import resource
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def count_cores(ranks: int = 1) -> int:
    """Return the cores for each of `ranks` processes here, at least 1.

    These are the cores of the CPU mask, limited by the quota of a container.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # not on macOS
        cores = os.cpu_count() or 1
    quota = read_limit(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores // ranks)


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping or reaching the limit of a container."""
    free = int(psutil.virtual_memory().available)
    limit, used = read_limit(_CGROUP / "memory.max"), read_limit(_CGROUP / "memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return free
    reclaimable = 0  # cached files count as used, but are released when memory is short
    for line in read_limit(_CGROUP / "memory.stat").splitlines():
        name, value = line.split()
        if name in ("active_file", "inactive_file"):
            reclaimable += int(value)
    return min(free, int(limit) - int(used) + reclaimable)


def count_disk_bytes() -> int:
    """Return the bytes that this process and its descendants have read from disks so far.

    The result is 0 if the system does not tell.
    """
    this_process = psutil.Process()
    total = 0
    for process in (this_process, *this_process.children(recursive=True)):
        # The process has ended, this system does not count, or access is denied.
        with suppress(psutil.Error, AttributeError, OSError):
            total += int(process.io_counters().read_bytes)
    return total


def count_files() -> tuple[int, int]:
    """Return the limit of open files of this process (``ulimit -n``), and the number of open ones."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit, psutil.Process().num_fds()


def count_local_ranks(world_size: int) -> int:
    """Return the number of ranks on this machine if the launcher tells, or else of all ranks."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return min(int(value), world_size)
    return world_size


def read_limit(path: Path) -> str:
    """Return the text of a file of the control group, or "" if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
