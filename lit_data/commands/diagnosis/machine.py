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
    """Return cores, processor, memory, device, and the versions that decide the speed."""
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
    """Return one line for a log or a title."""
    memory_gib = int(machine["memory_bytes"]) / 2**30
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {memory_gib:.0f} GiB, {machine['device']}, "
        f"Python {machine['python']}, torch {machine['torch']}, NumPy {machine['numpy']}, "
        f"Lightning {machine['lightning']}"
    )


def _read_cpu_model() -> str:
    """Read the model where Linux keeps it; elsewhere `platform` knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_SLOW: Final = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slow, and AdaptiveBatchSize catches them",
    "PYTHONDEVMODE": "Python's debug checks are on",
    "PYTHONMALLOC": "Python's debug allocator may be on",
    "TORCH_DISTRIBUTED_DEBUG": "ranks check each other at each step",
}
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look for variables that are set and commonly hurt.

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
    """Find leftovers of a launcher, which make Lightning wait for ranks that never come."""
    left_over = [name for name in _RANKS if name in environment]
    if left_over and "MASTER_ADDR" not in environment:
        state = f"{', '.join(left_over)} set without MASTER_ADDR"
        yield Finding("fault", "ranks", state, f"unset {' '.join(left_over)}")
    tasks = environment.get("SLURM_NTASKS", "1")
    is_interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_interactive and tasks.isdigit() and int(tasks) > 1:
        remedy = "in this shell a run is one task: unset SLURM_NTASKS, or start it with srun"
        yield Finding("warning", "ranks", f"an interactive SLURM job of {tasks} tasks", remedy)


_LEAST_MEMORY_BYTES: Final = 2 * 2**30
_LEAST_SHARED_BYTES: Final = 2**30
_LEAST_FILES: Final = 1024
# Of the 107 bytes of a Unix socket's path, Python's own names take up to 45.
_LONGEST_TEMP: Final = 60
_SHARED: Final = Path("/dev/shm")


def check_machine() -> Iterator[Finding]:
    """Look at system, cores, memory, files and sockets."""
    cores = count_cores()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield judge_system(sys.platform)
    yield judge_cores(cores, psutil.cpu_count() or cores, os.getloadavg()[0])
    yield judge_threads(cores, torch.get_num_threads())
    yield judge_memory(available_memory_bytes(), memory.total, swap.used)
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
    if load > 1.5 * present:
        remedy = (
            "other work keeps them busy, so samples come late and measured speeds are wrong: wait, "
            "or stop it"
        )
        return Finding("warning", "cores", state, remedy)
    remedy = "data.cache=device leaves them little to do, on a GPU"
    return judge("cores", state, bad=cores < 4, level="note", remedy=remedy)


def judge_threads(cores: int, threads: int) -> Finding:
    """Judge the threads of torch, which counts the machine's cores and not a container's quota."""
    remedy = f"export OMP_NUM_THREADS={cores}: threads that wait for each other's cores spin"
    return judge("threads of torch", str(threads), bad=threads > cores, remedy=remedy)


def judge_memory(free_bytes: int, total_bytes: int, swapped_bytes: int) -> Finding:
    """Judge if there is memory for workers, and none was swapped out."""
    state = f"{to_gib(free_bytes)} of {to_gib(total_bytes)} free, {to_gib(swapped_bytes)} swapped"
    is_bad = free_bytes < _LEAST_MEMORY_BYTES or swapped_bytes > free_bytes
    remedy = (
        "use callbacks=low_memory and data.loader.worker_kind=thread, or end what holds the memory"
    )
    return judge("memory", state, bad=is_bad, remedy=remedy)


def judge_shared(total_bytes: int) -> Finding:
    """Judge the room of torch's own DataLoader and NCCL; lit_data's loader does not need it."""
    state = f"{to_gib(total_bytes)}; lit_data's loader does not use it"
    is_bad = total_bytes < _LEAST_SHARED_BYTES
    remedy = (
        "docker run --shm-size=8g (or --ipc=host): torch's own DataLoader and NCCL die of a bus "
        "error when it is full"
    )
    return judge("/dev/shm", state, bad=is_bad, level="note", remedy=remedy)


def judge_files(limit: int, used: int) -> Finding:
    """Judge if enough files may be open.

    Args:
        limit: How many may be; negative: as many as one likes.
        used: How many are.
    """
    state = f"{limit} may be open, {used} are"
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
    """Look at requirements, malicious uploads, packages that overwrite each other, and extras."""
    versions = []
    for name in SHOWN:
        version = find_version(name)
        if version:
            versions.append(f"{name} {version}")
    yield Finding("ok", "versions", ", ".join(versions))
    requirements = [Requirement(text) for text in metadata.requires("lit_data") or []]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate()]
    yield judge_requirements(needed)
    yield from find_malicious()
    yield judge_opencv([name for name in _SAME_MODULE if find_version(name)])
    yield from find_unfit_torchvision()
    extras = metadata.metadata("lit_data").get_all("Provides-Extra") or []
    yield describe_extras(requirements, extras)


def judge_requirements(requirements: Sequence[Requirement]) -> Finding:
    """Judge if each required package is there in a version that fits."""
    unmet = []
    for requirement in requirements:
        if not is_met(requirement):
            name = requirement.name
            unmet.append(f"{name}{requirement.specifier} (found: {find_version(name)})")
    state = "; ".join(unmet) or f"all {len(requirements)} met"
    remedy = "pip install -e . in lit_data's folder"
    return judge("requirements", state, bad=bool(unmet), level="fault", remedy=remedy)


def find_malicious() -> Iterator[Finding]:
    """Find uploads that are known to be malicious."""
    for name, versions in _MALICIOUS.items():
        version = find_version(name)
        if version in versions:
            remedy = (
                f"this upload was malicious: pip install -U {name}, then change what secrets this "
                "machine held"
            )
            yield Finding("fault", "security", f"{name} {version}", remedy)


def judge_opencv(packages: Sequence[str]) -> Finding:
    """Judge if only one package brings ``cv2``: several overwrite each other's files."""
    remedy = f"pip uninstall {' '.join(packages)}; pip install opencv-python-headless"
    return judge("OpenCV", ", ".join(packages), bad=len(packages) > 1, remedy=remedy)


def find_unfit_torchvision() -> Iterator[Finding]:
    """Find a torchvision that cannot be imported, which Lightning takes for an absent one."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except Exception as error:  # whatever a library of another build ends in
        yield Finding("fault", "torchvision", *describe_torchvision(error))


def describe_extras(requirements: Sequence[Requirement], extras: Sequence[str]) -> Finding:
    """Name the extras that are wholly installed, and the others.

    Args:
        requirements: Of lit_data, those of extras among them.
        extras: Names of extras.
    """
    installed: list[str] = []
    missing: list[str] = []
    for extra in sorted(set(extras) - {"dev", "test", "notebooks"}):
        needed = [each for each in requirements if _is_of_extra(each, extra)]
        is_installed = all(is_met(requirement) for requirement in needed)
        (installed if is_installed else missing).append(extra)
    state = f"installed: {_join(installed)}; not installed: {_join(missing)}"
    remedy = f"if you need one: pip install -e '.[{missing[0]}]'" if missing else ""
    return Finding("ok", "extras", state, remedy)


def _is_of_extra(requirement: Requirement, extra: str) -> bool:
    """Return True if a requirement holds with an extra and not without."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate()


def is_met(requirement: Requirement) -> bool:
    """Return True if a package is installed in a version that fits."""
    version = find_version(requirement.name)
    if version is None:
        return False
    return requirement.specifier.contains(Version(version), prereleases=True)


@cache
def find_version(name: str) -> str | None:
    """Find the installed version of a package, if any."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
