"""Cores, memory, the limits that a container or a shell sets, and the versions of packages."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import lightning
import numpy as np
import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from lit_data.commands.diagnosis.finding import Finding, describe_torchvision, judge, to_gib
from lit_data.loading.machine import available_memory_bytes, count_cores, count_files


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Cores, processor, memory, device, and the versions that decide the speed."""
    return {
        "cores": count_cores(),
        "cpu": _read_cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "lightning": lightning.__version__,
    }


def print_machine(machine: dict[str, str | int]) -> str:
    """One line for a log or a title."""
    memory_gib = int(machine["memory_bytes"]) / 2**30
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {memory_gib:.0f} GiB, {machine['device']}, "
        f"Python {machine['python']}, torch {machine['torch']}, NumPy {machine['numpy']}, "
        f"Lightning {machine['lightning']}"
    )


def _read_cpu_model() -> str:
    """Linux tells the model in one place only; elsewhere `platform` knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = (
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))
    )
    return next(models, "") or platform.processor() or platform.machine()


_SLOW: Final = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slow, and AdaptiveBatchSize catches them",
    "PYTHONDEVMODE": "Python's debug checks are on",
    "PYTHONMALLOC": "Python's debug allocator may be on",
    "TORCH_DISTRIBUTED_DEBUG": "ranks check each other at each step",
}
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What is set and commonly hurts.

    Args:
        environment: `os.environ`.
    """
    yield from _find_slow(environment)
    yield from _find_ranks(environment)
    if not environment.get("PYTORCH_CUDA_ALLOC_CONF") and not environment.get("PYTORCH_ALLOC_CONF"):
        remedy = "with sizes that change: export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield Finding("ok", "allocator", "torch's default", remedy)


def _find_slow(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, why in _SLOW.items():
        value = environment.get(name, "")
        if value not in ("", "0", "OFF", "INFO", "default", "pymalloc"):
            yield Finding("warning", name, value, f"{why}: unset it for long runs")


def _find_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Leftovers of a launcher, which make Lightning wait for ranks that never come."""
    left = [name for name in _RANKS if name in environment]
    if left and "MASTER_ADDR" not in environment:
        yield Finding(
            "fault",
            "ranks",
            f"{', '.join(left)} set without MASTER_ADDR",
            f"unset {' '.join(left)}",
        )
    tasks = environment.get("SLURM_NTASKS", "1")
    if (
        tasks.isdigit()
        and int(tasks) > 1
        and environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    ):
        remedy = "in this shell a run is one task: unset SLURM_NTASKS, or start it with srun"
        yield Finding("warning", "ranks", f"an interactive SLURM job of {tasks} tasks", remedy)


_LEAST_MEMORY_BYTES: Final = 2 * 2**30
_LEAST_SHARED_BYTES: Final = 2**30
_LEAST_FILES: Final = 1024
_LONGEST_TEMP: Final = (
    60  # of the 107 bytes of a Unix socket's path, Python's own names take up to 45
)
_SHARED: Final = Path("/dev/shm")


def check_machine() -> Iterator[Finding]:
    """Everything but disks, devices and packages."""
    cores = count_cores()
    yield judge_system(sys.platform)
    yield judge_cores(cores, psutil.cpu_count() or cores, os.getloadavg()[0])
    yield judge_threads(cores, torch.get_num_threads())
    yield judge_memory(
        available_memory_bytes(), psutil.virtual_memory().total, psutil.swap_memory().used
    )
    if _SHARED.is_dir():
        yield judge_shared(shutil.disk_usage(_SHARED).total)
    yield judge_files(*count_files())
    yield judge_temp(tempfile.gettempdir())


def judge_system(platform: str) -> Finding:
    """Worker processes share memory by means that Linux alone has."""
    remedy = "set data.loader.worker_kind=thread; worker processes need Linux"
    return judge("system", platform, bad=platform != "linux", level="note", remedy=remedy)


def judge_cores(cores: int, present: int, load: float) -> Finding:
    """Whether this process has its cores to itself.

    Args:
        cores: That it may use.
        present: Of the machine.
        load: Processes that want to run, mean of the last minute.
    """
    found = f"{cores} of {present} usable, load {load:.1f}"
    if load > 1.5 * present:
        remedy = "other work keeps them busy, so samples come late and measured speeds are wrong: wait, or stop it"
        return Finding("warning", "cores", found, remedy)
    return judge(
        "cores",
        found,
        bad=cores < 4,
        level="note",
        remedy="data.cache=device leaves them little to do, on a GPU",
    )


def judge_threads(cores: int, threads: int) -> Finding:
    """Whether torch starts more threads than it has cores: it reads the machine's, not a container's quota."""
    remedy = f"export OMP_NUM_THREADS={cores}: threads that wait for each other's cores spin"
    return judge("threads of torch", str(threads), bad=threads > cores, remedy=remedy)


def judge_memory(free_bytes: int, total_bytes: int, swapped_bytes: int) -> Finding:
    """Whether there is memory for workers, and none was swapped out."""
    found = f"{to_gib(free_bytes)} of {to_gib(total_bytes)} free, {to_gib(swapped_bytes)} swapped"
    bad = free_bytes < _LEAST_MEMORY_BYTES or swapped_bytes > free_bytes
    remedy = (
        "use callbacks=low_memory and data.loader.worker_kind=thread, or end what holds the memory"
    )
    return judge("memory", found, bad=bad, remedy=remedy)


def judge_shared(total_bytes: int) -> Finding:
    """Whether torch's own DataLoader and NCCL have room; lit_data's loader does not need it."""
    remedy = "docker run --shm-size=8g (or --ipc=host): torch's own DataLoader and NCCL die of a bus error when it is full"
    found = f"{to_gib(total_bytes)}; lit_data's loader does not use it"
    return judge(
        "/dev/shm", found, bad=total_bytes < _LEAST_SHARED_BYTES, level="note", remedy=remedy
    )


def judge_files(limit: int, used: int) -> Finding:
    """Whether enough files may be open."""
    found = f"{limit} may be open, {used} are"
    return judge(
        "open files",
        found,
        bad=0 <= limit < _LEAST_FILES,
        remedy="ulimit -n 65536 before the start",
    )


def judge_temp(folder: str) -> Finding:
    """Whether sockets of worker processes fit below the folder of temporary files."""
    remedy = f"export TMPDIR=/tmp: a path of more than {_LONGEST_TEMP} bytes is too long for the sockets of workers"
    return judge(
        "temporary files", folder, bad=len(os.fsencode(folder)) > _LONGEST_TEMP, remedy=remedy
    )


SHOWN: Final = (
    "torch",
    "lightning",
    "numpy",
    "opencv-python-headless",
    "tifffile",
    "hydra-core",
    "kornia",
)
_MALICIOUS: Final = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_SAME_MODULE: Final = (
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
)


def check_packages() -> Iterator[Finding]:
    """Requirements of lit_data, packages known to be malicious, two packages that write the same files, extras."""
    installed = {name: version for name in SHOWN if (version := find_version(name))}
    yield Finding(
        "ok", "versions", ", ".join(f"{name} {version}" for name, version in installed.items())
    )
    wanted = [Requirement(text) for text in metadata.requires("lit_data") or []]
    yield judge_requirements([one for one in wanted if one.marker is None or one.marker.evaluate()])
    yield from find_malicious()
    yield judge_opencv([name for name in _SAME_MODULE if find_version(name)])
    yield from find_unfit_torchvision()
    yield describe_extras(wanted, metadata.metadata("lit_data").get_all("Provides-Extra") or [])


def judge_requirements(wanted: Sequence[Requirement]) -> Finding:
    """Whether each required package is there in a version that fits."""
    unmet = [
        f"{one.name}{one.specifier} (found: {find_version(one.name)})"
        for one in wanted
        if not is_met(one)
    ]
    found = "; ".join(unmet) or f"all {len(wanted)} met"
    return judge(
        "requirements",
        found,
        bad=bool(unmet),
        level="fault",
        remedy="pip install -e . in lit_data's folder",
    )


def find_malicious() -> Iterator[Finding]:
    """Uploads known to be malicious, if one is installed."""
    for name, versions in _MALICIOUS.items():
        version = find_version(name)
        if version in versions:
            remedy = f"this upload was malicious: pip install -U {name}, then change what secrets this machine held"
            yield Finding("fault", "security", f"{name} {version}", remedy)


def judge_opencv(found: Sequence[str]) -> Finding:
    """Whether only one package brings ``cv2``: several overwrite each other's files."""
    remedy = f"pip uninstall {' '.join(found)}; pip install opencv-python-headless"
    return judge("OpenCV", ", ".join(found), bad=len(found) > 1, remedy=remedy)


def find_unfit_torchvision() -> Iterator[Finding]:
    """A torchvision that cannot be imported, though Lightning takes it for one that is not there."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except Exception as error:  # whatever a library of another build ends in
        yield Finding("fault", "torchvision", *describe_torchvision(error))


def describe_extras(wanted: Sequence[Requirement], extras: Sequence[str]) -> Finding:
    """Which extras are wholly installed."""
    there: list[str] = []
    missing: list[str] = []
    for extra in sorted(set(extras) - {"dev", "test", "notebooks"}):
        own = [one for one in wanted if one.marker and one.marker.evaluate({"extra": extra})]
        own = [one for one in own if not one.marker.evaluate()]  # type: ignore[union-attr]  # chosen by their marker
        (there if all(map(is_met, own)) else missing).append(extra)
    remedy = f"if you need one: pip install -e '.[{missing[0]}]'" if missing else ""
    return Finding(
        "ok", "extras", f"installed: {_join(there)}; not installed: {_join(missing)}", remedy
    )


def is_met(requirement: Requirement) -> bool:
    """Whether a package is installed in a version that fits."""
    version = find_version(requirement.name)
    return version is not None and requirement.specifier.contains(
        Version(version), prereleases=True
    )


@cache
def find_version(name: str) -> str | None:
    """The installed version of a package, if any."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
