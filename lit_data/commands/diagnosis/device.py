"""The GPU, or why there is none."""

import shutil
from collections.abc import Iterator
from typing import Final

import torch

from lit_data.commands.diagnosis.finding import Finding, judge, to_gib

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
        yield judge_absence(has_driver=shutil.which("nvidia-smi") is not None, built_for=torch.version.cuda)
        return
    count = torch.cuda.device_count()
    for number in range(count):
        yield judge_memory(torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number))
        yield judge_kernels(torch.cuda.get_device_capability(number), torch.cuda.get_arch_list())
    yield judge_pinning(pins)
    yield judge_share(cores, count)
    if accelerator == "cpu":
        yield Finding("warning", "trainer", "trainer.accelerator=cpu beside a GPU", "set trainer=gpu")


def judge_absence(*, has_driver: bool, built_for: str | None) -> Finding:
    """Why torch sees no GPU.

    Args:
        has_driver: The NVIDIA driver's programs are there.
        built_for: CUDA version that torch was built for; none of the CPU build.
    """
    if not has_driver:
        return Finding("note", "GPU", "none", "training runs on the CPU; small nets are quick enough")
    if built_for is None:
        return Finding("fault", "GPU", "there is one, but torch is the CPU build", "install torch's CUDA build")
    remedy = "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides it: see nvidia-smi"
    return Finding("fault", "GPU", f"there is one, but torch for CUDA {built_for} cannot use it", remedy)


def judge_memory(name: str, free_bytes: int, total_bytes: int) -> Finding:
    """Whether the device's memory is free."""
    found = f"{name}: {to_gib(free_bytes)} of {to_gib(total_bytes)} free"
    remedy = "another process holds memory on it (nvidia-smi names it): end it, or choose trainer.devices=[n]"
    return judge("GPU", found, bad=free_bytes < _LEAST_FREE_SHARE * total_bytes, remedy=remedy)


def judge_kernels(capability: tuple[int, int], built_for: list[str]) -> Finding:
    """Whether torch has kernels for the device, of its generation or (within the major number) an older one."""
    major, minor = capability
    fits = any(arch.startswith(("sm_", "compute_")) and _runs(arch, major, minor) for arch in built_for)
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
    return judge("cores for each GPU", f"{cores / devices:.1f}", bad=cores < _CORES_PER_GPU * devices, remedy=remedy)


def _runs(arch: str, major: int, minor: int) -> bool:
    kind, _, digits = arch.rstrip("af").partition("_")
    built = int(digits[:-1]), int(digits[-1])
    return built <= (major, minor) if kind == "compute" else built[0] == major and built[1] <= minor
