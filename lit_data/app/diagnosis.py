"""Findings of ``doctor`` on the hardware: cores, memory, disks and devices."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from lit_data.core.machine import available_memory_bytes, count_cores, count_files

Level = Literal["ok", "note", "warning", "fault"]

LEVELS: tuple[Level, ...] = ("fault", "warning", "note", "ok")
"""The worst first: a fault stops runs, a warning slows them or ends them one day, a note may be
meant so."""

_LEAST_MEMORY_BYTES = 2 * 2**30
_LEAST_SHARED_BYTES = 2**30
_LEAST_FILES = 1024
# Of the 107 bytes of a Unix socket's path, Python's own names take up to 45.
_LONGEST_TEMP = 60
_SHARED = Path("/dev/shm")
_LEAST_FREE_BYTES = 5 * 2**30
_LEAST_FREE_DISK_FRACTION = 0.02
_NETWORK = (
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
_IN_MEMORY = ("tmpfs", "ramfs")
_CORES_PER_GPU = 4
_LEAST_FREE_FRACTION = 0.9  # of the memory of a device


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: How bad it is.
        what: The thing, in a word or two.
        found: How it is, with units.
        remedy: What to do; empty where all is well.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""


def judge(what: str, state: str, *, bad: bool, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of `level` with its remedy if something is bad, else one that all is well.

    Args:
        what: The thing that was looked at.
        state: How it is, with units.
        bad: It is not as it should be.
        remedy: What to do then.
        level: Of the finding then.
    """
    if bad:
        return Finding(level, what, state, remedy)
    return Finding("ok", what, state)


def to_gib(size_bytes: float) -> str:
    """Format bytes for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def check_machine() -> Iterator[Finding]:
    """Look at system, cores, memory, files and sockets."""
    cores = count_cores()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield judge_system(sys.platform)
    yield judge_cores(cores, psutil.cpu_count() or cores, os.getloadavg()[0])
    yield judge_threads(cores, torch.get_num_threads())
    yield judge_host_memory(available_memory_bytes(), memory.total, swap.used)
    if _SHARED.is_dir():
        yield judge_shared(shutil.disk_usage(_SHARED).total)
    yield judge_files(*count_files())
    yield judge_temp(tempfile.gettempdir())


def judge_system(platform: str) -> Finding:
    """Judge the system: worker processes share memory by means that Linux alone has."""
    remedy = "set data.loader.worker_kind=thread; worker processes need Linux"
    return judge("system", platform, bad=platform != "linux", level="note", remedy=remedy)


def judge_cores(cores: int, present: int, load: float) -> Finding:
    """Judge if this process has enough cores, and has them to itself.

    Args:
        cores: That it may use.
        present: Of the machine.
        load: Processes that want to run, mean of the last minute.
    """
    state = f"{cores} of {present} usable, load {load:.1f}"
    # The load counts all processes of the machine, not those of a container.
    if load > 1.5 * present:
        remedy = (
            "other programs keep them busy, so samples are late and measured speeds are wrong: "
            "wait, or stop them"
        )
        return Finding("warning", "cores", state, remedy)
    remedy = "set data.cache=device, which takes most of their work to the GPU"
    return judge("cores", state, bad=cores < 4, level="note", remedy=remedy)


def judge_threads(cores: int, threads: int) -> Finding:
    """Judge the threads of torch, which counts the machine's cores and not a container's quota."""
    remedy = f"export OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
    return judge("threads of torch", str(threads), bad=threads > cores, remedy=remedy)


def judge_host_memory(free_bytes: int, total_bytes: int, swapped_bytes: int) -> Finding:
    """Judge if there is memory for workers, and none was swapped out."""
    state = f"{to_gib(free_bytes)} of {to_gib(total_bytes)} free, {to_gib(swapped_bytes)} swapped"
    # More swapped out than is free: what comes back pushes something else out.
    is_bad = free_bytes < _LEAST_MEMORY_BYTES or swapped_bytes > free_bytes
    remedy = (
        "use callbacks=low_memory and data.loader.worker_kind=thread, or stop what uses the memory"
    )
    return judge("memory", state, bad=is_bad, remedy=remedy)


def judge_shared(total_bytes: int) -> Finding:
    """Judge the room of torch's own DataLoader and NCCL; lit_data's loader does not need it."""
    state = f"{to_gib(total_bytes)}; lit_data's loader does not use it"
    is_bad = total_bytes < _LEAST_SHARED_BYTES
    remedy = (
        "docker run --shm-size=8g (or --ipc=host): torch's DataLoader and NCCL fail with a bus "
        "error when it is full"
    )
    return judge("/dev/shm", state, bad=is_bad, level="note", remedy=remedy)


def judge_files(limit: int, used: int) -> Finding:
    """Judge if enough files may be open.

    Args:
        limit: How many may be; negative: as many as one likes.
        used: How many are.
    """
    state = f"{used} of {limit} open"
    is_bad = 0 <= limit < _LEAST_FILES
    return judge("open files", state, bad=is_bad, remedy="ulimit -n 65536 before the start")


def judge_temp(folder: str) -> Finding:
    """Judge if sockets of worker processes fit below the folder of temporary files."""
    is_bad = len(os.fsencode(folder)) > _LONGEST_TEMP
    remedy = (
        f"export TMPDIR=/tmp: a path of more than {_LONGEST_TEMP} bytes is too long for the "
        "sockets of workers"
    )
    return judge("temporary files", folder, bad=is_bad, remedy=remedy)


def check_disks(folders: Mapping[str, str]) -> Iterator[Finding]:
    """Look at room, rights and kind of disk of each folder.

    Args:
        folders: By their keys in the configuration; they need not exist.
    """
    mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    for key, folder in folders.items():
        path = Path(folder).absolute()
        existing = next(part for part in (path, *path.parents) if part.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            remedy = f"set {key}=FOLDER to a writable one"
            yield Finding("fault", key, f"{existing} is not a writable folder", remedy)
            continue
        usage = shutil.disk_usage(existing)
        yield judge_room(key, folder, usage.free, usage.total)
        yield judge_kind(key, find_kind(os.path.realpath(existing), mounts))


def judge_room(key: str, folder: str, free_bytes: int, total_bytes: int) -> Finding:
    """Judge the room for checkpoints and decoded images."""
    free = f"{folder}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free"
    # Of a large disk a fixed amount is soon written, of a small one 2 % is next to nothing.
    least_bytes = max(_LEAST_FREE_BYTES, _LEAST_FREE_DISK_FRACTION * total_bytes)
    remedy = (
        f"free some space, or set {key}=FOLDER on another disk; a store takes height x width x "
        "channels of each image"
    )
    return judge(key, free, bad=free_bytes < least_bytes, remedy=remedy)


def judge_kind(key: str, kind: str) -> Finding:
    """Judge the kind of disk: pages of the store should come from one of this machine."""
    if kind in _IN_MEMORY:
        remedy = f"set {key}=FOLDER on a disk: this one uses RAM"
        return Finding("warning", f"{key}, disk", f"{kind}: in memory", remedy)
    is_remote = kind.startswith(_NETWORK)
    remedy = (
        f"set {key}=FOLDER on a disk of this machine: patches are read at random, and locks may "
        "not hold here"
    )
    is_bad = is_remote and key == "paths.cache"  # runs are written once, and read by people
    return judge(f"{key}, disk", kind or "unknown", bad=is_bad, remedy=remedy)


def find_kind(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """Find the file system that a path lies on.

    Args:
        path: Absolute, links resolved.
        mounts: Mount point and kind of each file system; of two on one folder the later one counts.
    """
    longest_point, found_kind = "/", ""
    for point, kind in mounts:
        if len(point) >= len(longest_point) and f"{path}/".startswith(f"{point.rstrip('/')}/"):
            longest_point, found_kind = point, kind
    return found_kind


def check_devices(cores: int, *, pins: bool, accelerator: str) -> Iterator[Finding]:
    """Look at the devices that torch sees, and how the run uses them.

    Args:
        cores: That this process may use.
        pins: Batches are page-locked.
        accelerator: The Trainer's.
    """
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        yield judge_absence(has_driver=has_driver, built_for=torch.version.cuda)
        return
    count = torch.cuda.device_count()
    for number in range(count):
        yield judge_device_memory(
            torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number)
        )
        yield judge_kernels(torch.cuda.get_device_capability(number), torch.cuda.get_arch_list())
    yield judge_pinning(pins)
    yield judge_share(cores, count)
    if accelerator == "cpu":
        yield Finding(
            "warning", "trainer", "trainer.accelerator=cpu beside a GPU", "set trainer=gpu"
        )


def judge_precision(device_type: str, *, has_bf16: bool, used: str) -> Finding:
    """Judge the precision: bf16 where the device is fast in it, and only there.

    Args:
        device_type: ``cpu`` or ``cuda``.
        has_bf16: The device is faster in bf16 than in float32.
        used: The precision of training as the configuration has it: ``auto``, that of `AMP`,
            ``bf16``, ``fp16``, ``fp32``, or Lightning's word.
    """
    name = "this processor" if device_type == "cpu" else "this GPU"
    uses_bf16 = used.startswith("bf16") or (used == "auto" and has_bf16)
    remedy = "set callbacks.amp.precision=auto"
    if uses_bf16 and has_bf16:
        return Finding("ok", "bf16", f"used: {name} has instructions for it")
    if uses_bf16:
        state = f"used, but {name} has no instructions for it, so it is slower than fp32"
        return Finding("warning", "bf16", state, remedy)
    if has_bf16:
        state = f"not used ({used}), though {name} has instructions for it"
        remedy += ", with callbacks=default, safe, fast or low_memory"
        return Finding("note", "bf16", state, remedy)
    return Finding("ok", "bf16", f"not used: {name} has no instructions for it")


def judge_absence(*, has_driver: bool, built_for: str | None) -> Finding:
    """Judge why torch sees no GPU.

    Args:
        has_driver: The NVIDIA driver's programs are there.
        built_for: CUDA version that torch was built for; none of the CPU build.
    """
    if not has_driver:
        remedy = "training runs on the CPU; small nets are fast enough"
        return Finding("note", "GPU", "none", remedy)
    if built_for is None:
        state = "present, but torch is the CPU build"
        return Finding("fault", "GPU", state, "install torch's CUDA build")
    state = f"present, but torch for CUDA {built_for} cannot use it"
    remedy = (
        "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides it: see nvidia-smi"
    )
    return Finding("fault", "GPU", state, remedy)


def judge_device_memory(name: str, free_bytes: int, total_bytes: int) -> Finding:
    """Judge the memory of a device: others may hold some of it."""
    free = f"{name}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free"
    remedy = (
        "another process uses its memory (nvidia-smi names it): stop it, or choose "
        "trainer.devices=[n]"
    )
    is_bad = free_bytes < _LEAST_FREE_FRACTION * total_bytes
    return judge("GPU", free, bad=is_bad, remedy=remedy)


def judge_kernels(capability: tuple[int, int], built_for: list[str]) -> Finding:
    """Judge if torch has kernels that the device runs.

    Args:
        capability: Major and minor number of the generation of the device.
        built_for: Generations as torch names them, ``sm_90`` or ``compute_90``.
    """
    major, minor = capability
    fits = any(_runs(generation, major, minor) for generation in built_for)
    remedy = f"this torch is built for {', '.join(built_for)}: install a build for this GPU"
    return judge("kernels", f"sm_{major}{minor}", bad=not fits, level="fault", remedy=remedy)


def judge_pinning(pins: bool) -> Finding:
    """Judge if copies to the device can run beside computation."""
    remedy = "set data.loader.pin_memory=auto: copies from memory that is not page-locked block"
    return judge("pinned batches", "on" if pins else "off", bad=not pins, remedy=remedy)


def judge_share(cores: int, devices: int) -> Finding:
    """Judge if each device has cores that feed it."""
    remedy = "set data.cache=device, so only indices of batches are copied to the GPU"
    cores_per_device = f"{cores / devices:.1f}"
    is_bad = cores < _CORES_PER_GPU * devices
    return judge("cores for each GPU", cores_per_device, bad=is_bad, remedy=remedy)


def _runs(generation: str, major: int, minor: int) -> bool:
    """Return True if a device runs kernels that were built for a generation."""
    # sm_90a and sm_100f are builds for one generation or family: they run on that one here.
    kind, _, digits = generation.rstrip("af").partition("_")
    if kind not in ("sm", "compute"):
        return False
    built_major, built_minor = int(digits[:-1]), int(digits[-1])
    if kind == "compute":  # source that the driver compiles, for newer devices too
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor
