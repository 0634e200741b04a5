"""``validate`` and ``test``: score a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.checkpoints import find_checkpoint, load_weights
from lit_data.commands.configuration.targets import allow_packages
from lit_data.commands.result import join_scores
from lit_data.commands.session import (
    build_any_datamodule,
    build_model,
    build_trainer,
    name_classes,
    prepare,
)
from lit_data.commands.trained import take_trained


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score the checkpoint on the split that the command names.

    Returns:
        The metrics of the module.
    """
    checkpoint = find_checkpoint(cfg)
    take_trained(cfg, checkpoint)
    datamodule, trainer = build_any_datamodule(cfg), build_trainer(cfg)
    name_classes(cfg, datamodule)
    model = build_model(cfg, trained=True)
    load_weights(model, checkpoint)
    prepare(datamodule)
    score, stage = (
        (trainer.validate, "val") if cfg.command == "validate" else (trainer.test, "test")
    )
    metrics: dict[str, Any] = {}
    for scores in score(model, datamodule=datamodule):
        metrics = join_scores(metrics, scores, stage)
    return metrics


def load_trained(run: Path, checkpoint: Path, packages: Sequence[str] = ()) -> L.LightningModule:
    """The module of a run with the weights of a checkpoint, in evaluation mode, on the host.

    Args:
        run: The run folder, whose configuration says which module.
        checkpoint: The file.
        packages: Packages whose classes the configuration may name.

    Raises:
        LitDataError: The configuration is refused, or the checkpoint is none of this module.
    """
    cfg = OmegaConf.load(run / ".hydra" / "config.yaml")
    assert isinstance(cfg, DictConfig)
    with allow_packages(packages):
        take_trained(cfg, checkpoint)  # a run may have taken its classes from the data
        model = build_model(cfg, trained=True)
    load_weights(model, checkpoint)
    return model.eval()
