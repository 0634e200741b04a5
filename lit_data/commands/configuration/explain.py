"""What Hydra and OmegaConf complain about, in one line with the nearest name."""

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
                return unknown_option(
                    option, override.key_or_group, tree.options(override.key_or_group)
                )
    for override, cfg in _list_unknown(tree, overrides):
        key = _dotted(override)
        known = [
            name for name in list_keys(cfg) if name.startswith("hydra") == key.startswith("hydra")
        ]
        known += [
            *tree.list_groups(),
            *(join_key(_parent(key), name) for name in _list_arguments(cfg, key)),
        ]
        return f"unknown key '{key}'.{did_you_mean(nearest_key(key, known))}"
    return None


def open_arguments(tree: ConfigTree, words: Sequence[str]) -> list[str]:
    """The overrides, with Hydra's ``++`` before an argument that a node's class has and its file
    leaves out.

    So ``trainer.limit_train_batches=10`` may be typed as it is.

    Args:
        tree: What the configuration is composed from.
        words: Overrides; those of groups and of targets decide which class a node names.
    """
    overrides = tree.parse(words)
    opened = {
        str(override.input_line)
        for override, cfg in _list_unknown(tree, overrides)
        if not override.is_delete()
        and (key := _dotted(override)).rpartition(".")[2] in _list_arguments(cfg, key)
    }
    return [f"++{word}" if word in opened else word for word in words]


def _list_unknown(
    tree: ConfigTree, overrides: Sequence[Override]
) -> list[tuple[Override, DictConfig]]:
    """Plain overrides of keys that no file has, with what the files say."""
    groups = [override for override in overrides if _chooses_option(tree, override)]
    plain = [o for o in overrides if o not in groups and not (o.is_add() or o.is_force_add())]
    if not plain:
        return []
    decisive = [o for o in overrides if o in groups or o.key_or_group.endswith("_target_")]
    try:
        cfg = tree.compose([str(o.input_line) for o in decisive if not o.is_sweep_override()])
    except Exception:  # a file is at fault, not a word
        return []
    keys = set(list_keys(cfg))
    return [(override, cfg) for override in plain if _dotted(override) not in keys]


def _list_arguments(cfg: DictConfig, key: str) -> list[str]:
    """The arguments of the class that the node around a key names; none where there is none that may be named."""
    node = OmegaConf.select(cfg, _parent(key)) if "." in key else None
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    try:
        check_targets({_parent(key): {"_target_": target}})
        found = resolve_target(str(target), _parent(key))
        parameters = inspect.signature(found).parameters.values()
    except (ConfigError, ValueError, TypeError):
        return []
    return [
        spec.name
        for spec in parameters
        if spec.kind in (spec.POSITIONAL_OR_KEYWORD, spec.KEYWORD_ONLY)
    ]


def _dotted(override: Override) -> str:
    return re.sub(r"\[(\w+)\]", r".\1", override.key_or_group)


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """The line for an option that a group does not have."""
    what = (
        f"unknown experiment '{option}'"
        if group == "experiment"
        else f"unknown option '{option}' of '{group}'"
    )
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
    return (
        not override.is_delete()
        and bool(_list_values(override))
        and tree.is_group(override.key_or_group)
    )


def _list_values(override: Override) -> list[str]:
    value = override.value()
    return [
        item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)
    ]
