"""A target of the user's own, typed in place of the one that a group's file names."""

import inspect
import logging
from collections.abc import Callable, Sequence

import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lit_data.commands.locate import resolve_target
from lit_data.commands.targets import allowed_names, trusted_names

log = logging.getLogger(__name__)

_BROUGHT_ALONG = ("synthesis", "augment")  # groups that put themselves below `data`


def find_typed() -> set[str]:
    """Keys of this run's command line; none outside a run."""
    words: Sequence[str] = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return {word.lstrip("+").partition("=")[0] for word in words}


def leave_out_unknown(node: DictConfig, key: str, typed: set[str]) -> DictConfig:
    """The node without what files say for another class, so that ``model._target_=mine.Net`` is enough.

    Where the target was typed and its class is none of lit_data and derives from none, all keys that were not typed are
    left out, and told; of a class of lit_data those that it has no argument for. `synthesis` and `augment`, which
    every configuration brings along, are left out of data that take none. A typed key stays, so one that is wrong is
    an error still.

    Args:
        node: The node with a ``_target_``.
        key: Its name.
        typed: Keys of the command line.
    """
    target = resolve_target(node._target_, key, allowed_names(), trusted_names())
    arguments = _arguments(target)
    left_out = [str(name) for name in node if key == "data" and name in _BROUGHT_ALONG and name not in typed]
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
    """Keeps the last checkpoint as the best where a model of the user's own does not log what is monitored.

    What it logs is known after Lightning's sanity check or, without one, after the first validation, before a
    checkpoint is written; of a model without validation, after its first epoch.
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
    return [vars(parent)["__init__"] for parent in target.__mro__[:-1] if "__init__" in vars(parent)]
