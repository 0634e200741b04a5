"""All uses of private names of Lightning in lit_data.

Callbacks that need one call `check_version` in ``setup``, datamodules when a Trainer is set.
``tests/core/test_lightning_internals.py`` checks the behavior of each name, so that a new release
of Lightning fails there instead of in a run.
"""

import csv
import io
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.core.module import _jit_is_scripting
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from packaging.version import Version
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.files import write_text

LOWEST = Version("2.6.6")
BELOW = Version("2.7")

Results = _ResultCollection
"""Values that a loop logs, by name, with their batch."""
Metric = _ResultMetric
"""One logged value."""
tracing = _jit_is_scripting
"""Context in which ``torch.jit.trace`` accepts modules without a Trainer."""
CLOSURE = "_make_closure"
"""Method of `automatic_loop` that makes the closure of the optimizer."""
OPTIMIZER_STEP = "_optimizer_step"
"""Method of `automatic_loop` that calls the optimizer."""
BEFORE_FETCH = "_on_before_fetch"
"""Method of the epoch loop that runs before a batch is fetched."""
AFTER_FETCH = "_on_after_fetch"
"""Method of the epoch loop that runs when the batch is available."""


def check_version(version: str = L.__version__) -> None:
    """Refuse a version of Lightning whose internals may be different.

    Raises:
        ConfigError: The version is too old or too new.
    """
    if not LOWEST <= Version(Version(version).base_version) < BELOW:
        raise ConfigError(
            f"lit_data uses parts of Lightning that may change, and lightning {version} was not "
            f"tested: install a version from {LOWEST} to below {BELOW}"
        )


def automatic_loop(trainer: L.Trainer) -> _AutomaticOptimization:
    """Return the loop that runs ``training_step``, backward and the optimizer.

    Callbacks wrap its `CLOSURE` and its `OPTIMIZER_STEP`.
    """
    return trainer.fit_loop.epoch_loop.automatic_optimization


def closure_parts(closure: Closure) -> tuple[Any, Any, Any]:
    """Return the step, backward and zero_grad functions of a closure."""
    return closure._step_fn, closure._backward_fn, closure._zero_grad_fn


def save_progress(trainer: L.Trainer) -> Callable[[], None]:
    """Save the counts of zeroed gradients in Lightning, which a repeated step would count again.

    Returns:
        A function that restores them.
    """
    progress = automatic_loop(trainer).optim_progress.optimizer.zero_grad
    total, current = dict(vars(progress.total)), dict(vars(progress.current))

    def restore() -> None:
        vars(progress.total).update(total)
        vars(progress.current).update(current)

    return restore


def results_of(trainer: L.Trainer) -> _ResultCollection | None:
    """Return the values that the running loop has logged."""
    return trainer._results


def number_batch(trainer: L.Trainer) -> int:
    """Return the number in its epoch of the batch that arrives next."""
    loop: Any = trainer._active_loop
    loop = getattr(loop, "epoch_loop", loop)
    return int(loop.batch_progress.current.ready) if loop is not None else 0


def is_accumulating(trainer: L.Trainer) -> bool:
    """Return True if the current step only accumulates gradients."""
    return bool(trainer.fit_loop._should_accumulate())


def shown_value(metric: Metric) -> Any:  # noqa: ANN401 - a tensor, or nothing
    """Return the displayed value of a logged metric at this step."""
    return metric._forward_cache


def show_value(metric: Metric, value: Any) -> None:  # noqa: ANN401
    """Replace the displayed value of a logged metric at this step."""
    metric._forward_cache = value


def count_logged_steps(trainer: L.Trainer) -> int:
    """Return the step that loggers count by: the number of batches with an optimizer step."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logs_now(trainer: L.Trainer) -> bool:
    """Return True if the values of this step go to the loggers."""
    return bool(trainer._logger_connector.should_update_logs)


def set_stop(trainer: L.Trainer, stop: bool) -> None:
    """Choose whether Lightning raises its SIGTERMException at the end of this step.

    Lightning has no public switch for this.
    """
    trainer._signal_connector.received_sigterm = stop


def call_module_hook(trainer: L.Trainer, hook: str, *args: Any) -> Any:  # noqa: ANN401 - any hook
    """Run a hook of the LightningModule as Lightning does, with its profiler and the current hook name."""
    return _call_lightning_module_hook(trainer, hook, *args)


def find_module(
    trainer: L.Trainer | None, datamodule: L.LightningDataModule
) -> L.LightningModule | None:
    """Return the module that a Trainer is about to run with a datamodule, or None without one."""
    connector: Any = getattr(trainer, "_data_connector", None)
    selector = getattr(connector, "_datahook_selector", None)
    if not isinstance(selector, _DataHookSelector) or selector.datamodule is not datamodule:
        return None
    return selector.model


def choose_hooks(trainer: L.Trainer, hooks: Collection[str]) -> None:
    """Call these hooks of the datamodule without a warning that the module has them too.

    If both have a hook, Lightning calls that of the datamodule, drops that of the module, and warns
    about it. A Trainer makes a new selector for each run, so the replacement lasts for one run.

    Args:
        trainer: Trainer that is about to run the datamodule, see `find_module`.
        hooks: Hooks in which the datamodule calls those of the module.
    """
    connector: Any = trainer._data_connector
    selector = connector._datahook_selector
    connector._datahook_selector = _Selector(selector.model, selector.datamodule, hooks)


def find_conversion(trainer: L.Trainer | None) -> Callable[[Any], Any] | None:
    """Return the conversion of a batch to the precision of the Trainer, or None if it converts nothing."""
    plugin: Any = getattr(getattr(trainer, "strategy", None), "precision_plugin", None)
    if plugin is None or type(plugin).convert_input is Precision.convert_input:
        return None
    return partial(type(plugin).convert_input, plugin)  # not the replacement of an earlier run


def leave_unconverted(
    trainer: L.Trainer, datamodule: L.LightningDataModule, convert: Callable[[Any], Any]
) -> None:
    """Pass batches to a datamodule as loaded, so that it does not start with rounded values.

    Args:
        trainer: Trainer whose precision converts a batch before all hooks.
        datamodule: Datamodule that converts its batches itself.
        convert: Conversion for batches of other datamodules.
    """
    plugin: Any = trainer.strategy.precision_plugin
    plugin.convert_input = partial(_convert_others, trainer, datamodule, convert)


def _convert_others(
    trainer: L.Trainer,
    datamodule: L.LightningDataModule,
    convert: Callable[[Any], Any],
    batch: Any,  # noqa: ANN401 - any form
) -> Any:  # noqa: ANN401
    connector: Any = trainer._data_connector
    # `trainer.datamodule` may be that of an earlier run.
    running = connector._datahook_selector.datamodule
    return batch if running is datamodule else convert(batch)


class _Selector(_DataHookSelector):
    """Selector of the object whose hook Lightning calls."""

    def __init__(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule,
        hooks: Collection[str],
    ) -> None:
        super().__init__(model, datamodule)
        self._hooks = hooks

    @override
    def get_instance(self, hook_name: Any) -> L.LightningModule | L.LightningDataModule:
        if self.datamodule is not None and hook_name in self._hooks:
            return self.datamodule
        return super().get_instance(hook_name)


def count_trained(trainer: L.Trainer, began: int | None) -> tuple[int, int]:
    """Return the current epoch, and the number of its batches whose step is done.

    Lightning fetches batches ahead of their steps; those are not counted. An epoch that `max_steps`,
    `max_time` or an early stop has cut is the current one still.

    Args:
        trainer: The Trainer.
        began: Epoch of the last pass over the training data; None at the beginning of one.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress  # typed without `processed`
    epoch = find_epoch(trainer)
    if began is not None and epoch == began + 1 and not progress.is_last_batch:
        epoch = began
    return epoch, progress.current.processed if epoch == began else 0


def find_epoch(trainer: L.Trainer) -> int:
    """Return the number that Lightning passes to loaders for their next training epoch."""
    loop: Any = trainer.fit_loop  # its progress is typed without `processed`
    return int(loop.epoch_progress.current.processed)


def load_waiting_states(trainer: L.Trainer) -> None:
    """Load the states of loaders from a checkpoint, if Lightning created the loaders before it.

    This happens if a schedule asks for the length of the run before the checkpoint is read.
    """
    trainer.fit_loop._load_combined_loader_states()


def reopen_epoch(trainer: L.Trainer, epoch: int) -> None:
    """Continue a resumed run inside an epoch that its checkpoint counts as done.

    That is one that was cut. Lightning also counts the epochs wrongly after it has resumed from the
    last batch of one.
    """
    loop: Any = trainer.fit_loop
    if loop.epoch_progress.current.ready != loop.epoch_progress.current.processed:
        return
    for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
        counts.ready = counts.started = epoch + 1
        counts.processed = epoch
        counts.completed = min(counts.completed, epoch)
    loop.restarting = True  # Lightning does not set it, as there seemed to be no open epoch


def keep_earlier_rows(logger: CSVLogger) -> None:
    """Continue the ``metrics.csv`` of an interrupted run, which a logger would delete."""
    logger._experiment = AppendingWriter(logger.log_dir)


class AppendingWriter(ExperimentWriter):
    """Writer of a ``metrics.csv`` that keeps earlier rows, up to the first step that is logged."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        # A kill may have truncated the last line.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        self._earlier_rows = list(csv.DictReader(lines))

    @override
    def _check_log_dir_exists(self) -> None:
        """Delete nothing."""

    @override
    def save(self) -> None:
        if self._earlier_rows and self.metrics:
            self._write_earlier_rows(self.metrics[0]["step"])
            self._earlier_rows = []
        super().save()

    def _write_earlier_rows(self, end: float) -> None:
        """Write the rows of steps below `end`, since the others are trained again."""
        self.metrics_keys = list(self._earlier_rows[0])
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for row in self._earlier_rows if _find_step(row) < end)
        write_text(Path(self.metrics_file_path), text.getvalue())


def _find_step(row: Mapping[str, str | None]) -> float:
    """Return the step of a row, or infinity if a damaged file has none."""
    step = row.get("step") or ""
    return int(step) if step.isdecimal() else float("inf")
