"""The nets that mode ``predict`` measures: one for each way, all with the same weights."""

import logging
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn

from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.checkpoints import find_checkpoint, load_weights
from lit_data.commands.session import build_model, build_trainer
from lit_data.datamodules.base import BaseDataModule
from lit_data.tasks.nets import ProbabilityNet

log = logging.getLogger(__name__)

Weights = dict[str, Any]


def find_weights(cfg: DictConfig, datamodule: BaseDataModule, options: BenchmarkOptions) -> Weights:
    """Weights of `cfg.ckpt`, or of a model that is trained for `options.steps`: enough for masks that can be compared.

    Raises:
        DataError: The checkpoint does not exist.
        StoreError: It is that of another model.
    """
    model = build_model(cfg)
    if cfg.ckpt is not None:
        load_weights(model, find_checkpoint(cfg))
        return model.state_dict()
    log.info("training %d steps, as there is no ckpt", options.steps)
    trainer = build_trainer(
        cfg,
        callbacks=[],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=options.steps,
    )
    trainer.fit(model, datamodule=datamodule)
    return {name: tensor.cpu() if isinstance(tensor, Tensor) else tensor for name, tensor in model.state_dict().items()}


def make_net(cfg: DictConfig, datamodule: BaseDataModule, weights: Weights, channels: int) -> nn.Module:
    """A net with these weights, from [B, C, h, w] to probability [B, 1, h, w]."""
    model = build_model(cfg)
    model.load_state_dict(weights)
    return ProbabilityNet(model, tuple(range(channels)), datamodule.batch_format, datamodule.channel_names).eval()
