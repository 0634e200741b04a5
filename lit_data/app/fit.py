"""``fit``: train, then score the best checkpoint, and draw what went in and what came out."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lit_data.app.build import Run, build, prepare
from lit_data.app.checkpoints import load_weights, restoring
from lit_data.app.launcher import is_first_rank
from lit_data.app.machine import describe_machine
from lit_data.app.remote_runs import fetch_checkpoint
from lit_data.app.result import is_score, join_scores, warning_after, write_confusion
from lit_data.app.resuming import check_splits
from lit_data.app.run_folder import SPLIT_TABLE
from lit_data.app.show import draw_predictions, draw_samples
from lit_data.callbacks.pictures import hand_over_file, hand_over_table
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, LitDataError
from lit_data.core.files import write_json, write_table
from lit_data.core.lightning_internals import keep_earlier_rows
from lit_data.core.types import Stage, Summarises
from lit_data.datamodules.base import BaseDataModule
from lit_data.models.scored import ScoredModule
from lit_data.predict.answers import refusing_nan

log = logging.getLogger(__name__)


_STEPS: Mapping[Stage, str] = {"val": "validation_step", "test": "test_step"}
_SAMPLES = "samples.png"
_PREDICTIONS = "predictions.png"

ModelMaker = Callable[[], LightningModule]


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train.

    Writes into the run folder: checkpoints, logs, ``samples.png`` before training,
    ``predictions.png`` after it, ``loader.json`` with the workers of each stage and the measurement
    that chose them, ``machine.json`` with processor, device and versions, ``splits.csv`` with the
    split of each image, which `data.splits` takes, and its class, ``confusion.json`` with the
    images of each class by what the model says, ``curves.json`` with precision over recall and the
    scores of images, and at its end, also where it fails,
    ``report.html``; see `lit_data.app.report`.

    Returns:
        Metrics of the best checkpoint on the validation and the test split, and what the callbacks
        measured.

    Raises:
        ConfigError: Lightning refuses options, such as the name of a metric that the model does not
            log.
    """
    with _refusing_as_config_errors():
        training = build(cfg)
        try:
            prepare(training.datamodule, learns=True)
            _draw_data(training, cfg)
            _train(training)
            return _finish(training, Path(cfg.paths.cache))
        finally:
            # Lightning does not when training is broken off, and the workers would stay.
            if isinstance(training.datamodule, BaseDataModule):
                training.datamodule.teardown("fit")


@contextmanager
def _refusing_as_config_errors() -> Iterator[None]:
    """Turn Lightning's complaints about options into errors of the configuration."""
    try:
        yield
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning rejects this configuration: {error}") from error
    except RuntimeError as error:
        if not str(error).startswith("Early stopping conditioned on metric"):
            raise
        raise ConfigError(
            f"{error}: set callbacks.early_stopping.monitor=NAME callbacks.early_stopping.mode=min"
        ) from error


def _draw_data(training: Run, cfg: DictConfig) -> None:
    """Write the split of each image, and a picture of what goes in.

    Raises:
        ConfigError: See `check_splits`.
    """
    datamodule = training.datamodule
    datamodule.trainer = training.trainer
    if not isinstance(datamodule, BaseDataModule):
        log.info(
            "%s is not a datamodule of lit_data: no pictures of samples and predictions are "
            "written",
            type(datamodule).__name__,
        )
    elif is_first_rank():  # the others wait for it in the Trainer
        datamodule.setup("fit")
        training.folder.mkdir(parents=True, exist_ok=True)  # of paths.run, at the first start
        if splits := datamodule.list_splits():
            if training.start is not None:
                check_splits(cfg, training.start, splits)
            write_table(training.folder / SPLIT_TABLE, list(splits[0]), splits)
        path = training.folder / _SAMPLES
        with _drawing(path):
            draw_samples(datamodule, path, stage="train")


def _train(training: Run) -> None:
    trainer, model, start = training.trainer, training.model, training.start
    datamodule = training.datamodule
    if start is not None and is_first_rank():
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                keep_earlier_rows(logger)
    try:
        with restoring(start, trainer, model):
            trainer.fit(model, datamodule=datamodule, ckpt_path=start, weights_only=True)
    finally:
        # Also of a training that failed, whose report shows it.
        if trainer.is_global_zero:
            with warning_after("fit", "machine.json"):
                machine = describe_machine(trainer.strategy.root_device)
                write_json(training.folder / "machine.json", machine)


def _finish(training: Run, cache: Path) -> dict[str, Any]:
    """Score and draw what was trained; each thing is guarded, so that a failure loses no other."""
    trainer, datamodule, folder = training.trainer, training.datamodule, training.folder
    metrics = _collect_metrics(trainer)
    make_best: ModelMaker | None = None
    with warning_after("fit", "scores of the best checkpoint"):
        make_best = _take_best(training, cache)
    if make_best is not None:
        metrics = _score(training, make_best, metrics)
    if trainer.is_global_zero and isinstance(datamodule, BaseDataModule):
        with warning_after("fit", "loader.json"):
            write_json(folder / "loader.json", datamodule.describe_loaders())
        if make_best is not None:
            path = folder / _PREDICTIONS
            with warning_after("fit", _PREDICTIONS), _drawing(path):
                draw_predictions(datamodule, make_best(), path)
    if trainer.is_global_zero:
        _fill_loggers(training, metrics)
    return metrics


def _collect_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return what the callbacks have to say, for summary.json."""
    metrics: dict[str, Any] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        if isinstance(callback, Summarises):
            with warning_after("fit", "what the callbacks measured"):
                metrics |= callback.summary()
    return metrics


def _take_best(training: Run, cache: Path) -> ModelMaker | None:
    """Return a maker of the model with the weights of the best checkpoint; None if in pieces.

    A strategy that spreads the weights over the ranks changes the model for good, so each use then
    gets a new one.
    """
    trainer = training.trainer
    best: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not training.spreads_weights:
        if best:
            # Lightning may have written it to an address.
            key = "callbacks.checkpoint.dirpath"
            path = fetch_checkpoint(best, cache, key) if is_remote(best) else Path(best)
            load_weights(training.model, path)
        return lambda: training.model
    if not best:  # no rank has the weights as a whole, but a file has
        best = str(training.folder / "checkpoints" / "trained.ckpt")
        trainer.save_checkpoint(best, weights_only=True)
    if Path(best).is_dir():
        rank_zero_warn(
            f"{best} is sharded and is not scored: trainer.strategy.state_dict_type=full writes "
            "one file"
        )
        return None
    return partial(_load_model, training, Path(best))


def _load_model(training: Run, checkpoint: Path) -> LightningModule:
    model = training.build_model()
    load_weights(model, checkpoint)
    return model


def _score(training: Run, make_best: ModelMaker, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with those of the best checkpoint on the validation and the test split."""
    trainer, datamodule = training.trainer, training.datamodule
    scorers: dict[Stage, Any] = {"val": trainer.validate, "test": trainer.test}
    confusion: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for stage, score in scorers.items():
        with warning_after("fit", f"scores of {stage}"):
            if is_overridden(_STEPS[stage], training.model) and _has_samples(datamodule, stage):
                model = make_best()
                with refusing_nan(model):
                    all_scores = score(model, datamodule=datamodule, verbose=False)
                for scores in all_scores:
                    metrics = join_scores(metrics, scores, stage)
                if isinstance(model, ScoredModule):
                    confusion |= model.confusion
                    curves |= model.curves
    if trainer.is_global_zero:
        with warning_after("fit", "confusion.json"):
            write_confusion(training.folder, confusion, curves)
    return metrics


def _has_samples(datamodule: LightningDataModule, stage: Stage) -> bool:
    if isinstance(datamodule, BaseDataModule):
        return bool(len(datamodule.dataset(stage)))
    return is_overridden(f"{stage}_dataloader", datamodule)


def _fill_loggers(training: Run, metrics: Mapping[str, Any]) -> None:
    """Hand the pictures of the run and its scores to those that take pictures and tables."""
    for name in (_SAMPLES, _PREDICTIONS):
        with warning_after("fit", "what the loggers take"):
            hand_over_file(training.trainer, training.folder / name)
    scores = {key: value for key, value in metrics.items() if is_score(key, value)}
    with warning_after("fit", "what the loggers take"):
        hand_over_table(training.trainer, "scores", scores)


@contextmanager
def _drawing(path: Path) -> Iterator[None]:
    """Let no picture end a run: models and data of the user's own hold what cannot be foreseen."""
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        log.warning("%s could not be drawn: %s: %s", path, type(error).__name__, error)
        log.debug("the error of %s", path.name, exc_info=error)
