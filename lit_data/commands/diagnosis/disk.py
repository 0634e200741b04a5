"""The disks that runs and decoded stores lie on."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from lit_data.commands.diagnosis.finding import Finding, judge, to_gib

_LEAST_FREE_BYTES: Final = 5 * 2**30
_LEAST_FREE_SHARE: Final = 0.02
_NETWORK: Final = ("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "afs", "davfs")
_IN_MEMORY: Final = ("tmpfs", "ramfs")


def check_disks(folders: Mapping[str, str]) -> Iterator[Finding]:
    """Room, rights and kind of disk of each folder.

    Args:
        folders: By their keys in the configuration; they need not exist.
    """
    mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    for key, folder in folders.items():
        place = _find_existing(Path(folder).absolute())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            yield Finding("fault", key, f"{place} is not a writable folder", f"set {key}=FOLDER to one that is")
            continue
        usage = shutil.disk_usage(place)
        yield judge_room(key, folder, usage.free, usage.total)
        yield judge_kind(key, find_kind(os.path.realpath(place), mounts))


def judge_room(key: str, folder: str, free_bytes: int, total_bytes: int) -> Finding:
    """Whether there is room for checkpoints and decoded images."""
    bad = free_bytes < _LEAST_FREE_BYTES or free_bytes < _LEAST_FREE_SHARE * total_bytes
    remedy = f"free some, or set {key}=FOLDER on another disk; a store takes height x width x channels of each image"
    return judge(key, f"{folder}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free", bad=bad, remedy=remedy)


def judge_kind(key: str, kind: str) -> Finding:
    """Whether pages of the store come from a disk of this machine."""
    if kind in _IN_MEMORY:
        return Finding(
            "warning", f"{key}, disk", f"{kind}: in memory", f"set {key}=FOLDER on a disk: this one takes RAM"
        )
    is_remote = any(kind.startswith(name) for name in _NETWORK)
    remedy = f"set {key}=FOLDER on a disk of this machine: patches are read at random, and locks may not hold here"
    return judge(f"{key}, disk", kind or "unknown", bad=is_remote and key == "paths.cache", remedy=remedy)


def find_kind(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The file system that a path lies on.

    Args:
        path: Absolute, links resolved.
        mounts: Mount point and kind of each file system; of two at one place the later one counts.
    """
    found = max(
        (len(point), number) for number, (point, _) in enumerate([("/", ""), *mounts]) if _is_below(path, point)
    )
    return ["", *(kind for _, kind in mounts)][found[1]]


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _find_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
