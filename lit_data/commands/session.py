"""From a configuration to the objects of a run."""

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lit_data.commands.checkpoints import AtomicCheckpointIO, TrainedRecord
from lit_data.commands.configuration.locate import resolve_target
from lit_data.commands.configuration.targets import allowed_names, instantiate, trusted_names
from lit_data.commands.launcher import is_first_of_machine
from lit_data.commands.terminal import RunBar, quieten
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.types import Summarises

log = logging.getLogger(__name__)


_BROUGHT_ALONG = ("synthesis", "augment")  # groups that put themselves below `data`


def find_typed() -> set[str]:
    """Keys of this run's command line; none outside a run."""
    words: Sequence[str] = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return {word.lstrip("+").partition("=")[0] for word in words}


def leave_out_unknown(node: DictConfig, key: str, typed: set[str]) -> DictConfig:
    """The node without what files say for another class, so that ``model._target_=mine.Net`` is
    enough.

    Where the target was typed and its class is none of lit_data and derives from none, all keys
    that were not typed are left out, and told; of a class of lit_data those that it has no argument
    for. `synthesis` and `augment`, which every configuration brings along, are left out of data
    that take none. A typed key stays, so one that is wrong is an error still.

    Args:
        node: The node with a ``_target_``.
        key: Its name.
        typed: Keys of the command line.
    """
    target = resolve_target(node._target_, key, allowed_names(), trusted_names())
    arguments = _arguments(target)
    left_out = [
        str(name) for name in node if key == "data" and name in _BROUGHT_ALONG and name not in typed
    ]
    if f"{key}._target_" in typed:
        left_out = [str(name) for name in node if name not in ("_target_", "_args_", "_partial_")]
        arguments = arguments if _is_ours(target) else set()
    given = {name.split(".")[1] for name in typed if name.startswith(f"{key}.")}
    left_out = [name for name in left_out if name not in given | arguments]
    if left_out:
        log.info("%s: %s takes no %s, left out", key, node._target_, ", ".join(left_out))
    chosen = OmegaConf.masked_copy(node, [str(name) for name in node if name not in left_out])
    chosen._set_parent(node._get_parent())
    chosen._set_key(key)  # errors name it
    return chosen


class OwnMonitor(L.Callback):
    """Keeps the last checkpoint as the best where a model of the user's own does not log what is
    monitored.

    What it logs is known after Lightning's sanity check or, without one, after the first
    validation, before a checkpoint is written; of a model without validation, after its first
    epoch.
    """

    def __init__(self) -> None:
        self._checked: set[str] = set()

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._check(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.enable_validation:
            self._check(trainer)

    def _check(self, trainer: L.Trainer) -> None:
        logged = set(trainer.callback_metrics)
        for checkpoint in trainer.checkpoint_callbacks:
            wanted = checkpoint.monitor if isinstance(checkpoint, ModelCheckpoint) else None
            if wanted and wanted not in self._checked | logged:
                checkpoint.monitor = None  # type: ignore[attr-defined]  # of a ModelCheckpoint
                log.warning(
                    "the model logs no %s in validation (it logs %s): the last checkpoint counts as the best; or set "
                    "callbacks.checkpoint.monitor=NAME callbacks.checkpoint.mode=min",
                    wanted,
                    ", ".join(sorted(logged)) or "nothing",
                )
        self._checked |= logged  # what was there once will come again


class LogInterval(L.Callback):
    """Logs once an epoch at least, where an epoch has fewer batches than ``log_every_n_steps``.

    Lightning warns of it in every run of a small set; `trainer.log_every_n_steps` that was typed
    stays as it is.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches, every_n_steps = trainer.num_training_batches, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if 0 < batches < every_n_steps:
            trainer.log_every_n_steps = int(batches)  # type: ignore[attr-defined]  # its logger connector set it


def _is_ours(target: Callable[..., object]) -> bool:
    parents = target.__mro__ if isinstance(target, type) else (target,)
    return any(parent.__module__.startswith("lit_data.") for parent in parents)


def _arguments(target: Callable[..., object]) -> set[str]:
    """Names of all arguments; of a class whose ``__init__`` passes ``**kwargs`` on, those of the classes above too."""
    names: set[str] = set()
    for function in _initialisers(target):
        parameters = inspect.signature(function).parameters.values()
        names |= {spec.name for spec in parameters}
        if all(spec.kind is not spec.VAR_KEYWORD for spec in parameters):
            break
    return names


def _initialisers(target: Callable[..., object]) -> list[Callable[..., object]]:
    if not isinstance(target, type):
        return [target]
    return [
        vars(parent)["__init__"] for parent in target.__mro__[:-1] if "__init__" in vars(parent)
    ]


def build_datamodule(cfg: DictConfig, *, prepared: bool = True) -> BaseDataModule:
    """The datamodule of `cfg.data`, prepared by the first process of each machine.

    The others must not read its datasets before a Trainer has waited for the first.

    Args:
        cfg: The configuration.
        prepared: Whether it is; otherwise nothing is read.

    Raises:
        ConfigError: It is none of ours, which `cfg.command` needs.
    """
    datamodule = build_any_datamodule(cfg)
    if not isinstance(datamodule, BaseDataModule):
        raise ConfigError(
            f"data._target_ gives a {type(datamodule).__name__}: {cfg.command} needs one that derives from "
            "lit_data.datamodules.base.BaseDataModule; fit, validate and test take any LightningDataModule"
        )
    if prepared:
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
        raise ConfigError(
            f"data._target_ gives a {type(datamodule).__name__}: {_tell_kind(datamodule, 'DataModule')}"
        )
    return datamodule


def check_outside_root(cfg: DictConfig, folder: Path, key: str) -> None:
    """Refuse to write into the folder that is read: what is written there would be images of the
    next run.

    Raises:
        ConfigError: It lies below `data.root`.
    """
    root = cfg.data.get("root")
    if (
        root
        and "://" not in str(root)
        and folder.resolve().is_relative_to(Path(str(root)).expanduser().resolve())
    ):
        raise ConfigError(
            f"{key}={folder} lies in data.root={root}, where it would be read as data: choose another"
        )


def prepare(datamodule: L.LightningDataModule) -> None:
    """Let the first process of each machine prepare a datamodule of ours; a Trainer does so for any other."""
    if isinstance(datamodule, BaseDataModule) and is_first_of_machine():
        datamodule.prepare_data()


def name_classes(cfg: DictConfig, datamodule: L.LightningDataModule) -> None:
    """Let `cfg.data.classes`, to which models refer, have the names that the data give where none
    are chosen.

    Labels are read for that, and no images.
    """
    if not isinstance(datamodule, BaseDataModule) or cfg.data.get("classes", "") is not None:
        return
    if datamodule.source is not None and is_first_of_machine():
        datamodule.source.refresh()
    if names := datamodule.find_classes():
        cfg.data.classes = list(names)


def build_model(cfg: DictConfig, *, trained: bool = False) -> L.LightningModule:
    """The module of `cfg.model`, with weights that depend on the seed alone, and on
    `model.net.weights`.

    Args:
        cfg: The configuration.
        trained: A checkpoint gives it its weights next, so those that it would start from are not
            read: their file or server need not be there.

    Raises:
        ConfigError: It is no LightningModule.
    """
    L.seed_everything(cfg.seed % 2**32, verbose=False)
    node = leave_out_unknown(cfg.model, "model", find_typed())
    model = instantiate(_start_at_random(node) if trained else node)
    if not isinstance(model, L.LightningModule):
        raise ConfigError(
            f"model._target_ gives a {type(model).__name__}: {_tell_kind(model, 'Module')}"
        )
    return model


def _start_at_random(node: DictConfig) -> DictConfig:
    """Return the node of a module without the weights that a net of ours would start from."""
    target = OmegaConf.select(node, "net._target_")
    if not str(target).startswith("lit_data.") or OmegaConf.select(node, "net.weights") is None:
        return node
    changed = copy.deepcopy(node)
    changed._set_parent(node._get_parent())
    changed.net.weights = None
    return changed


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
    if cfg.command == "fit":
        callbacks.append(TrainedRecord(cfg))
        if "trainer.log_every_n_steps" not in find_typed():
            callbacks.insert(0, LogInterval())  # others read the interval as training starts
            warnings.filterwarnings(
                "ignore", "The number of training batches .* is smaller than the logging interval"
            )
    else:
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
