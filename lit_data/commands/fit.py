"""``fit``: train, then score the best checkpoint, and draw what went in and what came out."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig

from lit_data.commands.pictures import draw_predictions, draw_samples
from lit_data.commands.result import write_json
from lit_data.commands.session import build_datamodule, build_model, build_trainer, collect_metrics, load_weights
from lit_data.datamodules.base import BaseDataModule

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train.

    Writes into the run folder: checkpoints, logs, ``samples.png`` before training, ``predictions.png`` after it,
    ``loader.json`` with the workers of each stage and the measurement that chose them.

    Returns:
        Metrics of the best checkpoint on the validation and the test split, and what the callbacks measured.
    """
    datamodule, model = build_datamodule(cfg), build_model(cfg)
    try:
        return _fit(cfg, datamodule, model)
    finally:
        datamodule.teardown("fit")  # Lightning does not when training is broken off, and the workers would stay


def _fit(cfg: DictConfig, datamodule: BaseDataModule, model: L.LightningModule) -> dict[str, Any]:
    folder = Path(cfg.paths.run)
    datamodule.setup("fit")
    draw_samples(datamodule, folder / "samples.png", stage="train")
    trainer = build_trainer(cfg)
    trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt, weights_only=True)
    metrics = collect_metrics(trainer) | _score(trainer, model, datamodule)
    if trainer.is_global_zero:
        write_json(folder / "loader.json", datamodule.describe_loaders())
        draw_predictions(datamodule, model, folder / "predictions.png")
    return metrics


def _score(trainer: L.Trainer, model: L.LightningModule, datamodule: BaseDataModule) -> dict[str, Any]:
    """Metrics of the best checkpoint, whose weights the model then has."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best:
        load_weights(model, Path(best))
    metrics: dict[str, Any] = {}
    for stage, score in (("val", trainer.validate), ("test", trainer.test)):
        if len(datamodule.dataset(stage)):  # type: ignore[arg-type]
            for scores in score(model, datamodule=datamodule, verbose=False):
                metrics |= scores
    return metrics
