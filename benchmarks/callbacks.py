"""Suite ``callbacks``: cost of each callback for a training step that needs nothing of it."""

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.app.benchmarks.training import ReplayLoader
from lit_data.app.build import build_callbacks
from lit_data.app.terminal import quieten
from lit_data.testing import QUIET

log = logging.getLogger(__name__)

STEP_S = 5e-3
"""A short training step, of which the cost is given as a share."""
_COLUMNS = ("callback", "us", "share_of_5_ms")
_HEADINGS = {
    "callback": "callback",
    "us": "us a step",
    "share_of_5_ms": "share of 5 ms",
}
_BLOCKS = 10
_FEATURES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksSuite(Suite):
    """Costs of the callbacks of a configuration, on top of the step of a small net.

    The net is trained without callbacks, with each of lit_data's, and with all, in turn.
    summary.json holds ``step_us``, ``NAME_us`` and ``NAME_share_of_5_ms``.

    Args:
        batch_size: Samples of a batch.
        steps: Of each training.
        warmup_batches: Steps before them.
    """

    repeats: int = 7
    batch_size: int = 8
    steps: int = 300
    warmup_batches: int = 3

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        return _measure(cfg, self)


def _measure(cfg: DictConfig, options: CallbacksSuite) -> dict[str, Any]:
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
        _COLUMNS,
        Path(cfg.paths.run),
        "cost of callbacks",
        headings=_HEADINGS,
    )
    metrics = {"benchmark/batch_size": options.batch_size, "benchmark/step_us": base_s * 1e6}
    return metrics | collect(lines, _COLUMNS)


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


def _train(cfg: DictConfig, options: CallbacksSuite, callbacks: Sequence[Callback]) -> float:
    clock = StepCost(options.warmup_batches)
    steps = options.steps + options.warmup_batches + 1
    samples = options.batch_size
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
