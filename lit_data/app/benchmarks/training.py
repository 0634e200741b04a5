"""Mode ``headroom``: the speed of training if batches cost nothing."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.benchmarks.table import report_lines
from lit_data.app.build import build_bare_trainer, build_datamodule, build_model, name_classes
from lit_data.core.batch_form import count_samples
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import format_batch
from lit_data.loading.device_timer import read_clock

log = logging.getLogger(__name__)


T = TypeVar("T")

_HEADROOM_COLUMNS = ("batches", "samples_per_s", "share")
_HEADROOM_HEADINGS = {"batches": "batches", "samples_per_s": "samples/s", "share": "share"}
_HEADROOM_LABELS = {"fit": "as they are loaded", "headroom": "that cost nothing"}


def run_headroom(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train with the loader and with replayed batches; see `lit_data.app.benchmark.run`."""
    datamodule = build_datamodule(cfg)
    name_classes(cfg, datamodule)
    datamodule.setup("fit")
    batches: list[Any] = []
    speeds: dict[str, list[float]] = {"fit": [], "headroom": []}
    time_steps = partial(
        time_training, cfg, steps=options.steps, warmup_steps=options.warmup_batches
    )
    for _ in range(options.repeats):
        speeds["fit"].append(time_steps(datamodule=datamodule))
        if not batches:  # not before a training, which chooses the workers of the loader
            trainer = build_bare_trainer(cfg)
            device = trainer.strategy.root_device
            batches = cache_batches(datamodule, options.cached_batches, device)
        replay = ReplayLoader(batches, options.steps + options.warmup_batches)
        speeds["headroom"].append(time_steps(train_dataloaders=replay, val_dataloaders=[]))
    medians = {name: median(values) for name, values in speeds.items()}
    free = medians["headroom"]
    lines = []
    for name, speed in medians.items():
        lines.append({"batches": name, "samples_per_s": speed, "share": speed / free})
    title = f"{cfg.name}: training with batches"
    report_lines(
        lines,
        _HEADROOM_COLUMNS,
        Path(cfg.paths.run),
        title,
        headings=_HEADROOM_HEADINGS,
        labels=_HEADROOM_LABELS,
    )
    return {
        "benchmark/batch_size": datamodule.loader.count_batch(1),
        "benchmark/fit_samples_per_s": medians["fit"],
        "benchmark/headroom_samples_per_s": free,
        "benchmark/fit_share_of_headroom": medians["fit"] / free,
    }


@dataclass(frozen=True)
class ReplayLoader(Generic[T]):
    """The same few batches over and over.

    Args:
        batches: Those to repeat.
        length: Batches in all.
    """

    batches: Sequence[T]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        for number in range(self.length):
            yield self.batches[number % len(self.batches)]


class TrainingClock(Callback):
    """Samples trained per second, after some steps of warm-up.

    Args:
        warmup_steps: Steps that are not counted.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.samples = 0
        self._began_s = 0.0
        self._ended_s = 0.0

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step <= self.warmup_steps:
            # waits for the device, so that its work of the warm-up is not counted
            self._began_s = read_clock(pl_module.device)
            return
        self.samples += count_samples(batch)
        if step >= trainer.max_steps:
            self._ended_s = read_clock(pl_module.device)

    @property
    def samples_per_s(self) -> float:
        """Speed of the counted steps."""
        return self.samples / (self._ended_s - self._began_s)


@torch.no_grad()
def cache_batches(datamodule: BaseDataModule, count: int, device: torch.device) -> list[Any]:
    """Return the first training batches as the model sees them, on the device.

    Args:
        datamodule: An opened datamodule.
        count: How many, at most.
        device: Where the model is.
    """
    loader = datamodule.make_loader("train")
    batches: list[Any] = []
    for batch in loader:
        planned = move_data_to_device(datamodule.plan_batch(batch, "train"), device)
        finished = datamodule.finish_batch(planned, "train")
        batches.append(format_batch(finished, datamodule.batch_format, datamodule.channel_names))
        if len(batches) == count:
            break
    loader.close()  # its workers would take time from what is measured next
    return batches


def time_training(
    cfg: DictConfig,
    *callbacks: Callback,
    steps: int,
    warmup_steps: int,
    **source: Any,  # noqa: ANN401 - fit's own arguments
) -> float:
    """Measure the samples trained per second, after some steps of warm-up.

    Args:
        cfg: Model and Trainer.
        callbacks: Further callbacks.
        steps: Steps that are counted.
        warmup_steps: Steps before them.
        source: Arguments of ``Trainer.fit`` that name the batches.
    """
    clock = TrainingClock(warmup_steps)
    train_steps(cfg, clock, *callbacks, steps=steps + warmup_steps, **source)
    return clock.samples_per_s


def train_steps(
    cfg: DictConfig,
    *callbacks: Callback,
    steps: int,
    **source: Any,  # noqa: ANN401 - fit's own arguments
) -> LightningModule:
    """Train the configured model for some steps, without validation, logs and checkpoints.

    Args:
        cfg: Model and Trainer.
        callbacks: All callbacks.
        steps: Number of steps.
        source: Arguments of ``Trainer.fit`` that name the batches.

    Returns:
        The model.
    """
    trainer = build_bare_trainer(
        cfg,
        callbacks=[*callbacks],
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,  # steps alone end it, also where an epoch is shorter
        max_steps=steps,
    )
    model = build_model(cfg)
    trainer.fit(model, **source)
    return model
