"""From a configuration to the objects of a run."""

import logging
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import DictConfig

from lit_data.commands.foreign import OwnMonitor, find_typed, leave_out_unknown
from lit_data.commands.launcher import is_first_of_machine
from lit_data.commands.targets import instantiate
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError, StoreError
from lit_data.types import Summarises

log = logging.getLogger(__name__)


def build_datamodule(cfg: DictConfig) -> BaseDataModule:
    """The datamodule of `cfg.data`, prepared by the first process of each machine.

    The others must not read its datasets before a Trainer has waited for the first.
    """
    datamodule = instantiate(leave_out_unknown(cfg.data, "data", find_typed()))
    if not isinstance(datamodule, BaseDataModule):
        raise ConfigError(f"data._target_ gives a {type(datamodule).__name__}: it must derive from BaseDataModule")
    if is_first_of_machine():
        datamodule.prepare_data()
    return datamodule


def build_model(cfg: DictConfig) -> L.LightningModule:
    """The module of `cfg.model`, with weights that depend on the seed alone.

    Raises:
        ConfigError: It is no LightningModule.
    """
    L.seed_everything(cfg.seed % 2**32, verbose=False)
    model = instantiate(leave_out_unknown(cfg.model, "model", find_typed()))
    if not isinstance(model, L.LightningModule):
        raise ConfigError(f"model._target_ gives a {type(model).__name__}: {_tell_modules(model)}")
    return model


def _tell_modules(model: object) -> str:
    if any(parent.__module__.startswith("pytorch_lightning.") for parent in type(model).__mro__):
        return (
            "it derives from pytorch_lightning.LightningModule, and the Trainer here is that of lightning. Write "
            "`import lightning.pytorch as pl` in its file: the same release under the other name"
        )
    return "it must derive from lightning.LightningModule"


def build_callbacks(cfg: DictConfig) -> dict[str, L.Callback]:
    """The callbacks of the configuration, by their names there; those that are null are left out."""
    found: dict[str, L.Callback | None] = instantiate(cfg.callbacks) or {}
    return {name: callback for name, callback in found.items() if callback is not None}


def build_trainer(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """The Trainer of `cfg.trainer` with the loggers and callbacks of the configuration.

    Args:
        cfg: The configuration.
        overrides: Trainer arguments that the command sets itself.
    """
    loggers = list((instantiate(cfg.logger) or {}).values())
    callbacks = list(build_callbacks(cfg).values())
    typed = find_typed()
    if "model._target_" in typed and "callbacks.checkpoint.monitor" not in typed:
        callbacks.append(OwnMonitor())
    if cfg.command != "fit":
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    overrides = {"logger": loggers, "callbacks": callbacks, **overrides}
    trainer: L.Trainer = instantiate(cfg.trainer, **overrides)
    return trainer


def find_checkpoint(cfg: DictConfig) -> Path:
    """The checkpoint `cfg.ckpt`; without one, the newest best checkpoint of this experiment.

    Raises:
        DataError: The file does not exist, or there is none to choose.
    """
    if cfg.ckpt is not None:
        path = Path(cfg.ckpt)
        if not path.is_file():
            raise DataError(f"ckpt={cfg.ckpt} is not a file: give the path of a checkpoint that fit wrote")
        return path
    folder = Path(cfg.paths.runs) / "fit" / cfg.name
    found: list[Path] = sorted(folder.glob("**/checkpoints/best.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"no checkpoint below {folder}: run fit first, or give ckpt=<path>")
    log.info("checkpoint: %s", found[-1])
    return found[-1]


def load_weights(model: L.LightningModule, path: Path) -> None:
    """Give a model the weights of a checkpoint, and nothing else of it; only plain data is unpickled.

    Raises:
        StoreError: The file is no checkpoint, or that of another model.
    """
    if path.is_dir():
        raise StoreError(
            f"{path} is a checkpoint in pieces, one of each rank: make one file of them with "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint, or train with "
            "trainer.strategy.state_dict_type=full"
        )
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{path} does not hold weights of {type(model).__name__}: {reason}") from error


def spreads_weights(trainer: L.Trainer) -> bool:
    """Whether no rank holds all weights, as with FSDP; such a strategy reads checkpoints after it has cut the model."""
    return trainer.strategy.restore_checkpoint_after_setup


def collect_metrics(trainer: L.Trainer) -> dict[str, Any]:
    """What the callbacks have to say, for summary.json."""
    metrics: dict[str, Any] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        if isinstance(callback, Summarises):
            metrics |= callback.summary()
    return metrics
