"""Output for a person at a terminal: lines above the bar, short names, and one table at the end."""

import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from rich.console import Console
from typing_extensions import override

from lit_data.app.launcher import let_first_rank_speak
from lit_data.app.quality import describe_threshold
from lit_data.app.reports.runs import read_run
from lit_data.app.result import is_score, print_table, split_stage

_NOISE = ("💡 Tip", "Loading `train_dataloader` to estimate", "TPU available: False")
_SHORT = {"average_precision": "ap", "defect_recall": "recall", "accuracy": "acc"}
_LONGEST = 12
_BESIDE_SCORES = 70  # columns of a bar for its name, its batches, its times and its speed
_FEWEST_BATCHES, _SHORTEST_S = 3, 3.0  # by which a training is timed
_WORTH_SAYING_S = 20.0
_VALIDATION = 0.4  # time of a batch of validation, by that of a training batch
log = logging.getLogger(__name__)

_COLUMNS = ("val", "test", "baseline")


class RunBar(RichProgressBar):
    """Lightning's bar, with short names of metrics and epochs counted from 1.

    ``val/average_precision`` is ``ap`` there.
    """

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        counts = Counter(map(shorten, metrics))
        shown_metrics = {}
        for name, value in metrics.items():
            if isinstance(value, float) and math.isnan(value):
                continue
            short_name = shorten(name)
            is_unique = counts[short_name] == 1
            shown_metrics[short_name if is_unique else name] = value
        return _fit_line(shown_metrics, Console().width - _BESIDE_SCORES)

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        text = f"Epoch {current_epoch + 1}"
        most = self.trainer.max_epochs
        if most is not None and most > 0:
            text += f"/{most}"
        return text.ljust(len(self.validation_description))  # bars of one length do not flicker


class ParameterTable(RichModelSummary):
    """Lightning's table of the parts of a model, without the FLOPs that it has not counted.

    It counts them for modules with an ``example_input_array`` alone, and gives 0 for all others.
    """

    @override
    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **options: Any,
    ) -> None:
        if total_flops:
            RichModelSummary.summarize(
                summary_data,
                total_parameters,
                trainable_parameters,
                model_size,
                total_training_modes,
                total_flops,
                **options,
            )
            return
        columns = dict(summary_data)
        parts = zip(columns["Name"], columns["Type"], columns["Params"], strict=True)
        rows = [part for part in parts if part[2].strip() != "0"]  # losses and metrics have none
        rows.append(("all", "", get_human_readable_count(total_parameters)))
        if trainable_parameters < total_parameters:
            rows.append(("trained", "", get_human_readable_count(trainable_parameters)))
        print_table(("part", "type", "parameters"), rows, texts=("part", "type"))


class LogInterval(Callback):
    """Logs once an epoch at least, where an epoch has fewer batches than ``log_every_n_steps``.

    Lightning warns of it in every run of a small set; `trainer.log_every_n_steps` that was typed
    stays as it is.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = trainer.num_training_batches
        if 0 < batches < trainer.log_every_n_steps:  # type: ignore[attr-defined]
            trainer.log_every_n_steps = int(batches)  # type: ignore[attr-defined]  # its logger connector set it


class Forecast(Callback):
    """Says once, after the first batches, how long the training takes on this machine."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._batches = 0
        self._steps = 0
        self._is_said = False

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._is_said or not trainer.is_global_zero:
            return
        now_s = time.monotonic()
        if self._began_s is None:  # the first batch may compile, and fill caches
            self._began_s, self._steps = now_s, trainer.global_step
            return
        self._batches += 1
        passed_s = now_s - self._began_s
        if self._batches >= _FEWEST_BATCHES and passed_s >= _SHORTEST_S:
            self._is_said = True
            steps_a_batch = (trainer.global_step - self._steps) / self._batches
            text = describe_duration(trainer, passed_s / self._batches, steps_a_batch)
            if text:
                log.info("training takes %s on this machine", text)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What is timed is training alone.
        self._began_s, self._batches = None, 0


def describe_duration(trainer: Trainer, batch_s: float, steps_a_batch: float) -> str:
    """Return how long a training still takes; empty of a short one, and where nothing says its end.

    Args:
        trainer: In its training.
        batch_s: Seconds of a training batch.
        steps_a_batch: Steps of optimizers for each.
    """
    batches = float(trainer.num_training_batches)
    epoch_s = batch_s * batches
    validation_s = 0.0
    if trainer.enable_validation:
        validation_s = batch_s * _VALIDATION * sum(trainer.num_val_batches)
        epoch_s += validation_s / (trainer.check_val_every_n_epoch or 1)
    limits_s = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits_s.append(epoch_s * (trainer.max_epochs - trainer.current_epoch))
    if trainer.max_steps >= 0 and steps_a_batch > 0:
        left = (trainer.max_steps - trainer.global_step) / steps_a_batch
        limits_s.append(left * (epoch_s / batches if math.isfinite(batches) else batch_s))
    is_stopped_early = False
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        is_stopped_early |= isinstance(callback, EarlyStopping)
        if isinstance(callback, Timer) and callback.time_remaining() is not None:
            # The last validation comes after the limit.
            limits_s.append(float(callback.time_remaining() or 0) + validation_s)
    total_s = min(filter(math.isfinite, limits_s), default=0.0)
    if total_s < _WORTH_SAYING_S:
        return ""
    text = f"about {_round(total_s)} in total"
    if epoch_s < total_s:
        text = f"about {_round(epoch_s)} per epoch, {_round(total_s)} in total"
    return f"{text}, less with early stopping," if is_stopped_early else text


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _fit_line(metrics: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """Return the metrics that fit into one line beside the bar, the first ones; at least one."""
    fitting: dict[str, Any] = {}
    for name, value in metrics.items():
        number = value if isinstance(value, str) else f"{value:.3f}"
        columns -= len(f"{name}: {number} ")
        if columns < 0 and fitting:
            break
        fitting[name] = value
    return fitting


def shorten(name: str) -> str:
    """Return a metric's name without its stage, in at most 12 characters."""
    _, name = split_stage(name)
    # Some models name the stage once more behind a slash.
    _, name = split_stage(name.rpartition("/")[2])
    return _SHORT.get(name, name)[:_LONGEST]


def quieten() -> None:
    """Leave out lines of every run that nobody can act on, and write the others above the bar.

    A live bar takes over `sys.stdout`, but a log handler keeps the stream that it was made with.
    """
    # lightning 2.6.6 asks torch 2.13 for a tree spec in the old way.
    warnings.filterwarnings(
        "ignore", ".isinstance.treespec, LeafSpec.. is deprecated", FutureWarning
    )
    # A run that goes on in a folder of its own compares new scores alone, as docs/commands.md says.
    warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
    # Lightning takes the weights for float32 then, which under autocast they are.
    warnings.filterwarnings(
        "ignore", "Precision .* is not supported by the model summary", UserWarning
    )
    # `fit` says what a split without images means.
    warnings.filterwarnings("ignore", "Total length of .list. across ranks is zero", UserWarning)
    # Imported before the root logger had handlers, these got some of their own, which would print
    # every line a second time, or past the filter.
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    let_first_rank_speak()
    standard_outputs = (sys.stdout, sys.__stdout__)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_no_noise)
        if type(handler) is logging.StreamHandler and handler.stream in standard_outputs:
            handler.setStream(_CurrentStdout())
            handler.addFilter(_is_no_speed)


def print_scores(metrics: Mapping[str, Any], title: str = "") -> None:
    """Print a table of the scores of the model, with a column for each stage.

    Args:
        metrics: Those of summary.json.
        title: Of the table.
    """
    rows = _arrange(metrics)
    if rows:
        present = {column for row in rows.values() for column in row}
        columns = [column for column in _COLUMNS if column in present]
        cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
        print_table(["metric", *columns], cells, texts=["metric"], title=title)


def print_quality(folder: Path) -> None:
    """Print what the model of a run finds, and of a bad one what may help."""
    if verdict := read_run(folder).verdict.text:
        print(verdict)


def print_end(metrics: Mapping[str, Any], folder: Path) -> None:
    """Print what the model finds, its scores, its speed, and where its report is.

    Args:
        metrics: Those of summary.json.
        folder: Of the run.
    """
    print_quality(folder)
    print_scores(metrics, "best checkpoint")
    if threshold := describe_threshold(metrics):
        print(threshold)
    text = f"time: {metrics['seconds']:.0f} s"
    speed = metrics.get("samples_per_s")
    if speed:
        text += f", {speed:.0f} samples/s in training"
    print(text)
    if limit := metrics.get("train/limited_by"):
        print(f"speed: {limit}")
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}")


def _arrange(metrics: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Scores as rows: validation and test side by side, then our baseline on the last of them."""
    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        if not is_score(key, value) or math.isnan(value):  # of what there is nothing to measure on
            continue
        stage, name = split_stage(key)
        if stage:
            _, name = split_stage(name)  # test/val_loss is of a model that calls both so
        column = "test"
        # A model that calls both alike has its plain name for the first of them.
        if stage == "val" or (not stage and f"test/{key}" in metrics):
            column = "val"
        if name.endswith("_baseline"):
            column = "baseline"
        row = rows.setdefault(name.removesuffix("_baseline") or key, {})
        row[column] = f"{float(value):.4g}"
    return rows


class _CurrentStdout:
    """A stream that writes to what `sys.stdout` is at that moment."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


def _is_no_speed(record: logging.LogRecord) -> bool:
    """Leave to `print_end` what comes behind the scores."""
    return not record.getMessage().startswith("DataWaitMonitor: ")


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)
