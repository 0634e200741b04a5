"""From a configuration to the objects of a run: names are checked first, then objects are built.

The command that runs hands its configuration over here; behind this file there are objects only.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_data.app import EVALUATIONS
from lit_data.app.checkpoints import (
    AtomicCheckpointIO,
    TrainedRecord,
    find_checkpoint,
    find_start,
    is_exported,
    load_weights,
)
from lit_data.app.configuration.names import allow_packages, resolve_target, to_plain
from lit_data.app.configuration.targets import Recipe, instantiate, leave_out_unknown, read_recipe
from lit_data.app.configuration.words import find_choice, find_choices, find_typed, list_typed
from lit_data.app.launcher import is_first_of_machine
from lit_data.app.monitor_guard import MonitorGuard
from lit_data.app.rerun import read_config
from lit_data.app.resuming import ResumedTraining, take_resumed
from lit_data.app.terminal import Forecast, LogInterval, ParameterTable, RunBar, quieten
from lit_data.app.trained import take_trained
from lit_data.core.checks import read_arguments
from lit_data.core.errors import ConfigError
from lit_data.datamodules.base import BaseDataModule
from lit_data.models.net_size import check_numbers, refusing_larger
from lit_data.models.weights import giving_weights
from lit_data.predict.task import find_task_of

log = logging.getLogger(__name__)

_SUMMARY = "enable_model_summary"
_OURS = ("lit_data.", "torch.")
_DDP_IN_TURN = "ddp_find_unused_parameters_true"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Objects of a run of ``fit``, ``validate`` or ``test``; nothing is read or trained yet.

    Attributes:
        trainer: With the callbacks and loggers of the configuration.
        model: To train or to score.
        datamodule: Any LightningDataModule; the Trainer prepares it.
        folder: Where the run writes.
        start: The checkpoint that training goes on from, or whose weights are scored; None for a
            training from its beginning.
        build_model: Returns a new model of the same kind, whose weights a checkpoint is to give.
    """

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule
    folder: Path
    start: Path | None
    build_model: Callable[[], L.LightningModule]

    @property
    def spreads_weights(self) -> bool:
        """True if no rank holds all weights, as with FSDP.

        Such a strategy reads checkpoints after it has cut the model.
        """
        return self.trainer.strategy.restore_checkpoint_after_setup


def build(cfg: DictConfig, trainer: Mapping[str, Any] | None = None) -> Run:
    """Build the objects of a training.

    Args:
        cfg: The configuration of ``fit``; `data.classes` gets the names that the data give.
        trainer: Arguments of the Trainer that replace those of the configuration.

    Raises:
        ConfigError: A name, an option or a checkpoint is refused.
        DataError: There is no such checkpoint, or labels that name the classes are bad.
    """
    start = find_start(
        cfg.ckpt,
        cfg.get("run"),
        cfg.get("resume"),
        runs=_fit_folder(cfg),
        folder=Path(cfg.paths.run),
        cache=Path(cfg.paths.cache),
    )
    if start is not None:
        take_resumed(cfg, start)
    run = _assemble(cfg, start, trainer or {})
    # Last, as names of classes may have come from the data.
    record = TrainedRecord(
        find_choice("experiment") or str(cfg.name), to_plain(cfg.data), to_plain(cfg.model)
    )
    callbacks: list[L.Callback] = run.trainer.callbacks  # type: ignore[attr-defined]  # set by its callback connector
    callbacks += [record, ResumedTraining()]
    return run


def build_trained(cfg: DictConfig) -> Run:
    """Build the objects of ``validate`` and ``test``, for which a checkpoint names the model.

    Args:
        cfg: The configuration, which takes the model and the reading options of the checkpoint.

    Raises:
        ConfigError: See `build`.
        DataError: See `build`.
        StoreError: The file is no checkpoint.
    """
    start = find_trained(cfg)
    take_trained(cfg, start)
    return _assemble(cfg, start, {})


def _assemble(cfg: DictConfig, start: Path | None, trainer_arguments: Mapping[str, Any]) -> Run:
    datamodule = build_any_datamodule(cfg)
    # Its options are refused before labels are read.
    trainer = build_trainer(cfg, **trainer_arguments)
    name_classes(cfg, datamodule)
    with open_dict(cfg):
        cfg.model = leave_out_unknown(cfg.model, "model")  # which checkpoints describe then
    recipe = read_recipe(cfg.model)
    build_fresh = partial(_build_given, recipe, cfg.seed)
    if start is None:
        model = _build_module(recipe, cfg.seed)
    else:
        model = _build_described(recipe, cfg.seed, start)
    return Run(
        trainer=trainer,
        model=model,
        datamodule=datamodule,
        folder=Path(cfg.paths.run),
        start=start,
        build_model=build_fresh,
    )


def load_trained(run: Path, checkpoint: Path, packages: Sequence[str] = ()) -> L.LightningModule:
    """Return the module of a run with the weights of a checkpoint, in evaluation mode, on the host.

    Args:
        run: The run folder, whose configuration says which module.
        checkpoint: The file.
        packages: Packages whose classes the configuration may name.

    Raises:
        LitDataError: The configuration is refused, or the checkpoint is none of this module.
    """
    cfg = read_config(run)
    with allow_packages(packages):
        take_trained(cfg, checkpoint)  # a run may have taken its classes from the data
        model = build_model(cfg, trained=checkpoint)
    load_weights(model, checkpoint)
    return model.eval()


def find_trained(cfg: DictConfig) -> Path:
    """Return the checkpoint that a command reads; for errors see `find_checkpoint`."""
    if is_exported(cfg.ckpt) and cfg.command not in EVALUATIONS:
        raise ConfigError(
            f"ckpt={cfg.ckpt} is an exported file, which {', '.join(EVALUATIONS)} take: "
            "lit-inspect FILE IMAGES --out DIR predicts with it"
        )
    return find_checkpoint(cfg.ckpt, cfg.get("run"), _fit_folder(cfg), Path(cfg.paths.cache))


def _fit_folder(cfg: DictConfig) -> Path:
    return Path(cfg.paths.runs) / "fit" / str(cfg.name)


def build_datamodule(cfg: DictConfig, *, prepared: bool = True) -> BaseDataModule:
    """Build the datamodule of `cfg.data`, prepared by the first process of each machine.

    The others must not read its datasets before a Trainer has waited for the first.

    Args:
        cfg: The configuration.
        prepared: If false, nothing is read.

    Raises:
        ConfigError: It is none of ours, which `cfg.command` needs.
    """
    datamodule = build_any_datamodule(cfg)
    if not isinstance(datamodule, BaseDataModule):
        raise ConfigError(
            f"data._target_ gives a {type(datamodule).__name__}: {cfg.command} needs one that "
            "derives from lit_data.datamodules.base.BaseDataModule; fit, validate and test take "
            "any LightningDataModule"
        )
    if prepared:
        prepare(datamodule)
    return datamodule


def build_input_data(cfg: DictConfig, on_bad: str) -> BaseDataModule:
    """Build the datamodule of ``predict``, without its bad inputs if they are to be left out.

    All images are predicted, so they need not be enough to be split, nor have masks.

    Args:
        cfg: The configuration, whose `data` gets these options.
        on_bad: The rule of ``predict`` for bad inputs.

    Raises:
        DataError: Inputs are bad, and the rule is to end then.
    """
    kind = resolve_target(cfg.data._target_, "data")
    arguments = read_arguments(kind).hints  # a class of the user's own may lack some
    options = {**find_task_of(kind).predict_data, "on_bad": on_bad}
    augment = cfg.data.get("augment")
    if augment is not None and "_target_" in augment:  # of training, with no stage named
        options["augment"] = None
    with open_dict(cfg.data):  # its file may leave an option out
        for name in options.keys() & arguments:
            cfg.data[name] = options[name]
    return build_datamodule(cfg)


def build_any_datamodule(cfg: DictConfig) -> L.LightningDataModule:
    """Build the datamodule of `cfg.data`, whoever's it is; nothing of its data is read.

    Raises:
        ConfigError: It is no LightningDataModule.
    """
    L.seed_everything(cfg.seed % 2**32, verbose=False)  # some split at random as they are made
    datamodule = instantiate(leave_out_unknown(cfg.data, "data"))
    if not isinstance(datamodule, L.LightningDataModule):
        raise _wrong_kind("data", datamodule, "DataModule")
    return datamodule


def prepare(datamodule: L.LightningDataModule, *, learns: bool = False) -> None:
    """Let the first process of each machine prepare a datamodule of ours.

    A Trainer does so for any other.

    Args:
        datamodule: What is prepared.
        learns: A model is to learn from it: files that say nothing of what are refused at once.
    """
    if isinstance(datamodule, BaseDataModule) and is_first_of_machine():
        datamodule.learns = learns
        datamodule.prepare_data()


def name_classes(cfg: DictConfig, datamodule: L.LightningDataModule) -> None:
    """Let `cfg.data.classes`, to which models refer, have the names that the data give.

    Only where none are chosen. Labels are read for that, and no images.
    """
    if not isinstance(datamodule, BaseDataModule) or cfg.data.get("classes", "") is not None:
        return
    if datamodule.source is not None and is_first_of_machine():
        datamodule.source.refresh()
    if names := datamodule.find_classes():
        cfg.data.classes = list(names)


def build_model(cfg: DictConfig, *, trained: Path | None = None) -> L.LightningModule:
    """Build the module of `cfg.model`.

    Its weights depend on the seed and `model.net.weights` alone.

    Args:
        cfg: The configuration.
        trained: The checkpoint that gives it its weights next, so those that it would start from
            are not read: their file or server need not be there.

    Raises:
        ConfigError: It is no LightningModule.
        StoreError: The net is larger than the checkpoint.
    """
    node = leave_out_unknown(cfg.model, "model")
    if trained is None:
        return _build_module(read_recipe(node), cfg.seed)
    return _build_described(read_recipe(node), cfg.seed, trained)


def _build_described(recipe: Recipe, seed: int, source: Path) -> L.LightningModule:
    """Build a module whose options a file gives, which may be anybody's."""
    check_numbers(recipe.plain.get("net"), source)
    is_ours = all(name.startswith(_OURS) for name in recipe.targets)
    with refusing_larger(source, is_ours=is_ours):
        return _build_given(recipe, seed)


def _build_given(recipe: Recipe, seed: int) -> L.LightningModule:
    """Build a module whose weights a checkpoint gives next."""
    with giving_weights():
        return _build_module(recipe, seed)


def _build_module(recipe: Recipe, seed: int) -> L.LightningModule:
    L.seed_everything(seed % 2**32, verbose=False)
    model = recipe.build()
    if not isinstance(model, L.LightningModule):
        raise _wrong_kind("model", model, "Module")
    return model


def _wrong_kind(key: str, built: object, kind: str) -> ConfigError:
    advice = f"it must derive from lightning.Lightning{kind}"
    parents = type(built).__mro__
    if any(parent.__module__.startswith("pytorch_lightning.") for parent in parents):
        advice = (
            f"it derives from pytorch_lightning.Lightning{kind}, and the Trainer here is that of "
            "lightning. Write `import lightning.pytorch as pl` in its file: the same release under "
            "the other name"
        )
    return ConfigError(f"{key}._target_ gives a {type(built).__name__}: {advice}")


def build_callbacks(cfg: DictConfig) -> dict[str, L.Callback]:
    """Build the callbacks of the configuration, by their names there; null stands for none.

    Raises:
        ConfigError: Something is typed of a callback that is not there.
    """
    nodes = _leave_out_callbacks(cfg) if find_choice("callbacks") == "none" else cfg.callbacks
    callbacks: dict[str, L.Callback | None] = instantiate(nodes) or {}
    return {name: callback for name, callback in callbacks.items() if callback is not None}


def _leave_out_callbacks(cfg: DictConfig) -> DictConfig:
    """Return the callbacks that were asked for one by one, without those of the experiment."""
    typed = list_typed(find_typed(), "callbacks")
    asked_for = typed.union(find_choices("extra_callbacks"))
    for name in sorted(typed):
        if "_target_" not in (cfg.callbacks.get(name) or {"_target_": None}):
            raise ConfigError(
                f"callbacks=none has no callback {name!r}: remove callbacks.{name}, or choose "
                "another set, such as callbacks=base"
            )
    left_out = [str(name) for name in cfg.callbacks if name not in asked_for]
    if left_out:
        log.info("callbacks=none skips the callbacks of the experiment: %s", ", ".join(left_out))
    return OmegaConf.masked_copy(cfg.callbacks, [*asked_for.intersection(cfg.callbacks)])


def build_bare_trainer(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """Build the Trainer of `cfg.trainer` without its callbacks and loggers, which are not made.

    Args:
        cfg: The configuration.
        overrides: Trainer arguments that the command sets itself.
    """
    quieten()
    bare = {"callbacks": [], "logger": False, "enable_checkpointing": False, _SUMMARY: False}
    trainer: L.Trainer = instantiate(cfg.trainer, **(bare | overrides))
    return trainer


def build_trainer(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """Build the Trainer of `cfg.trainer` with the loggers and callbacks of the configuration.

    Args:
        cfg: The configuration.
        overrides: Trainer arguments that the command sets itself.
    """
    loggers = list((instantiate(cfg.logger) or {}).values())
    callbacks = _choose_callbacks(cfg)
    shows_bar = overrides.get("enable_progress_bar", cfg.trainer.get("enable_progress_bar", True))
    if shows_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(RunBar())
    overrides = {**_choose_strategy(cfg), "logger": loggers, "callbacks": callbacks, **overrides}
    shows_parts = overrides.get(_SUMMARY, cfg.trainer.get(_SUMMARY, True))
    if shows_parts and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        callbacks.append(ParameterTable())
        overrides[_SUMMARY] = False
    quieten()
    trainer: L.Trainer = instantiate(cfg.trainer, **overrides)
    with suppress(NotImplementedError):  # a strategy that writes checkpoints itself
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return trainer


def _choose_strategy(cfg: DictConfig) -> dict[str, str]:
    """Return a strategy in the place of DDP for models of which some weights rest in each backward."""
    target = cfg.model.get("_target_")
    if target is None or cfg.trainer.get("strategy") != "ddp":
        return {}
    learns_in_turn = getattr(resolve_target(target, "model"), "nets_learn_in_turn", False)
    return {"strategy": _DDP_IN_TURN} if learns_in_turn else {}


def _choose_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """Return the callbacks of the configuration with those that a run needs beside them."""
    typed = find_typed()
    callbacks = list(build_callbacks(cfg).values())
    is_ours = str(cfg.model.get("_target_")).startswith("lit_data.")
    knows_names = is_ours or "callbacks.checkpoint.monitor" in typed
    callbacks.append(MonitorGuard(knows_names=knows_names))
    if cfg.command != "fit":
        return [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    callbacks.append(Forecast())
    if "trainer.log_every_n_steps" not in typed:
        callbacks.insert(0, LogInterval())  # others read the interval as training starts
        warnings.filterwarnings(
            "ignore", "The number of training batches .* is smaller than the logging interval"
        )
    return callbacks
