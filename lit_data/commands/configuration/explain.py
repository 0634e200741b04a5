"""Complaints of Hydra and OmegaConf in one line, with the nearest name."""

import inspect
import re
from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_data.commands.configuration.names import check_targets, join_key, resolve_target
from lit_data.commands.configuration.suggest import did_you_mean, nearest, nearest_key
from lit_data.commands.configuration.tree import ConfigTree, list_keys
from lit_data.errors import ConfigError

_UNKNOWN_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_MISSING_VALUE = re.compile(r"Missing mandatory value: (\S+)")


def explain(error: Exception, tree: ConfigTree | None = None) -> str:
    """Return one line for an error of composing or resolving."""
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error)
    # Hydra wraps the errors of OmegaConf, which know the key.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    reasons = [str(reason).split("full_key:")[0] for reason in dict.fromkeys((error, cause))]
    text = " ".join(" ".join(reasons).split())
    if match := _MISSING_VALUE.search(text):
        return missing_value(match[1])
    hint = ""
    match = _UNKNOWN_KEY.search(text)
    if match and tree:
        hint = did_you_mean(nearest_key(match[1], list_keys(tree.base)))
    # The text of any other error says little without its type.
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError | UserWarning):
        text = f"{type(error).__name__}: {text}"
    key = getattr(cause, "full_key", None)
    if key:
        text = f"'{key}': {text}"
    return f"{text.rstrip('.')}.{hint}"


def find_unknown(tree: ConfigTree, words: Sequence[str]) -> str | None:
    """Return the line for the first override of an unknown option or key; None if there is none."""
    overrides = tree.parse(words)
    for override in overrides:
        if not _chooses_option(tree, override):
            continue
        group = override.key_or_group
        for option in _list_options(override):
            if not tree.has_option(group, option):
                return unknown_option(option, group, tree.options(group))
    for override, cfg in _list_unknown(tree, overrides):
        key = _read_key(override)
        is_hydra = key.startswith("hydra")
        known = [name for name in list_keys(cfg) if name.startswith("hydra") == is_hydra]
        known += tree.list_groups()
        known += [join_key(_parent(key), name) for name in _list_arguments(cfg, key)]
        return f"unknown key '{key}'.{did_you_mean(nearest_key(key, known))}"
    return None


def open_arguments(tree: ConfigTree, words: Sequence[str]) -> list[str]:
    """Put Hydra's ``++`` before arguments that a node's class has and its file leaves out.

    So ``trainer.limit_train_batches=10`` may be typed as it is.

    Args:
        tree: What the configuration is composed from.
        words: Overrides; those of groups and of targets decide which class a node names.

    Returns:
        The overrides.
    """
    opened = set()
    for override, cfg in _list_unknown(tree, tree.parse(words)):
        if override.is_delete():
            continue
        key = _read_key(override)
        if key.rpartition(".")[2] in _list_arguments(cfg, key):
            opened.add(str(override.input_line))
    return [f"++{word}" if word in opened else word for word in words]


def _list_unknown(
    tree: ConfigTree, overrides: Sequence[Override]
) -> list[tuple[Override, DictConfig]]:
    """Plain overrides of keys that no file has, with what the files say."""
    plain: list[Override] = []
    deciding: list[str] = []  # which files are read, and which classes their nodes name
    for override in overrides:
        chooses = _chooses_option(tree, override)
        if not chooses and not override.is_add() and not override.is_force_add():
            plain.append(override)
        decides = chooses or override.key_or_group.endswith("_target_")
        if decides and not override.is_sweep_override():
            deciding.append(str(override.input_line))
    if not plain:
        return []
    try:
        cfg = tree.compose(deciding)
    except Exception:  # a file is at fault, not a word
        return []
    keys = set(list_keys(cfg))
    return [(override, cfg) for override in plain if _read_key(override) not in keys]


def _list_arguments(cfg: DictConfig, key: str) -> list[str]:
    """Arguments of the class that the node around a key names; none where none may be named."""
    parent = _parent(key)
    node = OmegaConf.select(cfg, parent) if parent else None
    if not isinstance(node, DictConfig):
        return []
    target = node.get("_target_")
    try:
        check_targets({parent: {"_target_": target}})
        parameters = inspect.signature(resolve_target(str(target), parent)).parameters
    except (ConfigError, ValueError, TypeError):
        return []
    names = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(name)
    return names


def _read_key(override: Override) -> str:
    """Return the dotted key of an override: ``a[0].b`` is a.0.b."""
    return re.sub(r"\[(\w+)\]", r".\1", override.key_or_group)


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """Return the line for an option that a group does not have."""
    line = f"unknown option '{option}' of '{group}'"
    if group == "experiment":
        line = f"unknown experiment '{option}'"
    options = [name for name in options if not name.startswith("base")]  # shared by the others
    verb = "is" if len(options) == 1 else "are"
    near = did_you_mean(nearest(option, options))
    return f"{line}.{near} There {verb}: {', '.join(options) or 'none'}."


def missing_value(key: str) -> str:
    """Return the line for a key that must be given."""
    return f"'{key}' has no value yet: write {key}=VALUE."


def _explain_missing_file(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    line = unknown_option(option, group, error.options or [])
    asking = re.match(r"In '(.+?)'", str(error))
    return f"{line} ({asking[1]}.yaml asks for it.)" if asking else line


def _chooses_option(tree: ConfigTree, override: Override) -> bool:
    if override.is_delete() or not _list_options(override):
        return False
    return tree.is_group(override.key_or_group)


def _list_options(override: Override) -> list[str]:
    value = override.value()
    options = value if isinstance(value, list) else [value]
    return [option for option in options if isinstance(option, str)]
