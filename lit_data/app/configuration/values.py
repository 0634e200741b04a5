"""A composition of files, on which the values that are typed are set, added and deleted."""

import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError

from lit_data.app.configuration.faults import as_config_errors
from lit_data.app.configuration.names import dot_indices, join_key, resolve_target
from lit_data.app.configuration.suggest import did_you_mean, nearest_key
from lit_data.app.configuration.tree import ConfigTree, list_keys
from lit_data.core.checks import read_arguments
from lit_data.core.errors import ConfigError


class ComposedJob(NamedTuple):
    """A composed configuration.

    Attributes:
        cfg: With Hydra's node.
        opened: Keys that are typed, of arguments that a node's class has and its file leaves out.
    """

    cfg: DictConfig
    opened: set[str]


def compose_job(tree: ConfigTree, lines: Sequence[str]) -> ComposedJob:
    """Compose the files that are chosen, and set the values that are typed.

    Hydra sets values while it composes, and takes those alone whose keys the files have. Which of the
    others are arguments of a class is known afterwards, so that Hydra would have to compose twice.
    """
    words = tree.parse(lines)
    files, values = [], []
    for word in words:
        if tree.chooses_file(word):
            files.append(str(word.input_line))
        else:
            values.append(word)
    cfg = tree.compose(files)
    # Classes first: they decide which other keys there are.
    values.sort(key=lambda word: not word.key_or_group.endswith("_target_"))
    with as_config_errors(cfg):
        opened = {word.key_or_group for word in values if set_value(tree, cfg, word)}
        _describe_words(cfg, tree.parse(open_arguments(words, opened)))
    return ComposedJob(cfg, opened)


def open_arguments(words: Sequence[Override], opened: Collection[str]) -> list[str]:
    """Return overrides with Hydra's ``++`` before those of arguments that no file has."""
    lines = []
    for word in words:
        mark = "++" if word.key_or_group in opened else ""
        lines.append(f"{mark}{word.input_line}")
    return lines


def set_value(tree: ConfigTree, cfg: DictConfig, word: Override) -> bool:
    """Set, add or delete a value as Hydra does.

    So that ``trainer.limit_train_batches=10`` may be typed as it is, an argument that the class of
    a node has is added where the file of the node leaves it out.

    Returns:
        True if it was added so.

    Raises:
        ConfigError: The key is unknown, or is there already and is to be added.
    """
    key, value, line = word.key_or_group, word.value(), str(word.input_line)
    if word.is_delete():
        _delete(tree, cfg, key, value)
        return False
    if word.is_add() and not isinstance(value, dict | list) and _find(cfg, key) is not None:
        raise ConfigError(f"'{line}': there is such a key; write {line[1:]} to replace its value.")
    is_added = word.is_add() or word.is_force_add()
    try:
        OmegaConf.update(cfg, key, value, merge=True, force_add=is_added)
    except (ConfigAttributeError, ConfigKeyError) as error:
        inner = str(error.full_key)  # in a dict that is typed
        dotted = dot_indices(inner if inner.startswith(f"{key}.") else key)
        if dotted.rpartition(".")[2] not in _list_arguments(cfg, dotted):
            raise _unknown_key(tree, cfg, dotted) from error
        OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        return True
    return False


def _delete(tree: ConfigTree, cfg: DictConfig, key: str, value: object) -> None:
    """Delete a key; where a value is typed, only if it has that."""
    before = _find(cfg, key)
    if before is None:
        raise _unknown_key(tree, cfg, key)
    if value is not None and value != before:
        raise ConfigError(f"'~{key}={value}': it is {before}.")
    parent = _parent(key)
    node = OmegaConf.select(cfg, parent) if parent else cfg
    with open_dict(cfg):
        del node[key.removeprefix(f"{parent}.")]


def _find(cfg: DictConfig, key: str) -> object:
    try:
        return OmegaConf.select(cfg, key, throw_on_missing=False)
    except InterpolationResolutionError:  # that of a key that is there
        return key


def _unknown_key(tree: ConfigTree, cfg: DictConfig, key: str) -> ConfigError:
    is_hydra = key.startswith("hydra")
    known = [name for name in list_keys(cfg) if name.startswith("hydra") == is_hydra]
    known += tree.list_groups()
    known += [join_key(_parent(key), name) for name in _list_arguments(cfg, key)]
    return ConfigError(f"unknown key '{key}'.{did_you_mean(nearest_key(key, known))}")


def _list_arguments(cfg: DictConfig, key: str) -> list[str]:
    """Arguments of the class that the node around a key names; none where none may be named."""
    parent = _parent(key)
    node = OmegaConf.select(cfg, parent) if parent else None
    if not isinstance(node, DictConfig):
        return []
    try:
        return [*read_arguments(resolve_target(node.get("_target_"), parent)).hints]
    except (ConfigError, ValueError, TypeError):
        return []


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _describe_words(cfg: DictConfig, words: Sequence[Override]) -> None:
    """Write into Hydra's node what it says of the words."""
    node = cfg.hydra
    of_hydra = [str(word.input_line) for word in words if word.is_hydra_override()]
    of_task = [word for word in words if not word.is_hydra_override()]
    named = node.job.config.override_dirname
    lines = [
        str(word.input_line) for word in of_task if word.key_or_group not in named.exclude_keys
    ]
    with open_dict(node):
        for name in node.job.env_copy:
            node.job.env_set[name] = os.environ[name]
    node.overrides.hydra = of_hydra
    node.overrides.task = [str(word.input_line) for word in of_task]
    node.job.override_dirname = named.item_sep.join(sorted(lines)).replace("=", named.kv_sep)
