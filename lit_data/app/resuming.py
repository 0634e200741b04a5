"""Options of a training that goes on: what is typed takes effect, and the rest is that of the checkpoint.

A checkpoint holds the optimizers with their options, the schedules with their counts, and the
weights. Lightning restores these over whatever the configuration says.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lit_data.app.configuration.names import to_plain
from lit_data.app.configuration.targets import OF_CHECKPOINT, leave_out_unknown
from lit_data.app.configuration.words import find_typed, show_override
from lit_data.app.record import read_record
from lit_data.app.run_folder import SPLIT_TABLE, SPLITTING
from lit_data.app.trained import (
    check_named,
    is_plain,
    is_trained_root,
    list_unnamed,
    put_typed,
    take_model,
    take_reading,
)
from lit_data.core.errors import ConfigError, escape, show_path
from lit_data.core.files import flatten
from lit_data.core.lightning_internals import load_waiting_states
from lit_data.datasets.split_lists import read_split_table
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_RATES = ("lr", "initial_lr")
_OVERRULED = ("net.weights", "net.prior", "net.normalize")
"""Options of `model` that give the weights which a new training begins with."""
_HELD = ("net", "generator", "discriminator", "normality", "schedule")
_COUNTS = ("last_epoch", "_step_count", "_last_lr")
"""Parts of a schedule's state that say where it stands."""
_FACTORS = LambdaLR.__name__
_NAMES = {
    "schedule": "model.schedule",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
}
_BEGIN_ANEW = (
    "to train with others, start again: remove resume and ckpt, and start from the weights with "
    "model.net.weights={start}"
)


def take_resumed(cfg: DictConfig, start: Path) -> None:
    """Let a training go on with the model and the reading of its checkpoint, but for what is typed.

    Where a model is typed, it goes on with the nets, the optimizer and the schedule alone.

    Args:
        cfg: The configuration of ``fit``.
        start: The checkpoint.

    Raises:
        ConfigError: What is typed cannot take effect: another kind of net or optimizer, whose state
            the checkpoint does not hold, or weights to begin with. Or it has a class that nobody
            has named.
    """
    record = read_record(start)
    if record is None:
        return
    trained, typed = record["model"], find_typed()
    if cfg.data._target_ == record["kind"]:
        before = flatten({"data": to_plain(cfg.data)})
        take_reading(cfg, record, start)
        _log_changes(before, flatten({"data": to_plain(cfg.data)}))
    if "model" not in typed:
        check_named(cfg.model, trained, typed, start)
    if cfg.model.get("_target_") != trained.get("_target_"):
        if not {"model", "model._target_"} & typed:
            take_model(cfg, trained, typed, start)
            log.info("from the checkpoint: the model of %s", start)
        return
    _check_overruled(cfg.model, trained, typed, start)
    with open_dict(cfg):
        cfg.model = leave_out_unknown(cfg.model, "model")
    cfg.model._set_flag(OF_CHECKPOINT, True)
    with_typed = to_plain(put_typed(cfg, trained, typed))
    for name in _list_restored(cfg.model, trained, typed):
        _take_option(cfg.model, name, with_typed[name], trained[name], typed, start)


def check_splits(
    cfg: DictConfig,
    start: Path,
    rows: Sequence[Mapping[str, str]],
    splits: Sequence[str] = ("val", "test"),
) -> None:
    """Refuse to score images that were trained on, unless splits are typed.

    Random splits are others after an image was added to the folder or removed from it.

    Args:
        cfg: The configuration.
        start: The checkpoint, which is scored or resumed.
        rows: Split of each image now, from `BaseDataModule.list_splits`.
        splits: Those that are scored.

    Raises:
        ConfigError: Names the first such image and the splits of the run.
    """
    table = start.parent.parent / SPLIT_TABLE
    if not table.is_file() or not is_trained_root(read_record(start), cfg.data.get("root")):
        return
    trained = {row.rows[0] for row in read_split_table(table) if row.split == "train"}
    scored = [row["image"] for row in rows if row["split"] in splits and row["image"] in trained]
    if not scored:
        return
    text = (
        f"{start} was trained on {counted(len(scored), 'image')} of the present {' and '.join(splits)}, "
        f"such as {show_path(scored[0])}"
    )
    if find_typed() & {f"data.{name}" for name in SPLITTING}:
        log.warning("%s: their scores will be too good", text)
        return
    raise ConfigError(
        f"{text}, because the images in the folder have changed: keep the splits with "
        f"{show_override('data.splits', str(table))}, and add a line to it for each new image to train on"
    )


def _list_restored(model: DictConfig, trained: Mapping[str, Any], typed: set[str]) -> Iterator[str]:
    """Yield the options that are those of the checkpoint, but for what is typed of them.

    These are all but references to other nodes, or where a model is typed those alone whose
    consequences the checkpoint holds.
    """
    unnamed_parts = {key.split(".")[1] for key in list_unnamed(model, trained)}
    for name in trained:
        refers = name in model and OmegaConf.is_interpolation(model, name)
        if name == "_target_" or refers or name in unnamed_parts:
            continue
        if _is_held(name) or "model" not in typed:
            yield name


def _is_held(name: str) -> bool:
    """Return True for an option of which the checkpoint holds weights, states or counts."""
    return name in _HELD or name.endswith("optimizer")


def _check_overruled(
    model: DictConfig, trained: Mapping[str, Any], typed: set[str], start: Path
) -> None:
    trained_options = flatten(trained)
    for name in _OVERRULED:
        key = f"model.{name}"
        value = OmegaConf.select(model, name)
        if key in typed and value != trained_options.get(name):
            raise ConfigError(
                f"{key}={value} has no effect on a training that resumes with the weights of "
                f"{start}: remove it, or remove resume and ckpt to start again"
            )


def _take_option(
    model: DictConfig,
    name: str,
    taken: Any,  # noqa: ANN401 - plain data
    trained: object,
    typed: set[str],
    start: Path,
) -> None:
    """Set an option of the model to that of the checkpoint, with what is typed of it.

    Raises:
        ConfigError: Another class is typed in the place of one whose state the checkpoint holds, or
            it is none that a checkpoint may name.
    """
    key = f"model.{name}"
    here: Any = to_plain(model).get(name)
    references: dict[str, Any] = {}
    if isinstance(here, Mapping) and isinstance(trained, Mapping):
        kind, trained_kind = here.get("_target_"), str(trained.get("_target_"))
        is_typed = f"{key}._target_" in typed
        if "model" in typed and not name.endswith("optimizer"):
            is_typed = True
        if kind == trained.get("_target_"):
            taken, references = {**here, **taken}, _list_references(model[name])
        elif is_typed and not _is_held(name):
            return
        elif is_typed or not is_plain(trained_kind):
            raise ConfigError(
                f"{key}._target_={kind}, and {start} holds the state of {escape(trained_kind)}: "
                f"{_BEGIN_ANEW.format(start=start)}"
            )
    _log_changes(flatten({key: here}), flatten({key: taken}))
    with open_dict(model):
        model[name] = {**taken, **references} if references else taken


def _log_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for option, value in after.items():
        if before.get(option) != value:
            log.info("from the checkpoint: %s=%s", option, escape(str(value)))


def _list_references(node: DictConfig) -> dict[str, Any]:
    """Return the parts of a node that are those of other nodes, such as names of classes."""
    references: dict[str, Any] = {}
    parts: Any = OmegaConf.to_container(node, resolve=False)
    for name, value in parts.items():
        if OmegaConf.is_interpolation(node, name):
            references[name] = value
    return references


class ResumedTraining(Callback):
    """Notes in checkpoints how optimizers and schedules began, and lets changes of that take effect.

    Lightning restores both as they were saved. What this run builds differently than the first one
    replaces that before it is restored: options of the optimizer, schedules, and the learning rate
    that follows from them. Where nothing differs, nothing is touched.
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None
        self._begun: dict[str, Any] = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._begun

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        _keep_patience(trainer, checkpoint)
        self._checkpoint = checkpoint
        if self._begun:  # a strategy that restores weights after its setup
            self._adjust(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = _describe(trainer, pl_module)
        self._adjust(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        load_waiting_states(trainer)

    def _adjust(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        saved = checkpoint["callbacks"].get(self.state_key, {})
        if not isinstance(saved, Mapping) or saved.keys() != self._begun.keys():
            return  # of an earlier release, or of another program
        if saved == self._begun:
            return
        changes = _change_options(checkpoint, saved, self._begun)
        changes += _Schedules(trainer, checkpoint, saved, self._begun).change()
        if changes:
            log.info("training resumes with %s", ", ".join(changes))


def _keep_patience(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Let the patience of the configuration count, which Lightning takes from the checkpoint."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        state = checkpoint["callbacks"].get(callback.state_key)
        if isinstance(callback, EarlyStopping) and isinstance(state, dict):
            state["patience"] = callback.patience


def _describe(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Describe new optimizers and schedules by plain values."""
    optimizers = []
    for optimizer in trainer.optimizers:
        groups = []
        for group in optimizer.param_groups:
            groups.append({name: value for name, value in group.items() if name != "params"})
        optimizers.append({"kind": type(optimizer).__name__, "groups": groups})
    schedules = []
    for config in trainer.lr_scheduler_configs:
        kind, interval = type(config.scheduler).__name__, config.interval
        schedules.append(
            {"kind": kind, "interval": interval, "state": config.scheduler.state_dict()}
        )
    return {
        "optimizers": optimizers,
        "schedules": schedules,
        "schedule": getattr(pl_module, "schedule", None),
        "epochs": trainer.max_epochs,
        "steps": trainer.max_steps,
        "epoch_steps": _count_epoch_steps(trainer),
    }


def _count_epoch_steps(trainer: Trainer) -> int | None:
    """Return the steps of an epoch; None before a schedule has asked for them, or without a length."""
    batches = trainer.num_training_batches if trainer.train_dataloader is not None else math.inf
    if not 0 < batches < math.inf:
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches)


def _change_options(
    checkpoint: Mapping[str, Any], saved: Mapping[str, Any], begun: Mapping[str, Any]
) -> list[str]:
    """Give the optimizers of a checkpoint the options that differ now, but for their learning rates.

    Raises:
        ConfigError: They are optimizers of another kind, whose state it does not hold.
    """
    changes = []
    states = checkpoint["optimizer_states"]
    for state, then, now in zip(states, saved["optimizers"], begun["optimizers"], strict=False):
        if then["kind"] != now["kind"]:
            raise ConfigError(
                f"the checkpoint holds the state of {then['kind']}, and the optimizer is "
                f"{now['kind']} now: resume with {then['kind']}, or begin a new training from its "
                "weights"
            )
        for group, old, new in zip(
            state["param_groups"], then["groups"], now["groups"], strict=False
        ):
            for name, value in new.items():
                if name not in _RATES and old.get(name) != value:
                    group[name] = value
                    changes.append(f"{name}={value}")
    return list(dict.fromkeys(changes))


class _Schedules:
    """The schedules of a checkpoint, and the learning rates that follow from them.

    Args:
        trainer: With new optimizers and schedules.
        checkpoint: Which is changed.
        saved: Description of those of its run as they began.
        begun: Description of those of this run.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoint: dict[str, Any],
        saved: Mapping[str, Any],
        begun: Mapping[str, Any],
    ) -> None:
        self._trainer, self._checkpoint = trainer, checkpoint
        self._saved, self._begun = saved, begun
        kinds = [_list_kinds(description) for description in (saved, begun)]
        self._is_same_kind = kinds[0] == kinds[1]

    def change(self) -> list[str]:
        """Change the checkpoint, and describe how."""
        changes = []
        states = [self._restore(number) for number in range(len(self._begun["schedules"]))]
        self._checkpoint["lr_schedulers"] = states
        for number, optimizer in enumerate(self._trainer.optimizers):
            changes += self._change_rates(number, optimizer)
        for name in ("schedule", "epochs", "steps"):
            if self._saved[name] != self._begun[name]:
                changes.append(f"{_NAMES[name]}={self._begun[name]} for {self._saved[name]}")
        return changes

    def _restore(self, number: int) -> dict[str, Any]:
        """Return the state of a schedule: what it counted, with what is built differently now."""
        now = self._begun["schedules"][number]
        if not self._is_same_kind:
            return self._begin(now)
        then, state = self._saved["schedules"][number], self._checkpoint["lr_schedulers"][number]
        for name, value in now["state"].items():
            if name not in _COUNTS and then["state"].get(name) != value:
                state[name] = value
        if now["kind"] == _FACTORS and now["interval"] == "step":
            state["last_epoch"] = self._scale(state["last_epoch"])
        return dict(state)

    def _begin(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a schedule of another kind: at this place of the run, if it can be."""
        state = dict(now["state"])
        if now["kind"] == _FACTORS:
            progress = self._checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
            count = progress["processed"]
            if now["interval"] == "step":
                steps = self._checkpoint["global_step"] // len(self._trainer.optimizers)
                count = self._scale(steps)
            state |= {"last_epoch": count, "_step_count": count + 1}
        return state

    def _scale(self, steps: int) -> int:
        """Return the number of steps where epochs have another number of them now."""
        then: int | None = self._saved["epoch_steps"]
        now: int | None = self._begun["epoch_steps"]
        is_counted = self._begun["steps"] > 0  # trainer.max_steps counts all that were made
        if not then or not now or is_counted:
            return steps
        return round(steps * now / then)

    def _change_rates(self, number: int, optimizer: Optimizer) -> list[str]:
        """Set the learning rates of an optimizer."""
        changes = []
        groups = self._checkpoint["optimizer_states"][number]["param_groups"]
        old_groups = self._saved["optimizers"][number]["groups"]
        rates = []
        for index, group in enumerate(groups):
            old, new = old_groups[index], self._begun["optimizers"][number]["groups"][index]
            rate = self._find_rate(optimizer, index, group["lr"], _base(old), _base(new))
            if rate != group["lr"]:
                changes.append(f"lr={rate:.3g} for {group['lr']:.3g}")
            group |= {name: new[name] for name in _RATES if name in new} | {"lr": rate}
            rates.append(rate)
        schedule = self._find_schedule(optimizer)
        if schedule is not None and "_last_lr" in self._checkpoint["lr_schedulers"][schedule]:
            self._checkpoint["lr_schedulers"][schedule]["_last_lr"] = rates
        return list(dict.fromkeys(changes))

    def _find_rate(
        self, optimizer: Optimizer, group: int, rate: float, old: float, new: float
    ) -> float:
        """Return the learning rate of a group.

        Args:
            optimizer: Whose.
            group: Its number.
            rate: That of the checkpoint.
            old: The highest one, with which its run began.
            new: The highest one now.
        """
        schedule = self._find_schedule(optimizer)
        if schedule is not None:
            scheduler: Any = self._trainer.lr_scheduler_configs[schedule].scheduler
            if isinstance(scheduler, LambdaLR):
                count = self._checkpoint["lr_schedulers"][schedule]["last_epoch"]
                return float(new * scheduler.lr_lambdas[group](count))
        if not self._is_same_kind:
            begun: float = optimizer.param_groups[group]["lr"]
            return begun
        if old == new:
            return rate
        return new if rate == old or not old else rate * new / old

    def _find_schedule(self, optimizer: Optimizer) -> int | None:
        for number, config in enumerate(self._trainer.lr_scheduler_configs):
            if config.scheduler.optimizer is optimizer:
                return number
        return None


def _list_kinds(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(schedule["kind"], schedule["interval"]) for schedule in description["schedules"]]


def _base(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a new group before its schedule."""
    rate: float = group.get("initial_lr", group["lr"])
    return rate
