"""Where and with what a measurement was made."""

import platform
from pathlib import Path

import lightning
import numpy as np
import psutil
import torch

from lit_data.loading.machine import count_cores


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
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(models, "") or platform.processor() or platform.machine()
