"""Choice of who draws defects: the workers of the loader, or the device of the batch."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import lightning as L
import numpy as np
import torch

from lit_data.checks import check_choice
from lit_data.datasets import PatchDataset
from lit_data.datasets.writers import DefectWriter
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.loading.device_timer import read_clock
from lit_data.loading.machine import count_cores
from lit_data.synthesis import render, sample_plan
from lit_data.types import Array, read_rows

log = logging.getLogger(__name__)


Backend = Literal["auto", "cpu", "device"]
_CPU: Final = torch.device("cpu")
_REPEATS: Final = 3
_CANNOT: Final = (
    "backend=cpu draws into stored pixels: it needs an integer dtype, three stored channels "
    "(layouts channels and files) and pixels on the host (not cache=device). Set data.backend=auto"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Backend of a work, and the reason.

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
    """Choice of who draws the defects, made once for a datamodule.

    Args:
        backend: As configured.

    Raises:
        ConfigError: It is none of `Backend`.
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
        trainer: L.Trainer | None,
    ) -> DefectWriter | None:
        """Return the writer of the workers of a loader; None where the device of the batch draws.

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
        if self.choice is None:
            places = Places.of(loader, trainer)
            batch_size = loader.count_batch(places.world_size)
            self.choice = choose_drawing(dataset, writer, batch_size, places)
        return writer if self.choice.backend == "cpu" else None

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """Return the choice as plain data, for ``loader.json``."""
        return {"defects": asdict(self.choice)} if self.choice else {}


@dataclass(frozen=True, slots=True)
class Places:
    """Workers and device of a run.

    Args:
        workers: Of the loader, for each rank; 0 is the main thread.
        device: Where batches go.
        world_size: With several ranks nothing is measured, since each could find something else.
    """

    workers: int
    device: torch.device
    world_size: int = 1

    @classmethod
    def of(cls, loader: LoaderOptions, trainer: L.Trainer | None) -> "Places":
        """Return those of a loader and of a Trainer, if there is one."""
        if trainer is not None:
            ranks, device = trainer.world_size, trainer.strategy.root_device
        else:
            ranks, device = 1, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        workers = loader.num_workers
        if loader.worker_kind == "inline":
            workers = 0
        elif workers == "auto":
            workers = count_cores(ranks)
        return cls(workers, device, ranks)

    def choose(
        self,
        work: str,
        by_worker: Callable[[], object],
        on_device: Callable[[], object],
        count: int,
    ) -> Placement:
        """Measure both, and log the quicker one.

        A device works between two steps, so all of its time counts. Workers do so beside the
        training: where that happens on a CUDA device, their time counts for as much as all of them
        together would hold up a batch; where it happens on their own cores, all of it counts.

        Args:
            work: What it is called in the message.
            by_worker: The work on some samples, as a worker does it.
            on_device: The same on the device.
            count: How many samples.
        """
        has_gpu = self.device.type == "cuda"
        backend: Literal["cpu", "device"]
        if self.world_size > 1:
            backend = "device" if has_gpu else "cpu"
            reason = f"{self.world_size} ranks must agree, so nothing was measured"
            return Placement(backend, reason)
        cpu_us = measure(by_worker, self.device) / count
        device_us = measure(on_device, self.device) / count
        delay_us = cpu_us / max(1, self.workers) if has_gpu else cpu_us
        backend = "cpu" if delay_us <= device_us else "device"
        reason = (
            f"a sample takes {self.device.type} {device_us:.3g} us, a worker {cpu_us:.3g} us; "
            f"{self.workers} of them"
        )
        log.info("%s by the %s: %s", work, "workers" if backend == "cpu" else "device", reason)
        return Placement(backend, reason, cpu_us, device_us)


def choose_drawing(
    dataset: PatchDataset, writer: DefectWriter, batch_size: int, places: Places
) -> Placement:
    """Choose who draws the defects of a dataset, which is not empty: measured on its first samples.

    Args:
        dataset: The samples.
        writer: What a worker would use.
        batch_size: Samples that are drawn together on the device, and by a worker.
        places: Where.
    """
    count = min(batch_size, len(dataset))
    rows = read_rows(dataset, np.arange(count))
    return places.choose(
        "defects: drawn",
        lambda: _draw_by_worker(writer, rows),
        lambda: _draw_on_device(writer, rows, places.device),
        count,
    )


def _draw_by_worker(writer: DefectWriter, rows: dict[str, Array]) -> None:
    images = rows["image"].copy()
    masks = np.empty((len(images), 1, *images.shape[2:]), np.uint8)
    writer.write_into({"image": images, "mask": masks}, rows["index"], 0)


def _draw_on_device(writer: DefectWriter, rows: dict[str, Array], device: torch.device) -> None:
    images = torch.from_numpy(rows["image"]).to(device).to(torch.float32)
    plan = sample_plan(writer.spec, writer.seed, 0, rows["index"], rows["image"].shape[1:])
    render(images, plan.to(device), writer.values)


def measure(draw: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few times, after one that warms up: microseconds."""
    draw()
    times_s = []
    for _ in range(_REPEATS):
        began_s = read_clock(device)
        draw()
        times_s.append(read_clock(device) - began_s)
    return min(times_s) * 1e6
