"""``validate`` and ``test``: score a checkpoint."""

from typing import Any

from omegaconf import DictConfig

from lit_data.app.build import build_trained, prepare
from lit_data.app.checkpoints import is_exported, load_weights, take_precision
from lit_data.app.exported import Graph, use_exported
from lit_data.app.launcher import is_first_rank
from lit_data.app.result import join_scores, write_confusion
from lit_data.app.resuming import check_splits
from lit_data.datamodules.base import BaseDataModule
from lit_data.models.scored import ScoredModule
from lit_data.predict.answers import refusing_nan


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score the checkpoint on the split that the command names.

    Returns:
        The metrics of the module.

    Raises:
        ConfigError: The net answers NaN, of which no score says anything; or see `check_splits`.
    """
    scoring = build_trained(cfg)
    assert scoring.start is not None  # only fit may begin without a checkpoint
    if is_exported(scoring.start):
        use_exported(scoring.model, Graph(scoring.start))
    else:
        load_weights(scoring.model, scoring.start)
        take_precision(scoring.trainer, scoring.start)
    prepare(scoring.datamodule)
    if cfg.command == "validate":
        stage, score = "val", scoring.trainer.validate
    else:
        stage, score = "test", scoring.trainer.test
    datamodule = scoring.datamodule
    if (
        isinstance(datamodule, BaseDataModule)
        and is_first_rank()
        and not is_exported(scoring.start)
    ):
        datamodule.setup(cfg.command)
        check_splits(cfg, scoring.start, datamodule.list_splits(), [stage])
    metrics: dict[str, Any] = {}
    with refusing_nan(scoring.model):
        all_scores = score(scoring.model, datamodule=scoring.datamodule, verbose=False)
    for scores in all_scores:
        metrics = join_scores(metrics, scores, stage)
    if is_first_rank() and isinstance(scoring.model, ScoredModule):
        write_confusion(scoring.folder, scoring.model.confusion, scoring.model.curves)
    return metrics
