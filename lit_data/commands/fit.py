"""``fit``: train, then score the best checkpoint, and draw what went in and what came out."""

import logging
from pathlib import Path
from typing import Any, Final

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lit_data.commands.benchmarks.machine import describe_machine
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.pictures import draw_predictions, draw_samples
from lit_data.commands.result import write_json
from lit_data.commands.session import (
    build_datamodule,
    build_model,
    build_trainer,
    collect_metrics,
    load_weights,
    spreads_weights,
)
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.types import Stage

log = logging.getLogger(__name__)

_STEPS: Final = {"val": "validation_step", "test": "test_step"}


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train.

    Writes into the run folder: checkpoints, logs, ``samples.png`` before training, ``predictions.png`` after it,
    ``loader.json`` with the workers of each stage and the measurement that chose them, ``machine.json`` with processor,
    device and versions, and at its end, also where it fails, ``report.html``; see `lit_data.commands.report`.

    Returns:
        Metrics of the best checkpoint on the validation and the test split, and what the callbacks measured.

    Raises:
        ConfigError: Lightning refuses options, such as the name of a metric that the model does not log.
    """
    datamodule, model = build_datamodule(cfg), build_model(cfg)
    try:
        return _fit(cfg, datamodule, model)
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning refuses this: {error}") from error
    finally:
        datamodule.teardown("fit")  # Lightning does not when training is broken off, and the workers would stay


def _fit(cfg: DictConfig, datamodule: BaseDataModule, model: L.LightningModule) -> dict[str, Any]:
    folder = Path(cfg.paths.run)
    datamodule.trainer = trainer = build_trainer(cfg)
    if is_first_rank():  # the others wait for it in the Trainer
        datamodule.setup("fit")
        draw_samples(datamodule, folder / "samples.png", stage="train")
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt, weights_only=True)
    finally:
        if trainer.is_global_zero:
            write_json(folder / "machine.json", describe_machine(trainer.strategy.root_device))
    best = _find_best(trainer, folder)
    metrics = collect_metrics(trainer) | _score(cfg, trainer, model, datamodule, best)
    if trainer.is_global_zero:
        write_json(folder / "loader.json", datamodule.describe_loaders())
        spread = spreads_weights(trainer)
        if not spread or Path(best).is_file():
            _draw_predictions(datamodule, _load_model(cfg, best) if spread else model, folder / "predictions.png")
    return metrics


def _draw_predictions(datamodule: BaseDataModule, model: L.LightningModule, path: Path) -> None:
    try:
        draw_predictions(datamodule, model, path)
    except Exception:  # of a model of the user's own; the night's training is not to be lost for a picture
        log.exception("%s could not be drawn", path)


def _find_best(trainer: L.Trainer, folder: Path) -> str:
    """The best checkpoint, or none; weights that no rank has as a whole are put into a file then."""
    best: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not best and spreads_weights(trainer):
        best = str(folder / "checkpoints" / "trained.ckpt")
        trainer.save_checkpoint(best, weights_only=True)
    return best


def _load_model(cfg: DictConfig, path: str) -> L.LightningModule:
    model = build_model(cfg)
    load_weights(model, Path(path))
    return model


def _score(
    cfg: DictConfig, trainer: L.Trainer, model: L.LightningModule, datamodule: BaseDataModule, best: str
) -> dict[str, Any]:
    """Metrics of the best checkpoint, whose weights the model then has.

    A strategy that spreads the weights over the ranks changes the model for good, so each stage gets a new one.
    """
    spread = spreads_weights(trainer)
    if spread and Path(best).is_dir():
        rank_zero_warn(f"{best} is in pieces and is not scored: trainer.strategy.state_dict_type=full writes one file")
        return {}
    if best and not spread:
        load_weights(model, Path(best))
    metrics: dict[str, Any] = {}
    scorers: dict[Stage, Any] = {"val": trainer.validate, "test": trainer.test}
    for stage, score in scorers.items():
        if is_overridden(_STEPS[stage], model) and len(datamodule.dataset(stage)):
            scored = _load_model(cfg, best) if spread else model
            for scores in score(scored, datamodule=datamodule, verbose=False):
                metrics |= scores
    return metrics
