"""Modes ``headroom`` and ``callbacks``: the speed of training if batches cost nothing, and the cost of callbacks."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig
from torch import Tensor, nn
from typing_extensions import override

from lit_data.batch_form import count_samples
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.commands.build import (
    build_callbacks,
    build_datamodule,
    build_model,
    build_trainer,
    name_classes,
)
from lit_data.commands.terminal import quieten
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import format_batch
from lit_data.loading.device_timer import read_clock
from lit_data.testing import QUIET

log = logging.getLogger(__name__)


T = TypeVar("T")

_HEADROOM_COLUMNS = ("batches", "samples_per_s", "share")
_HEADROOM_HEADINGS = {"batches": "batches", "samples_per_s": "samples/s", "share": "share"}
_HEADROOM_LABELS = {"fit": "as they are loaded", "headroom": "that cost nothing"}

STEP_S = 5e-3
"""A short training step, of which the cost is given as a share."""
_OVERHEAD_COLUMNS = ("callback", "us", "share_of_5_ms")
_OVERHEAD_HEADINGS = {
    "callback": "callback",
    "us": "us a step",
    "share_of_5_ms": "share of 5 ms",
}
_BLOCKS = 10
_FEATURES = 8


def run_headroom(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train with the loader and with replayed batches; see `lit_data.commands.benchmark.run`."""
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
            trainer = build_trainer(cfg, callbacks=[], logger=False, enable_checkpointing=False)
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
    trainer = build_trainer(
        cfg,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,  # steps alone end it, also where an epoch is shorter
        max_steps=steps,
    )
    model = build_model(cfg)
    trainer.fit(model, **source)
    return model


def run_overhead(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train a small net without callbacks, with each of the configuration, and with all; in turn.

    See `lit_data.commands.benchmark.run`.
    """
    ways = _list_ways(cfg)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    quieten()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the thread whose time counts does all the work of a step
    logging.disable(logging.WARNING)  # each of many Trainers would say the same
    try:
        for _ in range(options.repeats):
            for way, names in ways.items():
                callbacks = build_callbacks(cfg)  # new ones, as many hold a state
                step_s = _train(cfg, options, [callbacks[name] for name in names])
                seconds[way].append(step_s)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    base_s = min(seconds["none"])
    lines = []
    for way in list(ways)[1:]:
        cost_s = min(seconds[way]) - base_s  # other work on the machine only adds time
        lines.append({"callback": way, "us": cost_s * 1e6, "share_of_5_ms": cost_s / STEP_S})
    log.info("a step without callbacks takes %.0f us; on top of that:", base_s * 1e6)
    report_lines(
        lines,
        _OVERHEAD_COLUMNS,
        Path(cfg.paths.run),
        "cost of callbacks",
        headings=_OVERHEAD_HEADINGS,
    )
    metrics = {"benchmark/batch_size": options.batch_sizes[0], "benchmark/step_us": base_s * 1e6}
    return metrics | collect(lines, _OVERHEAD_COLUMNS)


def _list_ways(cfg: DictConfig) -> dict[str, list[str]]:
    """List the names of the callbacks that each row trains with, those without any first."""
    names = []
    for name, node in cfg.callbacks.items():
        if str((node or {}).get("_target_", "")).startswith("lit_data."):
            names.append(str(name))
    return {"none": [], **{name: [name] for name in names}, "all": names}


class SmallNet(LightningModule):
    """Small layers with batch norm, 42 parameter tensors: time goes to what surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(_BLOCKS):
            layers.append(nn.Linear(_FEATURES, _FEATURES))
            layers.append(nn.BatchNorm1d(_FEATURES))
            layers.append(nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Linear(_FEATURES, 2))

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["features"]), batch["label"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class StepCost(Callback):
    """Processor time of the training thread from the end of one step to the end of the next.

    Its lowest decile is what a step costs: other work on the machine only adds to a step's time.

    Args:
        warmup_steps: Steps that are not counted.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self._ends_s: list[float] = []

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._ends_s.append(time.thread_time())

    @property
    def seconds(self) -> float:
        """Lowest decile of the steps, seconds."""
        ends = self._ends_s[self.warmup_steps :]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return float(np.quantile(steps, 0.1))


def _train(cfg: DictConfig, options: BenchmarkOptions, callbacks: Sequence[Callback]) -> float:
    clock = StepCost(options.warmup_batches)
    steps = options.steps + options.warmup_batches + 1
    samples = options.batch_sizes[0]
    torch.manual_seed(0)
    batch = {
        "features": torch.randn(samples, _FEATURES),
        "label": torch.arange(samples) % 2,
    }
    settings = {**QUIET, "accelerator": cfg.trainer.accelerator}
    trainer = Trainer(
        **settings,
        callbacks=[*callbacks, clock],
        max_steps=steps,
        max_epochs=1,
        default_root_dir=cfg.paths.run,
    )
    trainer.fit(SmallNet(), ReplayLoader([batch], steps))
    return clock.seconds
