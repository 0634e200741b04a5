"""Models and reading options of a checkpoint, which the commands that use it take over."""

import copy
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lit_data.app import ON_RUNS
from lit_data.app.checkpoints import Look, absolute_root, look_at
from lit_data.app.configuration.names import find_targets, resolve_target, to_plain
from lit_data.app.configuration.targets import OF_CHECKPOINT
from lit_data.app.configuration.words import find_typed, list_typed, show_override
from lit_data.app.run_folder import SPLIT_TABLE, SPLITTING
from lit_data.core.errors import ConfigError, escape
from lit_data.core.files import flatten
from lit_data.images.bank import ImageBank
from lit_data.predict.options import Use
from lit_data.predict.task import find_task_of, list_trained
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_MOST_SCORES = 3  # that are logged
_NEAR_GREY = 0.15  # of the value range: sets whose mean grey levels are so near are alike
_PLAIN_TARGETS = ("lit_data.models.", "torch.optim.", "torch.nn.")
_ALLOWED_PACKAGES = ("lit_data", "torch", "lightning")
_OF_WING = re.compile(r"lit_data\.wings\.\w+\.\w+")
_OUR_KINDS = "lit_data."
_EXCLUSIVE = ({"size_px", "scale"}, {"size_px", "patch_px"})
"""Options of which one alone may be set."""
_BESIDE_A_TABLE = {"folds": None, "fold": 0, "protocol": "auto"}
"""Values of options that split images in another way than a table of splits."""


def take_trained(cfg: DictConfig, checkpoint: Path) -> Mapping[str, Any] | None:
    """Let a command have the model and the reading options that a checkpoint was trained with.

    What is typed stays, and is logged where it contradicts. Checkpoints without a record leave all
    as it is.

    Returns:
        The record, for `warn_of_other_data`.

    Raises:
        ConfigError: It was trained on another kind of data of this package, on a folder where none
            is given now, or with classes that a checkpoint may not name.
        StoreError: The file is no checkpoint, or its record is damaged.
    """
    from lit_data.app.record import read_record  # with pydantic, which a training does without

    record = read_record(checkpoint)
    if record is None:
        return None
    is_same_kind = cfg.data._target_ == record["kind"]
    if not is_same_kind:
        _report_other_kind(cfg, record, checkpoint)
    log.info("%s", escape(describe_record(record, checkpoint)))
    before = _read_options(cfg)
    take_model(cfg, record["model"], find_typed(), checkpoint)
    trained_data = take_reading(cfg, record, checkpoint) if is_same_kind else {}
    after = _read_options(cfg)
    changes = _list_differences(before, after)
    if changes:
        log.info("from the checkpoint: %s", escape(", ".join(changes)))
    after["data"] = {name: after["data"][name] for name in trained_data}
    trained = {"model": record["model"], "data": trained_data}
    _warn_of_contradictions(after, trained, checkpoint)
    return record


def take_reading(cfg: DictConfig, record: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Any]:
    """Set the reading options of a checkpoint of the same kind of data, and return them.

    What is typed stays. Commands that score take the splits of its images too.

    Raises:
        ConfigError: See `_require_root`; or it was trained with a class or function of somebody's.
    """
    task = find_task_of(resolve_target(cfg.data._target_, "data"))
    typed = find_typed()
    command = cfg.get("command")
    is_scored = command in ON_RUNS and command != "predict"
    # A generative model makes images, of which none are read.
    is_predicted = command == "predict" and Use.GENERATION not in task.uses
    if (is_scored or is_predicted) and "data.root" not in typed:
        _require_root(cfg.data, record, checkpoint)
    reading = {}
    for name, value in record["data"].items():
        if name in list_trained(task) and name in cfg.data:
            reading[name] = value
    _refuse_foreign(cfg.data, reading, typed, checkpoint)
    _take_data(cfg.data, reading, typed)
    if is_scored and is_trained_root(record, cfg.data.get("root")):
        _take_splits(cfg.data, checkpoint.parent.parent / SPLIT_TABLE, typed)
    return reading


def _refuse_foreign(
    data: DictConfig, trained: Mapping[str, Any], typed: set[str], checkpoint: Path
) -> None:
    """Refuse options of a checkpoint that name what is not of this package, unless they are typed."""
    typed_names = list_typed(typed, "data")
    for name, value in trained.items():
        for target in list_targets(value):
            if target.startswith(_OUR_KINDS) or name in typed_names:
                continue
            if value != to_plain(data[name]):
                raise ConfigError(
                    _ask_for([_write_option(f"data.{name}", value)], [target], checkpoint)
                )


def _write_option(key: str, value: Any) -> str:  # noqa: ANN401
    """Write an option as one types it."""
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{name}: {field}" for name, field in value.items()) + "}"
    return shlex.quote(f"{key}={value}")


def _warn_of_contradictions(
    here: Mapping[str, Any], trained: Mapping[str, Any], checkpoint: Path
) -> None:
    contradictions = _list_differences(here, trained)
    if contradictions:
        log.warning(
            "%s was trained with %s: results may be worse",
            checkpoint,
            escape(", ".join(contradictions)),
        )


def _require_root(data: DictConfig, record: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to score a model of somebody's images on a synthetic dataset unasked.

    Raises:
        ConfigError: The checkpoint was trained on a folder, and there is none here.
    """
    trained_root = record.get("root")
    if trained_root is not None and "root" in data and data.root is None:
        raise ConfigError(
            f"{checkpoint} was trained on {trained_root}, and no data.root is given: set "
            f"{show_override('data.root', trained_root)} or another folder, or data.root=null "
            "for a synthetic dataset. `lit-data test RUN` uses the data of the run"
        )


def _report_other_kind(cfg: DictConfig, record: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse a checkpoint of another kind of data; of kinds of a user's own, log it.

    Raises:
        ConfigError: Both kinds are of this package, whose batches differ.
    """
    kind: str = cfg.data._target_
    trained_kind: str = record["kind"]
    experiment = escape(record["experiment"])
    if kind.startswith(_OUR_KINDS) and trained_kind.startswith(_OUR_KINDS):
        raise ConfigError(
            f"{checkpoint} is from the experiment {experiment} ({trained_kind}), but the command "
            f"line chooses {cfg.name} ({kind}): write experiment={experiment}, or give ckpt=FILE "
            "without an experiment"
        )
    log.warning(
        "%s was trained with %s, but the data here come from %s", checkpoint, trained_kind, kind
    )


def _read_options(cfg: DictConfig) -> dict[str, Any]:
    return {"model": to_plain(cfg.model), "data": to_plain(cfg.data)}


def describe_record(record: Mapping[str, Any], checkpoint: Path) -> str:
    """Return one line: which data, how many epochs, which scores."""
    root = record.get("root") or "a synthetic dataset"
    text = (
        f"{checkpoint}: experiment {record['experiment']}, trained on {root}, "
        f"{counted(record['epochs'], 'epoch')}"
    )
    scores = list(record["scores"].items())[:_MOST_SCORES]
    if not scores:
        return text
    return f"{text}; {', '.join(f'{name} {value:.3g}' for name, value in scores)}"


def take_model(
    cfg: DictConfig, trained: Mapping[str, Any], typed: set[str], checkpoint: Path
) -> None:
    """Set the model to that of a checkpoint, but for what is typed; a typed model stays as it is.

    Args:
        cfg: The configuration.
        trained: Node of the model in the record of the checkpoint.
        typed: Keys of the command line.
        checkpoint: For messages.

    Raises:
        ConfigError: It was trained with classes that neither the configuration names nor a
            checkpoint may name.
    """
    if "model" in typed:
        return
    if not check_named(cfg.model, trained, typed, checkpoint):
        return
    model = put_typed(cfg, trained, typed)
    model._set_flag(OF_CHECKPOINT, True)
    with open_dict(cfg):
        cfg.model = model


def put_typed(cfg: DictConfig, trained: Mapping[str, Any], typed: set[str]) -> DictConfig:
    """Return the node of a trained model with what is typed of it."""
    model = OmegaConf.create(copy.deepcopy(dict(trained)))
    for key in sorted(typed):
        if key.startswith("model."):
            value = OmegaConf.select(cfg, key)
            OmegaConf.update(model, key.removeprefix("model."), value, force_add=True)
    return model


def check_named(
    model: DictConfig, trained: Mapping[str, Any], typed: set[str], checkpoint: Path
) -> bool:
    """Return False, with a warning, where what is typed names other classes than a checkpoint has.

    Raises:
        ConfigError: The checkpoint has classes that neither the configuration names nor a
            checkpoint may name.
    """
    unnamed = list_unnamed(model, trained)
    if not unnamed:
        return True
    if not _replaces(typed, unnamed):
        raise ConfigError(_ask_for_names(unnamed, checkpoint))
    names = escape(", ".join(unnamed.values()))
    log.warning("%s was trained with %s: its options are not taken", checkpoint, names)
    return False


def list_unnamed(model: DictConfig, trained: Mapping[str, Any]) -> dict[str, str]:
    """Return keys and classes of a trained model that its checkpoint may not name, nor the configuration does.

    A checkpoint may be anybody's, and does not choose what is imported.
    """
    known = set(list_targets(to_plain(model)))
    unnamed = {}
    for key, target in find_targets(trained, "model"):
        name = str(target)
        if name not in known and not is_plain(name):
            unnamed[key] = name
    return unnamed


def _replaces(typed: set[str], unnamed: Iterable[str]) -> bool:
    """Return True if what is typed names other classes in the place of all these keys."""
    nodes = tuple(key.removesuffix("_target_") for key in typed if key.endswith("._target_"))
    return all(key.startswith(nodes) for key in unnamed)


def _ask_for_names(unnamed: Mapping[str, str], checkpoint: Path) -> str:
    words = []
    for key, name in unnamed.items():
        words.append(shlex.quote(f"{key}={name}"))
    return _ask_for(words, unnamed.values(), checkpoint)


def _ask_for(words: Sequence[str], names: Iterable[str], checkpoint: Path) -> str:
    flags = []
    for package in dict.fromkeys(name.partition(".")[0] for name in names):
        if package not in _ALLOWED_PACKAGES:
            flags.append(f"--package {shlex.quote(package)}")
    return escape(
        f"{checkpoint} was trained with {', '.join(names)}, which is not built unless you name it: "
        f"add {' '.join([*words, *flags])}"
    )


def is_plain(name: str) -> bool:
    """Return True for a class that a checkpoint may name: a net, loss or optimizer of torch or of ours."""
    if name.startswith(_PLAIN_TARGETS):
        return True
    if _OF_WING.fullmatch(name) is None:
        return False
    with suppress(ConfigError):
        part = resolve_target(name, "model")
        return isinstance(part, type) and issubclass(part, nn.Module)
    return False


def _take_data(data: DictConfig, trained: Mapping[str, Any], typed: set[str]) -> None:
    """Set the options of a checkpoint, but for what is typed and what that excludes."""
    typed_names = list_typed(typed, "data")
    chosen = set(typed_names)
    for options in _EXCLUSIVE:
        if options & typed_names:
            chosen |= options
    for name, value in trained.items():
        here = data[name]
        if name in chosen:
            if not (isinstance(value, Mapping) and isinstance(here, DictConfig)):
                continue
            if value.get("_target_") != here.get("_target_"):
                continue
            parts = [str(part) for part in here]
            typed_parts = {part: here[part] for part in parts if f"data.{name}.{part}" in typed}
            value = {**value, **typed_parts}
        with open_dict(data):
            data[name] = value


def _take_splits(data: DictConfig, table: Path, typed: set[str]) -> None:
    """Let the images of a training have the splits that they had there, unless others are typed.

    Otherwise a model would be scored on images that it has learned.
    """
    is_chosen = any(f"data.{name}" in typed for name in SPLITTING)
    if data.get("root") is None or "splits" not in data or is_chosen or not table.is_file():
        return
    log.info("the same splits as in training: %s", show_override("data.splits", str(table)))
    data.splits = str(table)
    for name, value in _BESIDE_A_TABLE.items():
        if name in data:
            data[name] = value


def _list_differences(here: Any, there: Any) -> list[str]:  # noqa: ANN401 - plain data
    """Return ``key=value`` of what differs, with the value of the second, which is not null."""
    values_here = flatten(here)
    differences = []
    for key, value in flatten(there).items():
        if value is not None and values_here.get(key) != value:
            differences.append(f"{key}={value}")
    return differences


def list_targets(node: Any) -> list[str]:  # noqa: ANN401 - plain data
    """Return the classes that a node names, in their order."""
    return [str(target) for _, target in find_targets(node)]


def warn_of_other_data(
    record: Mapping[str, Any] | None, root: str | None, bank: ImageBank | None
) -> None:
    """Warn where images of another folder are unlike those that a checkpoint was trained on.

    Args:
        record: From `take_trained`.
        root: Of the images; None for a synthetic dataset.
        bank: The images; None where a kind of data has none.
    """
    if record is None or bank is None:
        return
    trained = record.get("look")
    if not isinstance(trained, Mapping):
        return
    differences = (
        [] if is_trained_root(record, root) else list(_describe_unlike(trained, look_at(bank)))
    )
    if differences:
        log.warning(
            "these images differ from those that the model was trained on (%s): %s. Is this the "
            "right run? ckpt=PATH or run=FOLDER selects another",
            escape(str(record.get("root") or "a synthetic dataset")),
            "; ".join(differences),
        )


def is_trained_root(record: Mapping[str, Any] | None, root: str | None) -> bool:
    """Return True if a checkpoint was trained on the images of a root; None is a synthetic dataset."""
    if record is None:
        return False
    trained_root: str | None = record.get("root")
    return trained_root == (None if root is None else absolute_root(root))


def _describe_unlike(trained: Mapping[str, Any], here: Look) -> Iterator[str]:
    if here["channels"] != trained["channels"]:
        yield f"{counted(here['channels'], 'channel')}, not {trained['channels']}"
    sides_px = zip(here["size_px"], trained["size_px"], strict=True)
    ratios = [length / max(1, trained_length) for length, trained_length in sides_px]
    if min(ratios) < 1 / 2 or max(ratios) > 2:
        yield "{} x {} px, not {} x {}".format(*here["size_px"], *trained["size_px"])
    if abs(here["grey"] - trained["grey"]) > max(_NEAR_GREY, 2 * trained["spread"]):
        yield f"mean gray level {here['grey']:.2f} of the range, not {trained['grey']:.2f}"
