"""What Hydra and OmegaConf complain about, in one line with the nearest name."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_data.commands.suggest import did_you_mean, nearest, nearest_key
from lit_data.commands.tree import ConfigTree, list_keys

_UNKNOWN_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_MISSING_VALUE = re.compile(r"Missing mandatory value: (\S+)")


def explain(error: Exception, tree: ConfigTree | None = None) -> str:
    """One line for an error of composing or resolving."""
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    reasons = [str(reason).split("full_key:")[0] for reason in dict.fromkeys((error, cause))]
    text = " ".join(" ".join(reasons).split())
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError | UserWarning):
        text = f"{type(error).__name__}: {text}"
    key = getattr(cause, "full_key", None)
    if match := _MISSING_VALUE.search(text):
        return missing_value(match[1])
    match = _UNKNOWN_KEY.search(text)
    hint = did_you_mean(nearest_key(match[1], list_keys(tree.base))) if match and tree else ""
    return (f"'{key}': " if key else "") + text.rstrip(".") + "." + hint


def find_unknown(tree: ConfigTree, words: Sequence[str]) -> str | None:
    """The line for the first override whose group option or key does not exist, or None when all do."""
    overrides = tree.parse(words)
    groups = [override for override in overrides if _chooses_option(tree, override)]
    for override in groups:
        for option in _list_values(override):
            if not tree.has_option(override.key_or_group, option):
                return unknown_option(option, override.key_or_group, tree.options(override.key_or_group))
    try:
        keys = list_keys(tree.compose([str(override.input_line) for override in groups]))
    except Exception:  # a file is at fault, not a word
        return None
    for override in overrides:
        key = re.sub(r"\[(\w+)\]", r".\1", override.key_or_group)
        if override in groups or override.is_add() or override.is_force_add() or key in keys:
            continue
        in_hydra = key.startswith("hydra")
        known = [name for name in keys if name.startswith("hydra") == in_hydra] + tree.list_groups()
        return f"unknown key '{key}'.{did_you_mean(nearest_key(key, known))}"
    return None


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """The line for an option that a group does not have."""
    what = f"unknown experiment '{option}'" if group == "experiment" else f"unknown option '{option}' of '{group}'"
    near = nearest(option, options)
    return f"{what}.{did_you_mean(near)} There {'is' if len(options) == 1 else 'are'}: {', '.join(options) or 'none'}."


def missing_value(key: str) -> str:
    """The line for a key that must be given."""
    return f"'{key}' has no value yet: write {key}=VALUE."


def _explain_missing_file(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    asked_by = re.match(r"In '(.+?)'", str(error))
    where = f" ({asked_by[1]}.yaml asks for it.)" if asked_by else ""
    return unknown_option(option, group, error.options or []) + where


def _chooses_option(tree: ConfigTree, override: Override) -> bool:
    return not override.is_delete() and bool(_list_values(override)) and tree.is_group(override.key_or_group)


def _list_values(override: Override) -> list[str]:
    value = override.value()
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
