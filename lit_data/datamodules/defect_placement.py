"""Who draws the defects: the workers of the loader, or the device of the batch."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import lightning as L
import numpy as np
import torch

from lit_data.checks import check_choice
from lit_data.datasets import StripeDataset
from lit_data.datasets.stripes.drawn import DefectWriter
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.loading.device_timer import read_clock
from lit_data.loading.machine import count_cores
from lit_data.synthesis import render, sample_plan
from lit_data.types import Array

log = logging.getLogger(__name__)


Backend = Literal["auto", "cpu", "device"]
_REPEATS: Final = 3
_CANNOT: Final = (
    "backend=cpu draws into stored pixels: it needs an integer dtype, three stored channels (layouts channels and "
    "files) and pixels on the host (not cache=device). Set data.backend=auto"
)


@dataclass(frozen=True, slots=True)
class DrawingChoice:
    """Who draws, and why.

    Attributes:
        backend: `cpu` are the workers.
        reason: In words.
        cpu_us: Measured time of one worker for one sample, None if nothing was measured.
        device_us: Measured time of the device for one sample.
    """

    backend: Literal["cpu", "device"]
    reason: str
    cpu_us: float | None = None
    device_us: float | None = None


class DrawingBackend:
    """Chooses who draws, once for a datamodule.

    Args:
        backend: As configured.

    Raises:
        ConfigError: It is none of `Backend`.
    """

    def __init__(self, backend: Backend) -> None:
        check_choice("backend", backend, get_args(Backend))
        self.backend, self.choice = backend, None if backend == "auto" else DrawingChoice(backend, "as configured")

    def choose(
        self, dataset: StripeDataset, writer: DefectWriter | None, loader: LoaderOptions, trainer: L.Trainer | None
    ) -> DefectWriter | None:
        """What the workers of a loader draw with; none where the device of the batch draws.

        Args:
            dataset: The samples, without defects.
            writer: What workers would draw with; none where they cannot.
            loader: The options of the loader.
            trainer: The Trainer, if there is one.

        Raises:
            ConfigError: Workers shall draw and cannot.
        """
        if writer is None or not dataset.pixels:
            if self.backend == "cpu":
                raise ConfigError(_CANNOT)
            return None
        if not len(dataset):
            return None
        self.choice = self.choice or _choose(dataset, writer, loader, trainer)
        return writer if self.choice.backend == "cpu" else None

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """For ``loader.json``."""
        return {"defects": asdict(self.choice)} if self.choice else {}


def _choose(
    dataset: StripeDataset, writer: DefectWriter, loader: LoaderOptions, trainer: L.Trainer | None
) -> DrawingChoice:
    cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = trainer.world_size if trainer else 1
    workers = count_cores(ranks) if loader.num_workers == "auto" else loader.num_workers
    return choose_backend(
        dataset,
        writer,
        batch_size=loader.count_batch(ranks),
        workers=0 if loader.worker_kind == "inline" else workers,
        device=trainer.strategy.root_device if trainer else cuda,
        world_size=ranks,
    )


def choose_backend(
    dataset: StripeDataset,
    writer: DefectWriter,
    *,
    batch_size: int,
    workers: int,
    device: torch.device,
    world_size: int,
) -> DrawingChoice:
    """Measure both on the first samples of a set, and print what was found.

    A device draws between two steps, so all of its time counts. Workers draw beside the training: where that happens on
    a CUDA device, their time counts for as much as all of them together would hold up a batch; where it happens on
    their own cores, all of it counts.

    Args:
        dataset: The samples, which may not be empty.
        writer: What a worker would use.
        batch_size: Samples that are drawn together on the device, and by a worker.
        workers: Of the loader; 0 is the main thread.
        device: Where batches go.
        world_size: With several ranks nothing is measured, since each could find something else.
    """
    if world_size > 1:
        backend: Literal["cpu", "device"] = "device" if device.type == "cuda" else "cpu"
        return DrawingChoice(backend, f"{world_size} ranks must agree, so nothing was measured")
    count = min(batch_size, len(dataset))
    rows = _read_clean(dataset, count)
    cpu_us = _measure(lambda: _draw_by_worker(writer, rows), device) / count
    device_us = _measure(lambda: _draw_on_device(writer, rows, device), device) / count
    beside = cpu_us / max(1, workers) if device.type == "cuda" else cpu_us
    choice = DrawingChoice(
        "cpu" if beside <= device_us else "device",
        f"{device.type} draws a sample in {device_us:.3g} us, a worker in {cpu_us:.3g} us, with {workers} of them",
        cpu_us,
        device_us,
    )
    log.info("defects: drawn by the %s: %s", "workers" if choice.backend == "cpu" else "device", choice.reason)
    return choice


def _read_clean(dataset: StripeDataset, count: int) -> dict[str, Array]:
    rows = {name: np.empty((count, *field.shape), field.dtype) for name, field in dataset.fields.items()}
    dataset.write_into(rows, np.arange(count), 0)
    return rows


def _draw_by_worker(writer: DefectWriter, rows: dict[str, Array]) -> None:
    images = rows["image"].copy()
    masks = np.empty((len(images), 1, *images.shape[2:]), np.uint8)
    writer.write_into(images, masks, rows["index"], 0)


def _draw_on_device(writer: DefectWriter, rows: dict[str, Array], device: torch.device) -> None:
    images = torch.from_numpy(rows["image"]).to(device).to(torch.float32)
    plan = sample_plan(writer.spec, writer.seed, 0, rows["index"], rows["image"].shape[1:])
    render(images, plan.to(device), writer.values)


def _measure(draw: Callable[[], None], device: torch.device) -> float:
    """The shortest of a few times, after one that warms up: microseconds."""
    draw()
    times_s = []
    for _ in range(_REPEATS):
        began_s = read_clock(device)
        draw()
        times_s.append(read_clock(device) - began_s)
    return min(times_s) * 1e6
