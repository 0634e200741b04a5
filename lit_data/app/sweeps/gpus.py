"""GPUs of this machine, handed out to jobs of a sweep that run side by side."""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import Timeout
from omegaconf import DictConfig

from lit_data.core.errors import ConfigError
from lit_data.core.temp import kernel_lock
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

POLL_S = 0.5
_ON_DEVICES = ("fit", "validate", "test", "predict", "benchmark")
"""Commands that use the devices of the Trainer."""
_ALL_DEVICES = ("auto", "-1")


def list_gpus() -> tuple[str, ...]:
    """Return the GPUs of this machine that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # takes seconds, and is asked for only where jobs run side by side

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return tuple(name.strip() for name in visible.split(",")[:count])


def _read_trainer(cfg: DictConfig, name: str) -> str:
    """Return an option of the Trainer as text; it is `auto` where nothing says it."""
    return str((cfg.get("trainer") or {}).get(name, "auto"))


def uses_gpus(cfg: DictConfig) -> bool:
    """Return True for a job that runs on GPUs where there are some."""
    accelerator = _read_trainer(cfg, "accelerator")
    return cfg.command in _ON_DEVICES and accelerator in ("auto", "gpu", "cuda")


def share_gpus(cfg: DictConfig, *, isolate: str) -> tuple[str, ...]:
    """Return the GPUs to hand out to jobs that run side by side on this machine; mostly none.

    Args:
        cfg: the configuration of the first job, with Hydra's node.
        isolate: of the sweep.

    Raises:
        ConfigError: Jobs name their GPUs, or would stay in processes that cannot change them.
    """
    launcher = cfg.hydra.launcher
    is_parallel = "joblib" in str(launcher._target_) and launcher.n_jobs != 1
    if not is_parallel or not uses_gpus(cfg):
        return ()
    gpus = list_gpus()
    count_gpus(cfg, gpus)  # what it refuses, it refuses before anything runs
    if gpus and isolate == "none":
        raise ConfigError(
            "sweep.isolate=none keeps jobs in processes that stay on their first GPU: remove it "
            "if jobs run side by side"
        )
    return gpus


def count_gpus(cfg: DictConfig, gpus: Sequence[str]) -> int:
    """Return how many of the GPUs that are handed out a job takes, by `trainer.devices`.

    Args:
        cfg: The configuration of the job.
        gpus: All that there are.

    Raises:
        ConfigError: It names some, where each job gets its own.
    """
    if not gpus or not uses_gpus(cfg):
        return 0
    devices = _read_trainer(cfg, "devices")
    if devices in _ALL_DEVICES:
        return len(gpus)
    if not devices.isdecimal():
        raise ConfigError(
            f"trainer.devices={devices} names GPUs, but the sweep assigns GPUs to jobs that run "
            "side by side: give their number"
        )
    return min(int(devices), len(gpus))


@contextmanager
def holding_gpus(folder: Path, gpus: Sequence[str], count: int) -> Iterator[dict[str, str]]:
    """Hold GPUs that no other job of a sweep on this machine holds; wait while all are taken.

    Args:
        folder: Of the sweep.
        gpus: All that there are.
        count: How many the job takes.

    Yields:
        Variables for the environment of the job.
    """
    if not count:
        yield {}
        return
    folder = folder / ".gpus"
    folder.mkdir(exist_ok=True)
    with ExitStack() as holding:
        is_waiting = False
        while len(names := _try_gpus(folder, gpus, count, holding)) < count:
            holding.close()  # or two jobs could wait for each other's
            if not is_waiting:
                log.info("waiting for %d of %s", count, counted(len(gpus), "GPU"))
                is_waiting = True
            time.sleep(POLL_S)
        yield {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def _try_gpus(folder: Path, gpus: Sequence[str], count: int, holding: ExitStack) -> list[str]:
    """Lock GPUs that are free, at most so many, and return their names."""
    names: list[str] = []
    for name in gpus:
        # The folder may be shared by machines, whose GPUs have the same numbers.
        file_name = re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-{name}.lock")
        with suppress(Timeout):
            if len(names) < count:
                holding.enter_context(kernel_lock(folder / file_name).acquire(blocking=False))
                names.append(name)
    return names
