"""Scores that are undefined: `MonitorGuard` for the choice of checkpoints, and cells of tables."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from lit_data.app.result import split_stage
from lit_data.callbacks.wrapping import wrap
from lit_data.datamodules.base import BaseDataModule
from lit_data.models.scored import ScoredModule

log = logging.getLogger(__name__)


class MonitorGuard(Callback):
    """Lets the last checkpoint count as the best where no score says which one is.

    That is where what is monitored is NaN, as a score of defects is in a split without any, and
    where the model does not log it. The names that it logs are known after Lightning's sanity check
    or, without one, after the first validation; of a model without validation, after its first
    epoch. Early stopping of our models waits for a score, too.

    Args:
        knows_names: What is monitored was chosen for this model: a name that it does not log in
            validation is left to Lightning, which refuses it.
    """

    def __init__(self, *, knows_names: bool) -> None:
        self._knows_names = knows_names
        self._logged: set[str] = set()
        self._undo = ExitStack()
        self._has_told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()
        self._has_told |= not trainer.is_global_zero
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                self._undo.callback(wrap(logger, "log_metrics", leave_undefined_empty))
        for checkpoint in trainer.checkpoint_callbacks:
            if isinstance(checkpoint, ModelCheckpoint):
                keep = partial(_keep_last_of_undefined, checkpoint)
                self._undo.callback(wrap(checkpoint, "check_monitor_top_k", keep))
        if isinstance(pl_module, ScoredModule):  # NaN of others may be a training that diverges
            for stopping in trainer.early_stopping_callbacks:
                wait = partial(_wait_for_score, stopping)
                for hook in ("on_train_epoch_end", "on_validation_end"):
                    self._undo.callback(wrap(stopping, hook, wait))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitors = _list_monitors(trainer)
        if any(split_stage(name)[0] == "val" for name in monitors) and not _validates(trainer):
            self._tell(trainer, "there is no validation")

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._knows_names:
            self._check(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if not self._knows_names:
            self._check(trainer)
        for name in _list_monitors(trainer):
            score = trainer.callback_metrics.get(name)
            if score is not None and torch.isnan(score):
                self._tell(trainer, f"{name} is undefined in the validation split")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _validates(trainer):
            self._check(trainer)

    def _tell(self, trainer: Trainer, reason: str) -> None:
        """Log once why the last checkpoint counts as the best, unless the datamodule has said it."""
        if self._has_told:
            return
        self._has_told = True
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # of the data connector
        if not (isinstance(datamodule, BaseDataModule) and datamodule.find_lack("val")):
            log.warning("%s: the last checkpoint counts as the best", reason)

    def _check(self, trainer: Trainer) -> None:
        logged = set(trainer.callback_metrics)
        for checkpoint in trainer.checkpoint_callbacks:
            if not isinstance(checkpoint, ModelCheckpoint):
                continue
            monitor = checkpoint.monitor
            if monitor and monitor not in self._logged | logged:
                checkpoint.monitor = None
                if self._has_told:
                    continue
                log.warning(
                    "the model logs no %s in validation (it logs %s): the last checkpoint counts "
                    "as the best; or set callbacks.checkpoint.monitor=NAME "
                    "callbacks.checkpoint.mode=min",
                    monitor,
                    ", ".join(sorted(logged)) or "nothing",
                )
        self._logged |= logged  # a name that was logged once will be again


def _list_monitors(trainer: Trainer) -> list[str]:
    """Return the names of the metrics by which checkpoints are chosen."""
    monitors = [getattr(checkpoint, "monitor", None) for checkpoint in trainer.checkpoint_callbacks]
    return [name for name in monitors if name]


def _validates(trainer: Trainer) -> bool:
    batches = trainer.num_val_batches  # none as long as no loader was asked for
    return trainer.enable_validation and (not batches or sum(batches) > 0)


def _keep_last_of_undefined(
    checkpoint: ModelCheckpoint,
    check: Callable[..., bool],
    trainer: Trainer,
    current: Tensor | None = None,
) -> bool:
    """Return True if a checkpoint is to be saved: of several whose score is NaN, the last."""
    is_undefined = current is not None and bool(torch.isnan(current))
    if is_undefined and checkpoint.best_k_models and not torch.isfinite(checkpoint.kth_value):
        return trainer.strategy.reduce_boolean_decision(True)  # as the call below, on all ranks
    return check(trainer, current)


def _wait_for_score(
    stopping: EarlyStopping,
    hook: Callable[..., None],
    trainer: Trainer,
    pl_module: LightningModule,
) -> None:
    """Let early stopping look at what it monitors, unless that is NaN."""
    score = trainer.callback_metrics.get(stopping.monitor)
    if score is None or not torch.isnan(score):
        hook(trainer, pl_module)


def leave_undefined_empty(
    log_metrics: Callable[..., None],
    metrics: Mapping[str, Tensor | float],
    step: int | None = None,
) -> None:
    """Let a table of metrics have an empty cell for a score of validation or test that is NaN.

    A training loss that is NaN stands there as such: it is one that diverged.
    """
    cells: dict[str, Tensor | float | str] = dict(metrics)
    for name, value in metrics.items():
        if split_stage(name)[0] in ("val", "test") and math.isnan(value):
            cells[name] = ""
    log_metrics(cells, step)
