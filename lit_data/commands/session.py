"""From a configuration to the objects of a run."""

import logging
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig

from lit_data.callbacks.checkpoint_io import AtomicCheckpointIO
from lit_data.commands.foreign import OwnMonitor, find_typed, leave_out_unknown
from lit_data.commands.launcher import is_first_of_machine
from lit_data.commands.targets import instantiate
from lit_data.commands.terminal import RunBar, quieten
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError, StoreError
from lit_data.types import Summarises

log = logging.getLogger(__name__)

_NAMED: Final = ("best", "last")
_RESUMED: Final = ("last", "interrupted", "step")  # checkpoints that hold the whole state of a training


def build_datamodule(cfg: DictConfig) -> BaseDataModule:
    """The datamodule of `cfg.data`, prepared by the first process of each machine.

    The others must not read its datasets before a Trainer has waited for the first.

    Raises:
        ConfigError: It is none of ours, which `cfg.command` needs.
    """
    datamodule = build_any_datamodule(cfg)
    if not isinstance(datamodule, BaseDataModule):
        raise ConfigError(
            f"data._target_ gives a {type(datamodule).__name__}: {cfg.command} needs one that derives from "
            "lit_data.datamodules.base.BaseDataModule; fit, validate and test take any LightningDataModule"
        )
    prepare(datamodule)
    return datamodule


def build_any_datamodule(cfg: DictConfig) -> L.LightningDataModule:
    """The datamodule of `cfg.data`, whoever's it is; nothing of its data is read.

    Raises:
        ConfigError: It is no LightningDataModule.
    """
    L.seed_everything(cfg.seed % 2**32, verbose=False)  # some split at random as they are made
    datamodule = instantiate(leave_out_unknown(cfg.data, "data", find_typed()))
    if not isinstance(datamodule, L.LightningDataModule):
        raise ConfigError(f"data._target_ gives a {type(datamodule).__name__}: {_tell_kind(datamodule, 'DataModule')}")
    return datamodule


def check_outside_root(cfg: DictConfig, folder: Path, key: str) -> None:
    """Refuse to write into the folder that is read: what is written there would be images of the next run.

    Raises:
        ConfigError: It lies below `data.root`.
    """
    root = cfg.data.get("root")
    if root and "://" not in str(root) and folder.resolve().is_relative_to(Path(str(root)).expanduser().resolve()):
        raise ConfigError(f"{key}={folder} lies in data.root={root}, where it would be read as data: choose another")


def prepare(datamodule: L.LightningDataModule) -> None:
    """Let the first process of each machine prepare a datamodule of ours; a Trainer does so for any other."""
    if isinstance(datamodule, BaseDataModule) and is_first_of_machine():
        datamodule.prepare_data()


def build_model(cfg: DictConfig) -> L.LightningModule:
    """The module of `cfg.model`, with weights that depend on the seed alone.

    Raises:
        ConfigError: It is no LightningModule.
    """
    L.seed_everything(cfg.seed % 2**32, verbose=False)
    model = instantiate(leave_out_unknown(cfg.model, "model", find_typed()))
    if not isinstance(model, L.LightningModule):
        raise ConfigError(f"model._target_ gives a {type(model).__name__}: {_tell_kind(model, 'Module')}")
    return model


def _tell_kind(found: object, kind: str) -> str:
    if any(parent.__module__.startswith("pytorch_lightning.") for parent in type(found).__mro__):
        return (
            f"it derives from pytorch_lightning.Lightning{kind}, and the Trainer here is that of lightning. Write "
            "`import lightning.pytorch as pl` in its file: the same release under the other name"
        )
    return f"it must derive from lightning.Lightning{kind}"


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
    is_ours = str(cfg.model.get("_target_")).startswith("lit_data.")
    if not is_ours and "callbacks.checkpoint.monitor" not in find_typed():
        callbacks.append(OwnMonitor())
    if cfg.command != "fit":
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    shows_bar = overrides.get("enable_progress_bar", cfg.trainer.get("enable_progress_bar", True))
    if shows_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(RunBar())
    overrides = {"logger": loggers, "callbacks": callbacks, **overrides}
    quieten()
    trainer: L.Trainer = instantiate(cfg.trainer, **overrides)
    with suppress(NotImplementedError):  # a strategy that writes checkpoints itself
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return trainer


def find_checkpoint(cfg: DictConfig) -> Path:
    """The checkpoint `cfg.ckpt`: a path, or `best` or `last`, the newest of that name; null stands for `best`.

    Raises:
        ConfigError: `cfg.ckpt` is no text, or empty.
        DataError: The file does not exist, or there is none to choose.
    """
    if cfg.ckpt not in (None, *_NAMED):
        return _check_checkpoint(cfg.ckpt)
    folder = Path(cfg.paths.runs) / "fit" / cfg.name
    return _choose_newest(folder, f"**/checkpoints/{cfg.ckpt or 'best'}.ckpt")


def find_start(cfg: DictConfig) -> Path | None:
    """The checkpoint that ``fit`` goes on from, if any: that of `ckpt`, or the newest of the run `resume`.

    Raises:
        ConfigError: Both are given, or one of them is no text, or empty.
        DataError: The file does not exist or is no checkpoint, or there is none to choose.
    """
    resume = cfg.get("resume")
    if resume is None:
        return None if cfg.ckpt is None else _check_training(find_checkpoint(cfg))
    if cfg.ckpt is not None:
        raise ConfigError(f"resume={resume} and ckpt={cfg.ckpt}: give one of them")
    if not isinstance(resume, str) or not resume:
        raise ConfigError(f"resume={resume!r}: give latest, or the folder of a run")
    runs = Path(cfg.paths.runs) / "fit" / cfg.name
    if resume != "latest" and not Path(resume).is_dir():
        raise DataError(f"resume={resume} is not a folder: give latest, or the folder of a run below {runs}")
    patterns = [f"{'**/' if resume == 'latest' else ''}checkpoints/{name}.ckpt" for name in _RESUMED]
    return _check_training(_choose_newest(runs if resume == "latest" else Path(resume), *patterns))


def _choose_newest(folder: Path, *patterns: str) -> Path:
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    if not found:
        names = " or ".join(pattern.rpartition("/")[2] for pattern in patterns)
        raise DataError(f"no {names} below {folder}: run fit first, or give ckpt=<path>")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    log.info("checkpoint: %s", newest)
    return newest


def _check_checkpoint(ckpt: object) -> Path:
    if not isinstance(ckpt, str) or not ckpt:
        raise ConfigError(f"ckpt={ckpt!r}: give the path of a checkpoint, {' or '.join(_NAMED)}; null for none")
    path = Path(ckpt)
    if not (path.is_file() or path.is_dir()):  # reading a FIFO would wait for ever
        raise DataError(f"ckpt={ckpt} is not a file: give the path of a checkpoint that fit wrote, or best, or last")
    return path


def _check_training(path: Path) -> Path:
    """Refuse a file that holds no state of a training, before the data are read."""
    if path.is_dir():  # in pieces, one of each rank
        return path
    found = _read_checkpoint(path, mapped=True)  # its weights are read once, by Lightning
    if missing := [key for key in ("state_dict", "loops", "optimizer_states") if key not in found]:
        raise StoreError(
            f"{path} holds no {', '.join(missing)}: training goes on from a checkpoint that Lightning wrote with them, "
            "such as last.ckpt"
        )
    return path


def _read_checkpoint(path: Path, *, mapped: bool = False) -> Mapping[str, Any]:
    """A checkpoint on the host; only plain data is unpickled.

    Args:
        path: The file.
        mapped: Leave the tensors on the disk until they are looked at.

    Raises:
        StoreError: The file is none.
    """
    try:
        mapped = mapped and zipfile.is_zipfile(path)  # else torch has another way to say that it is none
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:  # whose text recommends to run what the file says
        raise StoreError(f"{path} is no checkpoint that can be read: it is damaged, or holds more than data") from error
    except (EOFError, LookupError, AttributeError, RuntimeError, TypeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{path} is no checkpoint that can be read: {reason}") from error
    if not isinstance(found, Mapping):
        raise StoreError(f"{path} is no checkpoint: it holds a {type(found).__name__}")
    return found


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
    found = _read_checkpoint(path)
    try:
        model.load_state_dict(found["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
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
