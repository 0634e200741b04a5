"""Models and reading options of a checkpoint, which the commands that use it take over."""

import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf, open_dict

from lit_data.commands.checkpoints import Look, absolute_root, look_at, read_record, to_plain
from lit_data.commands.configuration.locate import resolve_target
from lit_data.commands.configuration.targets import allowed_names, trusted_names
from lit_data.commands.session import find_typed
from lit_data.errors import escape
from lit_data.io.images.image_source import ImageBank
from lit_data.tasks.base import find_task_of

log = logging.getLogger(__name__)

_SCORES: Final = 3  # that are printed
_NEAR_GREY: Final = 0.15  # of the value range: sets whose mean grey levels are so near are alike
_PLAIN_TARGETS: Final = ("lit_data.modules.", "torch.optim.", "torch.nn.")
_LEAST_SCORES: Final = {
    "val/image_auroc": 0.6,
    "val/f1_max": 0.02,
}  # below them a model is no better than chance
_EXCLUSIVE: Final = (
    {"size_px", "scale"},
    {"size_px", "patch_px"},
)  # options of which one alone may be set


def take_trained(cfg: DictConfig, checkpoint: Path) -> Mapping[str, Any] | None:
    """Let a command have the model and the reading options that a checkpoint was trained with.

    What is typed stays, and is told where it contradicts. Checkpoints without a record leave all as
    it is.

    Returns:
        The record, for `warn_of_other_data`.

    Raises:
        StoreError: The file is no checkpoint, or its record is damaged.
    """
    record = read_record(checkpoint)
    if record is None:
        return None
    log.info("%s", escape(describe_record(record, checkpoint)))
    typed, before = find_typed(), {"model": to_plain(cfg.model), "data": to_plain(cfg.data)}
    _take_model(cfg, record["model"], typed, checkpoint)
    trained_data: Mapping[str, Any] = {}
    if cfg.data._target_ == record["kind"]:
        kind = resolve_target(cfg.data._target_, "data", allowed_names(), trusted_names())
        names = find_task_of(kind).trained_data
        trained_data = {
            name: value
            for name, value in record["data"].items()
            if name in names and name in cfg.data
        }
        _take_data(cfg, trained_data, typed)
    else:
        log.warning(
            "%s was trained with %s, and here data come from %s: choose its experiment, +experiment=%s",
            *(checkpoint, record["kind"], cfg.data._target_, record["experiment"]),
        )
    after = {"model": to_plain(cfg.model), "data": to_plain(cfg.data)}
    if taken := list(_differ(before, after)):
        log.info("as it was trained: %s", escape(", ".join(taken)))
    used = {"model": after["model"], "data": {name: after["data"][name] for name in trained_data}}
    if others := list(_differ(used, {"model": record["model"], "data": trained_data})):
        log.warning(
            "%s was trained with %s: what is found may be worse",
            checkpoint,
            escape(", ".join(others)),
        )
    return record


def describe_record(record: Mapping[str, Any], checkpoint: Path) -> str:
    """Return one line: which data, how many epochs, which scores."""
    scores = [f"{name} {value:.3g}" for name, value in list(record["scores"].items())[:_SCORES]]
    root = record.get("root") or "a drawn set"
    words = f"{checkpoint}: experiment {record['experiment']}, trained on {root}, {record['epochs']} epochs"
    return f"{words}; {', '.join(scores)}" if scores else words


def find_doubt(record: Mapping[str, Any] | None) -> str | None:
    """Return why a model can tell nothing by its scores in validation; None where it can, or nothing is known."""
    for name, least in _LEAST_SCORES.items():
        score = (record or {}).get("scores", {}).get(name)
        if score is not None and score < least:
            return f"{name} of the model is {score:.3g}, which is near chance"
    return None


def _take_model(
    cfg: DictConfig, trained: Mapping[str, Any], typed: set[str], checkpoint: Path
) -> None:
    if "model" in typed:
        return
    known = {*_list_targets(to_plain(cfg.model))}
    unknown = [
        name
        for name in _list_targets(trained)
        if name not in known and not name.startswith(_PLAIN_TARGETS)
    ]
    if unknown:  # a checkpoint may be anybody's, and does not choose what is imported
        names = escape(", ".join(unknown))
        log.warning("%s was trained with %s: name it with model._target_=...", checkpoint, names)
        return
    model = OmegaConf.create(copy.deepcopy(dict(trained)))
    for key in sorted(name for name in typed if name.startswith("model.")):
        OmegaConf.update(
            model, key.removeprefix("model."), OmegaConf.select(cfg, key), force_add=True
        )
    with open_dict(cfg):
        cfg.model = model


def _take_data(cfg: DictConfig, trained: Mapping[str, Any], typed: set[str]) -> None:
    chosen = {key.split(".")[1] for key in typed if key.startswith("data.")}
    chosen |= {name for pair in _EXCLUSIVE if pair & chosen for name in pair}
    for name, value in trained.items():
        given = cfg.data[name]
        if name in chosen and not (isinstance(value, Mapping) and isinstance(given, DictConfig)):
            continue
        if name in chosen:
            value = {
                **value,
                **{str(key): given[key] for key in given if f"data.{name}.{key}" in typed},
            }
        with open_dict(cfg.data):
            cfg.data[name] = value


def _differ(here: Any, there: Any, key: str = "") -> Iterator[str]:  # noqa: ANN401 - plain data
    """Yield ``key=value`` of what differs, with the value of the second, which is not null."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for name in dict.fromkeys((*here, *there)):
            yield from _differ(here.get(name), there.get(name), f"{key}.{name}" if key else name)
    elif here != there and there is not None:
        yield f"{key}={there}"


def _list_targets(node: Any) -> Iterator[str]:  # noqa: ANN401 - plain data
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        for value in node.values():
            yield from _list_targets(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _list_targets(value)


def warn_of_other_data(
    record: Mapping[str, Any] | None, root: str | None, bank: ImageBank | None
) -> None:
    """Warn where images are of another folder than those that a checkpoint was trained on, and
    unlike them.

    Args:
        record: From `take_trained`.
        root: Of the images; None for a drawn set.
        bank: The images; None where a kind of data has none.
    """
    trained = (record or {}).get("look")
    if record is None or bank is None or not isinstance(trained, Mapping):
        return
    if (None if root is None else absolute_root(root)) == record.get("root"):
        return
    if not (unlike := list(_list_unlike(trained, look_at(bank)))):
        return
    log.warning(
        "these images are unlike those that the model was trained on (%s): %s. Is it the right run? ckpt=PATH or "
        "run=FOLDER chooses another",
        *(escape(str(record.get("root") or "a drawn set")), "; ".join(unlike)),
    )


def _list_unlike(trained: Mapping[str, Any], here: Look) -> Iterator[str]:
    if here["channels"] != trained["channels"]:
        yield f"{here['channels']} channels, not {trained['channels']}"
    ratios = [
        length / max(1, other)
        for length, other in zip(here["size_px"], trained["size_px"], strict=True)
    ]
    if not all(1 / 2 <= ratio <= 2 for ratio in ratios):
        yield "{} x {} px, not {} x {}".format(*here["size_px"], *trained["size_px"])
    if abs(here["grey"] - trained["grey"]) > max(_NEAR_GREY, 2 * trained["spread"]):
        yield f"mean grey level {here['grey']:.2f} of the range, not {trained['grey']:.2f}"
