"""Mode ``callbacks``: the cost of the callbacks of a configuration where nothing needs them."""

import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig
from torch import Tensor, nn
from typing_extensions import override

from lit_data.commands.benchmarks.headroom import ReplayLoader
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.commands.build import build_callbacks
from lit_data.commands.terminal import quieten

log = logging.getLogger(__name__)


STEP_S: Final = 5e-3
"""A short training step, of which the cost is given as a share."""
COLUMNS: Final = ("callback", "us", "share_of_5_ms")
_HEADINGS: Final = {"callback": "callback", "us": "us a step", "share_of_5_ms": "share of 5 ms"}
_BLOCKS: Final = 10
_CHANNELS: Final = 8
_SIZE_PX: Final = 16


def run_overhead(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train a small net without callbacks, with each of the configuration, and with all; in turn.

    See `lit_data.commands.benchmark.run`.
    """
    ways = _list_ways(cfg)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    quieten()
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.WARNING)  # each of many Trainers would say the same
    try:
        for _ in range(options.repeats):
            for way, names in ways.items():
                callbacks = build_callbacks(cfg)  # new ones, as many hold a state
                step_s = _train(cfg, options, [callbacks[name] for name in names])
                seconds[way].append(step_s)
    finally:
        lightning.setLevel(level)
    base_s = median(seconds["none"])
    lines = []
    for way in list(ways)[1:]:
        # of each round by itself: what the machine does beside hits both alike
        costs_s = [s - none for s, none in zip(seconds[way], seconds["none"], strict=True)]
        cost_s = median(costs_s)
        lines.append({"callback": way, "us": cost_s * 1e6, "share_of_5_ms": cost_s / STEP_S})
    log.info("a step without callbacks takes %.0f us; on top of that:", base_s * 1e6)
    report_lines(lines, COLUMNS, Path(cfg.paths.run), "cost of callbacks", headings=_HEADINGS)
    metrics = {"benchmark/batch_size": options.batch_sizes[0], "benchmark/step_us": base_s * 1e6}
    return metrics | collect(lines, COLUMNS)


def _list_ways(cfg: DictConfig) -> dict[str, list[str]]:
    """List the names of the callbacks that each row trains with, those without any first."""
    names = []
    for name, node in cfg.callbacks.items():
        if str((node or {}).get("_target_", "")).startswith("lit_data."):
            names.append(str(name))
    return {"none": [], **{name: [name] for name in names}, "all": names}


class SmallNet(L.LightningModule):
    """Small convolutions with batch norm, 42 parameter tensors: time goes to what surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(_BLOCKS):
            layers.append(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, groups=8))
            layers.append(nn.BatchNorm2d(_CHANNELS))
            layers.append(nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(_CHANNELS * _SIZE_PX**2, 2))

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class MedianStep(L.Callback):
    """Median time from the end of one step to the end of the next.

    Args:
        warmup_steps: Steps that are not counted.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self._ends_s: list[float] = []

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._ends_s.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        ends = self._ends_s[self.warmup_steps :]
        return median(after - before for before, after in itertools.pairwise(ends))


def _train(cfg: DictConfig, options: BenchmarkOptions, callbacks: Sequence[L.Callback]) -> float:
    clock = MedianStep(options.warmup_batches)
    steps = options.steps + options.warmup_batches + 1
    samples = options.batch_sizes[0]
    batch = {
        "image": torch.zeros(samples, _CHANNELS, _SIZE_PX, _SIZE_PX),
        "label": torch.arange(samples) % 2,
    }
    trainer = L.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=1,
        callbacks=[*callbacks, clock],
        max_steps=steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=cfg.paths.run,
    )
    torch.manual_seed(0)
    trainer.fit(SmallNet(), ReplayLoader([batch], steps))
    return clock.seconds
