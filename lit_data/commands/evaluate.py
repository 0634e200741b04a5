"""``validate`` and ``test``: score a checkpoint."""

from typing import Any

from omegaconf import DictConfig

from lit_data.commands.checkpoints import find_checkpoint, load_weights
from lit_data.commands.result import join_scores
from lit_data.commands.session import build_any_datamodule, build_model, build_trainer, prepare


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score the checkpoint on the split that the command names.

    Returns:
        The metrics of the module.
    """
    checkpoint = find_checkpoint(cfg)
    datamodule, model, trainer = build_any_datamodule(cfg), build_model(cfg), build_trainer(cfg)
    load_weights(model, checkpoint)
    prepare(datamodule)
    score, stage = (trainer.validate, "val") if cfg.command == "validate" else (trainer.test, "test")
    metrics: dict[str, Any] = {}
    for scores in score(model, datamodule=datamodule):
        metrics = join_scores(metrics, scores, stage)
    return metrics
