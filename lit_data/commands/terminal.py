"""What a person sees of a run: lines above the bar, a bar with short names, and one table at the end."""

import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lit_data.commands.result import is_score, split_stage
from lit_data.errors import escape

_NOISE: Final = ("💡 Tip", "Loading `train_dataloader` to estimate", "TPU available: False")
_SHORT: Final = {"average_precision": "ap", "defect_recall": "recall", "accuracy": "acc"}
_LONGEST: Final = 12


class RunBar(RichProgressBar):
    """Lightning's bar, with short names of metrics, ``ap`` for ``val/average_precision``, and epochs counted from 1."""

    @override
    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        found = super().get_metrics(trainer, pl_module)
        short = [shorten(name) for name in found]
        return {
            name if short.count(name) == 1 else full: value
            for name, (full, value) in zip(short, found.items(), strict=True)
        }

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        most = self.trainer.max_epochs
        told = f"Epoch {current_epoch + 1}" + (f"/{most}" if most is not None and most > 0 else "")
        return told.ljust(len(self.validation_description))  # bars of one length do not flicker


class LogInterval(L.Callback):
    """Logs once an epoch at least, where an epoch has fewer batches than ``log_every_n_steps``.

    Lightning warns of it in every run of a small set; `trainer.log_every_n_steps` that was typed
    stays as it is.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches, every_n_steps = trainer.num_training_batches, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if 0 < batches < every_n_steps:
            trainer.log_every_n_steps = int(batches)  # type: ignore[attr-defined]  # its logger connector set it


def shorten(name: str) -> str:
    """A metric's name without its stage, in at most 12 characters."""
    plain = split_stage(split_stage(name)[1].rpartition("/")[2])[1]
    return _SHORT.get(plain, plain)[:_LONGEST]


def quieten() -> None:
    """Leave out what others say in every run and nobody can act on, and write lines above the bar,
    not into it.

    A live bar takes over `sys.stdout`, but a log handler keeps the stream that it was made with.
    """
    # lightning 2.6.6 asks torch 2.13 for a tree spec in the old way.
    warnings.filterwarnings(
        "ignore", ".isinstance.treespec, LeafSpec.. is deprecated", FutureWarning
    )
    # Lightning takes the weights for float32 then, which under autocast they are.
    warnings.filterwarnings(
        "ignore", "Precision .* is not supported by the model summary", UserWarning
    )
    for name in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
    ):  # imported before there were handlers
        logger = logging.getLogger(name)
        logger.handlers.clear()  # they would print every line a second time, or past the filter
        logger.propagate = True
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_no_noise)
        if type(handler) is logging.StreamHandler and handler.stream in (
            sys.stdout,
            sys.__stdout__,
        ):
            handler.setStream(_CurrentStdout())


def print_end(metrics: Mapping[str, Any], folder: Path) -> None:
    """Print the scores of a training, how long it took, and where its report is.

    Args:
        metrics: Those of summary.json.
        folder: Of the run.
    """
    table = Table(title="best checkpoint", title_justify="left")
    table.add_column("metric", overflow="fold")
    rows = _arrange(metrics)
    columns = [
        name
        for name in ("validation", "test", "baseline")
        if any(name in row for row in rows.values())
    ]
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(escape(name), *(row.get(column, "") for column in columns))
    console = Console()
    if rows:
        console.print(table)
    speed = metrics.get("samples_per_s")
    said = [
        f"{metrics['seconds']:.0f} s",
        *([f"{speed:.0f} samples/s in training"] if speed else []),
    ]
    print(", ".join(said))
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}")


def _arrange(metrics: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Scores as rows: those of validation and test, and of our baseline on the last of them, side by side."""
    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        if not is_score(key, value):
            continue
        stage, name = split_stage(key)
        name = (
            split_stage(name)[1] if stage else name
        )  # test/val_loss is of a model that calls both so
        is_plain = (
            not stage and f"test/{key}" in metrics
        )  # then the name itself is that of validation
        column = "validation" if is_plain or stage == "val" else "test"
        is_baseline = name.endswith("_baseline")
        row = rows.setdefault(name.removesuffix("_baseline") or key, {})
        row["baseline" if is_baseline else column] = f"{float(value):.4g}"
    return rows


class _CurrentStdout:
    """Whatever `sys.stdout` is now."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)
