"""``predict``: what a model says of every image, volume or patch of a folder."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig

from lit_data.commands.session import build_datamodule, build_model, build_trainer, find_checkpoint, load_weights
from lit_data.commands.views import open_view
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Predict everything below the root.

    What is written into the run folder depends on the data: see `MapWriter` for patches, `BoxWriter` for images with
    boxes and `VolumeWriter` for volumes.

    Returns:
        How much was predicted and found.
    """
    folder, checkpoint = Path(cfg.paths.run), find_checkpoint(cfg)
    datamodule, model = build_datamodule(cfg), build_model(cfg)
    datamodule.setup("predict")
    load_weights(model, checkpoint)
    options = cfg.predict
    writer = open_view(datamodule).open_writer(folder, threshold=options.threshold, min_area_px=options.min_area_px)
    trainer = _build_trainer_of_one(cfg, callbacks=[writer], logger=False)
    trainer.predict(model, datamodule=datamodule, return_predictions=False)
    return writer.finish()


def _build_trainer_of_one(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """A Trainer of one process, because the patches of an image must meet in one, and images come in order.

    Raises:
        ConfigError: A launcher has started several.
    """
    trainer = build_trainer(cfg, **overrides)
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    environment = trainer.strategy.cluster_environment
    if environment is not None and environment.creates_processes_externally and environment.world_size() > 1:
        raise ConfigError(
            f"predict runs in one process, and {environment.world_size()} were started: "
            "start it without torchrun or srun"
        )
    log.info("predict puts what it finds together in one process: only the first device is used")
    return build_trainer(cfg, devices=1, num_nodes=1, strategy="auto", **overrides)
