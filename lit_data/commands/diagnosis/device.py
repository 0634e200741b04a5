"""The GPU, or why there is none."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import torch

from lit_data.commands.diagnosis.finding import Finding, judge, to_gib

_LEAST_FREE_BYTES: Final = 5 * 2**30
_LEAST_FREE_DISK_SHARE: Final = 0.02
_NETWORK: Final = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "glusterfs",
    "9p",
    "afs",
    "davfs",
)
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
            yield Finding(
                "fault",
                key,
                f"{place} is not a writable folder",
                f"set {key}=FOLDER to one that is",
            )
            continue
        usage = shutil.disk_usage(place)
        yield judge_room(key, folder, usage.free, usage.total)
        yield judge_kind(key, find_kind(os.path.realpath(place), mounts))


def judge_room(key: str, folder: str, free_bytes: int, total_bytes: int) -> Finding:
    """Whether there is room for checkpoints and decoded images."""
    bad = free_bytes < _LEAST_FREE_BYTES or free_bytes < _LEAST_FREE_DISK_SHARE * total_bytes
    remedy = f"free some, or set {key}=FOLDER on another disk; a store takes height x width x channels of each image"
    return judge(
        key, f"{folder}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free", bad=bad, remedy=remedy
    )


def judge_kind(key: str, kind: str) -> Finding:
    """Whether pages of the store come from a disk of this machine."""
    if kind in _IN_MEMORY:
        return Finding(
            "warning",
            f"{key}, disk",
            f"{kind}: in memory",
            f"set {key}=FOLDER on a disk: this one takes RAM",
        )
    is_remote = any(kind.startswith(name) for name in _NETWORK)
    remedy = f"set {key}=FOLDER on a disk of this machine: patches are read at random, and locks may not hold here"
    return judge(
        f"{key}, disk", kind or "unknown", bad=is_remote and key == "paths.cache", remedy=remedy
    )


def find_kind(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The file system that a path lies on.

    Args:
        path: Absolute, links resolved.
        mounts: Mount point and kind of each file system; of two at one place the later one counts.
    """
    found = max(
        (len(point), number)
        for number, (point, _) in enumerate([("/", ""), *mounts])
        if _is_below(path, point)
    )
    return ["", *(kind for _, kind in mounts)][found[1]]


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _find_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


_CORES_PER_GPU: Final = 4
_LEAST_FREE_SHARE: Final = 0.9


def check_devices(cores: int, *, pins: bool, accelerator: str) -> Iterator[Finding]:
    """Devices that torch sees, and how the run uses them.

    Args:
        cores: That this process may use.
        pins: Whether batches are page-locked.
        accelerator: The Trainer's.
    """
    if not torch.cuda.is_available():
        yield judge_absence(
            has_driver=shutil.which("nvidia-smi") is not None, built_for=torch.version.cuda
        )
        return
    count = torch.cuda.device_count()
    for number in range(count):
        yield judge_memory(torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number))
        yield judge_kernels(torch.cuda.get_device_capability(number), torch.cuda.get_arch_list())
    yield judge_pinning(pins)
    yield judge_share(cores, count)
    if accelerator == "cpu":
        yield Finding(
            "warning", "trainer", "trainer.accelerator=cpu beside a GPU", "set trainer=gpu"
        )


def judge_precision(device_type: str, *, has_bf16: bool, used: str) -> Finding:
    """Return whether training uses bf16 where the device is fast in it, and only there.

    Args:
        device_type: ``cpu`` or ``cuda``.
        has_bf16: The device is faster in bf16 than in float32.
        used: The precision of training as the configuration has it: ``auto``, that of `AMP`,
            ``bf16``, ``fp16``, ``fp32``, or Lightning's word.
    """
    name = "this processor" if device_type == "cpu" else "this GPU"
    uses_bf16 = used.startswith("bf16") or (used == "auto" and has_bf16)
    if uses_bf16 and not has_bf16:
        found = f"used, but {name} has no instructions for it, which makes it slower than fp32"
        return Finding("warning", "bf16", found, "set callbacks.amp.precision=auto")
    if has_bf16 and not uses_bf16:
        remedy = (
            "set callbacks.amp.precision=auto, with callbacks=default, safe, fast or low_memory"
        )
        return Finding(
            "note", "bf16", f"not used ({used}), though {name} has instructions for it", remedy
        )
    found = (
        f"used: {name} has instructions for it"
        if uses_bf16
        else f"not used: {name} has no instructions for it"
    )
    return Finding("ok", "bf16", found)


def judge_absence(*, has_driver: bool, built_for: str | None) -> Finding:
    """Why torch sees no GPU.

    Args:
        has_driver: The NVIDIA driver's programs are there.
        built_for: CUDA version that torch was built for; none of the CPU build.
    """
    if not has_driver:
        return Finding(
            "note", "GPU", "none", "training runs on the CPU; small nets are quick enough"
        )
    if built_for is None:
        return Finding(
            "fault", "GPU", "there is one, but torch is the CPU build", "install torch's CUDA build"
        )
    remedy = (
        "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides it: see nvidia-smi"
    )
    return Finding(
        "fault", "GPU", f"there is one, but torch for CUDA {built_for} cannot use it", remedy
    )


def judge_memory(name: str, free_bytes: int, total_bytes: int) -> Finding:
    """Whether the device's memory is free."""
    found = f"{name}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free"
    remedy = "another process holds memory on it (nvidia-smi names it): end it, or choose trainer.devices=[n]"
    return judge("GPU", found, bad=free_bytes < _LEAST_FREE_SHARE * total_bytes, remedy=remedy)


def judge_kernels(capability: tuple[int, int], built_for: list[str]) -> Finding:
    """Whether torch has kernels for the device, of its generation or (within the major number) an older one."""
    major, minor = capability
    fits = any(
        arch.startswith(("sm_", "compute_")) and _runs(arch, major, minor) for arch in built_for
    )
    return judge(
        "kernels", f"sm_{major}{minor}", bad=not fits, level="fault",
        remedy=f"this torch is built for {', '.join(built_for)}: install a build for this GPU",
    )  # fmt: skip


def judge_pinning(pins: bool) -> Finding:
    """Whether copies to the device can run beside computation."""
    remedy = "set data.loader.pin_memory=auto: copies from memory that is not page-locked block"
    return judge("pinned batches", "on" if pins else "off", bad=not pins, remedy=remedy)


def judge_share(cores: int, devices: int) -> Finding:
    """Whether each device has cores that feed it."""
    remedy = "set data.cache=device, so that batches cross the bus as indices"
    return judge(
        "cores for each GPU",
        f"{cores / devices:.1f}",
        bad=cores < _CORES_PER_GPU * devices,
        remedy=remedy,
    )


def _runs(arch: str, major: int, minor: int) -> bool:
    kind, _, digits = arch.rstrip("af").partition("_")
    built = int(digits[:-1]), int(digits[-1])
    return built <= (major, minor) if kind == "compute" else built[0] == major and built[1] <= minor
