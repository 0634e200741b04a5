"""``fit``: train, then score the best checkpoint, and draw what went in and what came out."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lit_data.callbacks.imaging.pictures import hand_over_file, hand_over_table
from lit_data.commands.checkpoints import find_start, load_weights, restoring
from lit_data.commands.diagnosis.machine import describe_machine
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.pictures import draw_predictions, draw_samples
from lit_data.commands.report import warning_after
from lit_data.commands.result import is_score, join_scores
from lit_data.commands.session import (
    build_any_datamodule,
    build_model,
    build_trainer,
    collect_metrics,
    name_classes,
    prepare,
    spreads_weights,
)
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, LitDataError
from lit_data.files import write_json, write_table
from lit_data.types import Stage

log = logging.getLogger(__name__)


_STEPS: Final = {"val": "validation_step", "test": "test_step"}


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train.

    Writes into the run folder: checkpoints, logs, ``samples.png`` before training,
    ``predictions.png`` after it, ``loader.json`` with the workers of each stage and the measurement
    that chose them, ``machine.json`` with processor, device and versions, ``splits.csv`` with the
    split of each image, which `data.splits` takes, and at its end, also where it fails,
    ``report.html``; see `lit_data.commands.report`.

    Returns:
        Metrics of the best checkpoint on the validation and the test split, and what the callbacks
        measured.

    Raises:
        ConfigError: Lightning refuses options, such as the name of a metric that the model does not
            log.
    """
    start = find_start(cfg)
    datamodule, trainer = build_any_datamodule(cfg), build_trainer(cfg)  # reads no data
    try:
        name_classes(cfg, datamodule)
        model = build_model(cfg)
        prepare(datamodule)
        return _fit(cfg, trainer, datamodule, model, start)
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning refuses this: {error}") from error
    except RuntimeError as error:
        if not str(error).startswith("Early stopping conditioned on metric"):
            raise
        raise ConfigError(
            f"{error}: set callbacks.early_stopping.monitor=NAME callbacks.early_stopping.mode=min"
        ) from error
    finally:
        if isinstance(datamodule, BaseDataModule):
            datamodule.teardown(
                "fit"
            )  # Lightning does not when training is broken off, and the workers would stay


def _fit(
    cfg: DictConfig,
    trainer: L.Trainer,
    datamodule: L.LightningDataModule,
    model: L.LightningModule,
    start: Path | None,
) -> dict[str, Any]:
    folder = Path(cfg.paths.run)
    datamodule.trainer = trainer
    if not isinstance(datamodule, BaseDataModule):
        log.info(
            "%s is no datamodule of lit_data: its samples and predictions are not drawn",
            _name(datamodule),
        )
    elif is_first_rank():  # the others wait for it in the Trainer
        datamodule.setup("fit")
        if splits := datamodule.list_splits():
            write_table(folder / "splits.csv", ("image", "split"), splits)
        with _telling(folder / "samples.png"):
            draw_samples(datamodule, folder / "samples.png", stage="train")
    try:
        with restoring(start, trainer, model):
            trainer.fit(model, datamodule=datamodule, ckpt_path=start, weights_only=True)
    finally:
        if trainer.is_global_zero:
            with warning_after("fit", "machine.json"):
                write_json(folder / "machine.json", describe_machine(trainer.strategy.root_device))
    metrics: dict[str, Any] = {}
    with warning_after("fit", "what the callbacks measured"):
        metrics = collect_metrics(trainer)
    with warning_after("fit", "scores of the best checkpoint"):
        best = _find_best(trainer, folder)
        metrics = _score(cfg, trainer, model, datamodule, best, metrics)
        if trainer.is_global_zero and isinstance(datamodule, BaseDataModule):
            write_json(folder / "loader.json", datamodule.describe_loaders())
            _draw_predictions(cfg, trainer, datamodule, model, best)
    with warning_after("fit", "what the loggers take"):
        _tell_loggers(trainer, folder, metrics)
    return metrics


def _tell_loggers(trainer: L.Trainer, folder: Path, metrics: dict[str, Any]) -> None:
    """Hand the pictures of the run and its scores to those that take pictures and tables."""
    if trainer.is_global_zero:
        for name in ("samples.png", "predictions.png"):
            hand_over_file(trainer, folder / name)
        hand_over_table(
            trainer,
            "scores",
            {key: value for key, value in metrics.items() if is_score(key, value)},
        )


def _draw_predictions(
    cfg: DictConfig,
    trainer: L.Trainer,
    datamodule: BaseDataModule,
    model: L.LightningModule,
    best: str,
) -> None:
    path, spread = Path(cfg.paths.run) / "predictions.png", spreads_weights(trainer)
    with _telling(path):
        if not spread or Path(best).is_file():
            draw_predictions(datamodule, _load_model(cfg, best) if spread else model, path)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Let no picture end a run: models and data of the user's own hold what cannot be foreseen."""
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        log.warning("%s could not be drawn: %s: %s", path, type(error).__name__, error)
        log.debug("the error of %s", path.name, exc_info=error)


def _name(owner: object) -> str:
    return type(owner).__name__


def _find_best(trainer: L.Trainer, folder: Path) -> str:
    """The best checkpoint, or none; weights that no rank has as a whole are put into a file then."""
    best: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not best and spreads_weights(trainer):
        best = str(folder / "checkpoints" / "trained.ckpt")
        trainer.save_checkpoint(best, weights_only=True)
    return best


def _load_model(cfg: DictConfig, path: str) -> L.LightningModule:
    model = build_model(cfg, trained=True)
    load_weights(model, Path(path))
    return model


def _score(
    cfg: DictConfig,
    trainer: L.Trainer,
    model: L.LightningModule,
    datamodule: L.LightningDataModule,
    best: str,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """The metrics with those of the best checkpoint, whose weights the model then has.

    A strategy that spreads the weights over the ranks changes the model for good, so each stage
    gets a new one.
    """
    spread = spreads_weights(trainer)
    if spread and Path(best).is_dir():
        rank_zero_warn(
            f"{best} is in pieces and is not scored: trainer.strategy.state_dict_type=full writes one file"
        )
        return metrics
    if best and not spread:
        load_weights(model, Path(best))
    scorers: dict[Stage, Any] = {"val": trainer.validate, "test": trainer.test}
    for stage, score in scorers.items():
        if is_overridden(_STEPS[stage], model) and _has_samples(datamodule, stage):
            scored = _load_model(cfg, best) if spread else model
            with warning_after("fit", f"scores of {stage}"):
                for scores in score(scored, datamodule=datamodule, verbose=False):
                    metrics = join_scores(metrics, scores, stage)
    return metrics


def _has_samples(datamodule: L.LightningDataModule, stage: Stage) -> bool:
    if isinstance(datamodule, BaseDataModule):
        return bool(len(datamodule.dataset(stage)))
    return is_overridden(f"{stage}_dataloader", datamodule)
