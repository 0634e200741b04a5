"""Mode ``callbacks``: what the callbacks of a configuration cost a training step that needs nothing of them."""

import itertools
import logging
import time
from collections.abc import Sequence
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
from lit_data.commands.build import build_callbacks
from lit_data.commands.terminal import quieten

log = logging.getLogger(__name__)


STEP_S: Final = 5e-3
"""A short training step, of which the cost is given as a share."""
_BLOCKS: Final = 10
_CHANNELS: Final = 8
_SIZE_PX: Final = 16


def run_overhead(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Train a small net without callbacks, with each of the configuration, and with all; in turn."""
    names = [
        name
        for name, node in cfg.callbacks.items()
        if str((node or {}).get("_target_", "")).startswith("lit_data.")
    ]
    rows: dict[str, list[str]] = {
        "none": [],
        **{str(name): [str(name)] for name in names},
        "all": [str(n) for n in names],
    }
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    quieten()
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.WARNING)  # each of many Trainers would say the same
    try:
        for _ in range(options.repeats):
            for row, chosen in rows.items():
                callbacks = build_callbacks(cfg)
                seconds[row].append(_train(cfg, options, [callbacks[name] for name in chosen]))
    finally:
        lightning.setLevel(level)
    base = median(seconds["none"])
    found: dict[str, Any] = {
        "benchmark/batch_size": options.batch_sizes[0],
        "benchmark/step_us": base * 1e6,
    }
    for row in list(rows)[1:]:
        cost = median(
            times - none for times, none in zip(seconds[row], seconds["none"], strict=True)
        )
        found |= {
            f"benchmark/{row}_us": cost * 1e6,
            f"benchmark/{row}_share_of_5_ms": cost / STEP_S,
        }
        log.info(
            "%-24s %6.0f us a step, %5.2f %% of a step of 5 ms",
            row,
            cost * 1e6,
            100 * cost / STEP_S,
        )
    return found


class SmallNet(L.LightningModule):
    """Convolutions with batch norm, 42 parameter tensors, as small as can be: what costs time is around it."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            layer
            for _ in range(_BLOCKS)
            for layer in (
                nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, groups=8),
                nn.BatchNorm2d(_CHANNELS),
                nn.ReLU(),
            )
        ]
        self.net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(_CHANNELS * _SIZE_PX**2, 2))

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class MedianStep(L.Callback):
    """The median time from the end of one step to the end of the next.

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
        """Of a step."""
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
