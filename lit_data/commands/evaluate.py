"""``validate`` and ``test``: score a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule
from omegaconf import DictConfig
from torch import nn

from lit_data.batch_form import walk_tensors
from lit_data.commands.build import build_trained, prepare
from lit_data.commands.checkpoints import load_weights
from lit_data.commands.exported import Graph, is_exported, use_exported
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.result import join_scores, write_confusion
from lit_data.errors import ConfigError
from lit_data.modules.scored import ScoredModule


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score the checkpoint on the split that the command names.

    Returns:
        The metrics of the module.

    Raises:
        ConfigError: The net answers NaN, of which no score says anything.
    """
    scoring = build_trained(cfg)
    assert scoring.start is not None  # only fit may begin without a checkpoint
    if is_exported(scoring.start):
        use_exported(scoring.model, Graph(scoring.start))
    else:
        load_weights(scoring.model, scoring.start)
    prepare(scoring.datamodule)
    if cfg.command == "validate":
        stage, score = "val", scoring.trainer.validate
    else:
        stage, score = "test", scoring.trainer.test
    metrics: dict[str, Any] = {}
    with refusing_nan(scoring.model):
        all_scores = score(scoring.model, datamodule=scoring.datamodule, verbose=False)
    for scores in all_scores:
        metrics = join_scores(metrics, scores, stage)
    if is_first_rank() and isinstance(scoring.model, ScoredModule):
        write_confusion(scoring.folder, scoring.model.confusion)
    return metrics


@contextmanager
def refusing_nan(model: LightningModule) -> Iterator[None]:
    """Refuse a model that answered NaN while it was scored: marks below a threshold would be right.

    Raises:
        ConfigError: It did.
    """
    is_nan = torch.zeros((), dtype=torch.bool)

    def look(_module: nn.Module, _images: object, answers: object) -> None:
        nonlocal is_nan
        for answer in walk_tensors(answers):
            if answer.is_floating_point():
                # On the device, which nothing waits for.
                is_nan = is_nan.to(answer.device) | answer.isnan().any()

    parts = [part for part in (model, getattr(model, "net", None)) if isinstance(part, nn.Module)]
    handles = [part.register_forward_hook(look) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if is_nan:
        raise ConfigError(
            "the net answers NaN, so its scores mean nothing: set trainer.precision=32-true if it is "
            "lower, or take the checkpoint of an earlier epoch"
        )
