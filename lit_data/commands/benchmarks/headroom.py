"""Mode ``headroom``: how fast training would be if batches cost nothing."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, Generic, TypeVar

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.batch_form import count_samples
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.build import build_datamodule, build_model, build_trainer, name_classes
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import format_batch
from lit_data.loading.device_timer import read_clock

log = logging.getLogger(__name__)


T = TypeVar("T")


def run_headroom(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train with the loader and with replayed batches, in turn; see `lit_data.commands.benchmark.run`."""
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
        batches = batches or cache_batches(datamodule, options.cached_batches, _choose_device(cfg))
        replay = ReplayLoader(batches, options.steps + options.warmup_batches)
        speeds["headroom"].append(time_steps(train_dataloaders=replay, val_dataloaders=[]))
    real, free = median(speeds["fit"]), median(speeds["headroom"])
    log.info(
        "Training reaches %.0f samples/s; with batches that cost nothing it would reach %.0f: %.1f %% of that.",
        *(real, free, 100 * real / free),
    )
    return {
        "benchmark/batch_size": datamodule.loader.count_batch(1),
        "benchmark/fit_samples_per_s": real,
        "benchmark/headroom_samples_per_s": free,
        "benchmark/fit_share_of_headroom": real / free,
    }


class ReplayLoader(Generic[T]):
    """The same few batches over and over.

    Args:
        batches: What to repeat.
        length: Batches in all.
    """

    def __init__(self, batches: Sequence[T], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        return (self.batches[number % len(self.batches)] for number in range(self.length))


class TrainingClock(L.Callback):
    """Samples trained per second, after some steps of warm-up.

    Args:
        warmup_steps: Steps that are not counted.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.samples, self._began_s, self._ended_s = 0, 0.0, 0.0

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step <= self.warmup_steps:
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
    """The first training batches as the model sees them, on the device.

    Args:
        datamodule: An opened datamodule.
        count: How many, at most.
        device: Where the model is.
    """
    loader, batches = datamodule.make_loader("train"), list[Any]()
    for batch in loader:
        planned = move_data_to_device(datamodule.plan_batch(batch, "train"), device)
        finished = datamodule.finish_batch(planned, "train")
        batches.append(format_batch(finished, datamodule.batch_format, datamodule.channel_names))
        if len(batches) == count:
            break
    loader.close()
    return batches


def time_training(
    cfg: DictConfig,
    *callbacks: L.Callback,
    steps: int,
    warmup_steps: int,
    **source: Any,  # noqa: ANN401 - fit's own arguments
) -> float:
    """Samples trained per second, after some steps of warm-up.

    Args:
        cfg: Model and Trainer.
        callbacks: What else looks on.
        steps: How many are counted.
        warmup_steps: How many are not.
        source: Arguments of ``Trainer.fit`` that name the batches.
    """
    clock = TrainingClock(warmup_steps)
    train_steps(cfg, clock, *callbacks, steps=steps + warmup_steps, **source)
    return clock.samples_per_s


def train_steps(
    cfg: DictConfig,
    *callbacks: L.Callback,
    steps: int,
    **source: Any,  # noqa: ANN401 - fit's own arguments
) -> L.LightningModule:
    """Train the configured model for some steps, without validation, logs and checkpoints; return
    it.

    Args:
        cfg: Model and Trainer.
        callbacks: All that there are.
        steps: How many.
        source: Arguments of ``Trainer.fit`` that name the batches.
    """
    trainer = build_trainer(
        cfg,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=steps,
    )
    model = build_model(cfg)
    trainer.fit(model, **source)
    return model


def _choose_device(cfg: DictConfig) -> torch.device:
    """The device that the configured Trainer trains on."""
    trainer = build_trainer(cfg, callbacks=[], logger=False, enable_checkpointing=False)
    return trainer.strategy.root_device
