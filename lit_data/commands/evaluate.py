"""``validate`` and ``test``: score a checkpoint."""

from typing import Any

from omegaconf import DictConfig

from lit_data.commands.session import build_datamodule, build_model, build_trainer, find_checkpoint, load_weights


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score the checkpoint on the split that the command names.

    Returns:
        The metrics of the module.
    """
    checkpoint = find_checkpoint(cfg)
    datamodule, model = build_datamodule(cfg), build_model(cfg)
    load_weights(model, checkpoint)
    trainer = build_trainer(cfg)
    score = trainer.validate if cfg.command == "validate" else trainer.test
    metrics: dict[str, Any] = {}
    for scores in score(model, datamodule=datamodule):
        metrics |= scores
    return metrics
