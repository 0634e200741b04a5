"""Processor, device and versions of this machine, and a torchvision that does not fit its torch.

Torch and Lightning are imported by what needs them: the command line reads this file for `--help`.
"""

import platform
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lit_data.core.errors import ConfigError, LitDataError, StoreSpaceError, causes_of
from lit_data.core.files import NO_SPACE
from lit_inspect.counts import counted

if TYPE_CHECKING:
    import torch


def describe_machine(device: "torch.device") -> dict[str, str | int]:
    """Return cores, processor, memory, device, and the versions that decide the speed."""
    import lightning
    import numpy as np
    import psutil
    import torch

    from lit_data.core.machine import count_cores

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
    # The values are texts and numbers.
    memory_gib = int(machine["memory_bytes"]) / 2**30
    return (
        f"{counted(int(machine['cores']), 'core')} of {machine['cpu']}, {memory_gib:.0f} GiB, {machine['device']}, "
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


def describe_torchvision(error: Exception) -> tuple[str, str]:
    """Describe a torchvision that cannot be imported.

    Args:
        error: That its import raised.

    Returns:
        How it is, and the remedy.
    """
    torch_version = find_version("torch")
    torchvision_version = find_version("torchvision")
    build = (torch_version or "").partition("+")[2]  # such as cpu or cu128
    index = f", both from PyTorch's index of {build} builds (--index-url)" if build else ""
    cause = " ".join(str(error).split())
    pinned = f"torch=={torch_version}" if torch_version else "torch"
    return (
        f"torch {torch_version or '(version unknown)'} and torchvision "
        f"{torchvision_version or '(version unknown)'} are not from the same build "
        f"({type(error).__name__}: {cause[:200]})",
        f"pip uninstall -y torchvision; pip install {pinned} torchvision{index}",
    )


def find_version(package: str) -> str | None:
    """Return the installed version of a package, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_full_disk(error: BaseException) -> LitDataError | None:
    """Find an error of a full disk or quota behind another one.

    Whoever wrote then, Hydra, a logger or a library: it is no fault of the program.
    """
    for cause in causes_of(error, contexts="all"):
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            where = f" ({cause.filename})" if cause.filename else ""
            full = StoreSpaceError(
                f"{cause.strerror}{where}: free some space, or move the runs with "
                "paths.runs=FOLDER and the decoded images with paths.cache=FOLDER; if /dev/shm "
                "is full, as in a container, enlarge it"
            )
            full.__cause__ = cause
            return full
    return None


def find_unfit_torchvision(error: BaseException) -> ConfigError | None:
    """Find an error of the import of a torchvision of another build behind another one.

    Lightning, torchmetrics and others import it.
    """
    if isinstance(error, LitDataError) or not isinstance(error, Exception):
        return None
    if not any(_is_from_torchvision(cause) for cause in causes_of(error, contexts="all")):
        return None
    unfit = ConfigError(": ".join(describe_torchvision(error)))
    unfit.__cause__ = error
    return unfit


def _is_from_torchvision(error: BaseException) -> bool:
    """Return True if the error was raised while a module of torchvision was imported."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "torchvision" and frame.f_code.co_name == "<module>":
            return True
    return False
