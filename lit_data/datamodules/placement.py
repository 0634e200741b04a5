"""Choice of where defects are drawn: in the loader's workers, or on the device of the batch."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning import Trainer

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.machine import count_cores
from lit_data.core.types import Array, read_rows
from lit_data.datasets import PatchDataset
from lit_data.loading import LoaderOptions
from lit_data.loading.device_timer import read_clock
from lit_data.synthesis import render, sample_plan
from lit_data.synthesis.writer import DefectWriter

log = logging.getLogger(__name__)


Backend = Literal["auto", "cpu", "device"]
_REPEATS = 3
_CANNOT = (
    "backend=cpu draws into stored pixels: it needs an integer dtype, three stored channels "
    "(layouts channels and files) and pixels on the host (not cache=device). Set data.backend=auto"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Backend that draws, and the reason for it.

    Attributes:
        backend: Chosen backend; `cpu` means the workers.
        reason: Readable reason.
        cpu_us: Measured time of one worker for one sample; None if nothing was measured.
        device_us: Measured time of the device for one sample; None if nothing was measured.
    """

    backend: Literal["cpu", "device"]
    reason: str
    cpu_us: float | None = None
    device_us: float | None = None


class DrawingBackend:
    """Chooses where defects are drawn, once for a datamodule.

    Args:
        backend: Configured backend.

    Raises:
        ConfigError: The backend is not one of `Backend`.
    """

    def __init__(self, backend: Backend) -> None:
        check_choice("backend", backend, get_args(Backend))
        self.backend = backend
        self.choice: Placement | None = None
        if backend != "auto":
            self.choice = Placement(backend, "as configured")

    def choose(
        self,
        dataset: PatchDataset,
        writer: DefectWriter | None,
        loader: LoaderOptions,
        trainer: Trainer | None,
    ) -> DefectWriter | None:
        """Return the writer for a loader's workers; None if the device of the batch draws.

        Args:
            dataset: Samples without defects.
            writer: Writer that workers would use; None if they cannot draw.
            loader: Options of the loader.
            trainer: The Trainer, if there is one.

        Raises:
            ConfigError: Workers are configured to draw but cannot.
        """
        if writer is None or not dataset.pixels:
            if self.backend == "cpu":
                raise ConfigError(_CANNOT)
            return None
        if not len(dataset):
            return None
        if self.choice is None:
            self.choice = choose_drawing(dataset, writer, loader, trainer)
        return writer if self.choice.backend == "cpu" else None

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """Return the choice as plain data, for ``loader.json``."""
        return {"defects": asdict(self.choice)} if self.choice else {}


def choose_drawing(
    dataset: PatchDataset, writer: DefectWriter, loader: LoaderOptions, trainer: Trainer | None
) -> Placement:
    """Measure on the first samples of a dataset where defects are drawn faster, and log it.

    Args:
        dataset: Samples, at least one.
        writer: Writer that a worker would use.
        loader: Options of the loader, with batch size and workers.
        trainer: Trainer with device and ranks; without one, the GPU is used if there is one.
    """
    ranks = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if trainer is not None:
        ranks, device = trainer.world_size, trainer.strategy.root_device
    has_gpu = device.type == "cuda"
    if ranks > 1:
        # Ranks could measure different results, and then their samples would differ.
        reason = f"{ranks} ranks must agree, so nothing was measured"
        return Placement("device" if has_gpu else "cpu", reason)
    count = min(loader.count_batch(ranks), len(dataset))
    rows = read_rows(dataset, np.arange(count))
    cpu_us = measure(partial(_draw_by_worker, writer, rows), device) / count
    device_us = measure(partial(_draw_on_device, writer, rows, device), device) / count
    workers = _count_workers(loader, ranks)
    # A device draws between two steps, so all of its time counts. Workers draw while a GPU trains,
    # and share the time; on the CPU they draw on the cores that train.
    delay_us = cpu_us / max(1, workers) if has_gpu else cpu_us
    is_by_workers = delay_us <= device_us
    worker_text = {0: "the main thread", 1: "a worker"}.get(workers, f"each of {workers} workers")
    reason = f"a sample takes {device_us:.3g} us on the {device.type} and {cpu_us:.3g} us in {worker_text}"
    log.info(
        "synthetic defects are drawn by the %s: %s",
        "workers" if is_by_workers else "device",
        reason,
    )
    return Placement("cpu" if is_by_workers else "device", reason, cpu_us, device_us)


def _count_workers(loader: LoaderOptions, ranks: int) -> int:
    """Return the number of workers of a rank; 0 means the main thread."""
    if loader.worker_kind == "inline":
        return 0
    return count_cores(ranks) if loader.num_workers == "auto" else loader.num_workers


def _draw_by_worker(writer: DefectWriter, rows: dict[str, Array]) -> None:
    images = rows["image"].copy()
    masks = np.empty((len(images), 1, *images.shape[2:]), np.uint8)
    writer.write_into({"image": images, "mask": masks}, rows["index"], 0)


def _draw_on_device(writer: DefectWriter, rows: dict[str, Array], device: torch.device) -> None:
    images = torch.from_numpy(rows["image"]).to(device).to(torch.float32)
    plan = sample_plan(writer.spec, writer.seed, 0, rows["index"], rows["image"].shape[1:])
    render(images, plan.to(device), writer.values)


def measure(draw: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of a few times, in microseconds."""
    draw()  # the first call takes longer
    times_s = []
    for _ in range(_REPEATS):
        began_s = read_clock(device)
        draw()
        times_s.append(read_clock(device) - began_s)
    return min(times_s) * 1e6
