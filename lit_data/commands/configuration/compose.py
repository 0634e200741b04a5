"""The configuration of a command, composed by Hydra and checked before anything of it runs.

Complaints of Hydra and OmegaConf become one line, with the nearest name.
"""

import inspect
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_data.checks import check_types
from lit_data.commands.configuration.foreign import ForeignError, bounding_references
from lit_data.commands.configuration.hydra_node import (
    PLUGINS,
    check_hydra_node,
    check_places,
    check_run_name,
)
from lit_data.commands.configuration.model_choice import choose_model
from lit_data.commands.configuration.names import (
    allow_packages,
    check_targets,
    dot_indices,
    join_key,
    resolve_target,
    walk,
)
from lit_data.commands.configuration.suggest import did_you_mean, nearest, nearest_key
from lit_data.commands.configuration.tree import ConfigTree, check_shadowing, list_keys, open_hydra
from lit_data.errors import ConfigError, first_line
from lit_data.io.remote import check_plain, check_words

_UNKNOWN_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_MISSING_VALUE = re.compile(r"Missing mandatory value: (\S+)")

_LEAVING = re.compile(r"\.\.|(^|[\[,(\s'\"])[/\\~]")  # a group's folder: .., / or ~ before a name


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


def find_unknown(tree: ConfigTree, overrides: Sequence[str]) -> str | None:
    """Return the line for the first override of an unknown option or key; None if there is none."""
    parsed = tree.parse(overrides)
    for override in parsed:
        if not _chooses_option(tree, override):
            continue
        group = override.key_or_group
        for option in _list_options(override):
            if not tree.has_option(group, option):
                return unknown_option(option, group, tree.options(group))
    for override, cfg in _list_unknown(tree, parsed):
        key = dot_indices(override.key_or_group)
        is_hydra = key.startswith("hydra")
        known = [name for name in list_keys(cfg) if name.startswith("hydra") == is_hydra]
        known += tree.list_groups()
        known += [join_key(_parent(key), name) for name in _list_arguments(cfg, key)]
        return f"unknown key '{key}'.{did_you_mean(nearest_key(key, known))}"
    return None


def open_arguments(tree: ConfigTree, overrides: Sequence[str]) -> list[str]:
    """Put Hydra's ``++`` before arguments that a node's class has and its file leaves out.

    So ``trainer.limit_train_batches=10`` may be typed as it is.

    Args:
        tree: What the configuration is composed from.
        overrides: Those of groups and of targets decide which class a node names.

    Returns:
        The overrides.
    """
    opened = set()
    for override, cfg in _list_unknown(tree, tree.parse(overrides)):
        if override.is_delete():
            continue
        key = dot_indices(override.key_or_group)
        if key.rpartition(".")[2] in _list_arguments(cfg, key):
            opened.add(str(override.input_line))
    return [f"++{line}" if line in opened else line for line in overrides]


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
        cfg = tree.read_choices(deciding)
    except Exception:  # a file is at fault, not a word
        return []
    keys = set(list_keys(cfg))
    return [(override, cfg) for override in plain if dot_indices(override.key_or_group) not in keys]


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


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """Return the line for an option that a group does not have."""
    line = f"unknown option '{option}' of '{group}'"
    if group == "experiment":
        line = f"unknown experiment '{option}'"
    if package := PLUGINS.get(f"{group}={option}"):
        return f"'{group}={option}' needs a package: pip install {package}."
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


class _Common(NamedTuple):
    """Keys of every command."""

    name: str | float
    seed: int
    paths: Mapping[str, str | None]


def compose(
    command: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    packages: Sequence[str] = (),
) -> DictConfig:
    """Return the checked configuration of a command, for notebooks and tests.

    It is without Hydra's own node.
    `paths.run` names Hydra's run folder, which exists inside a run only: give `paths.run=FOLDER` to
    use the result.

    Args:
        command: one of `lit_data.commands.COMMANDS`.
        overrides: Hydra overrides such as `+experiment=stripe` or `data.loader.batch_size=64`.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.

    Raises:
        ConfigError: one line that names the key, option or file at fault, and the nearest name.
    """
    with open_hydra(config_dir) as hydra:
        cfg, _ = check_run(hydra, command, overrides, packages=packages)
    return _take_job(cfg)


def check_run(
    hydra: Hydra,
    command: str,
    overrides: Sequence[str],
    *,
    multirun: bool = False,
    packages: Sequence[str] = (),
    read: Sequence[str] = (),
) -> tuple[DictConfig, list[str]]:
    """Compose and check what the command line asks for; nothing is imported or written.

    Args:
        hydra: the engine of `open_hydra`.
        command: name of the primary configuration.
        overrides: as typed; `experiment=stripe` stands for `+experiment=stripe`.
        multirun: sweeps are allowed; the first job is returned, and every option of a swept group
            is checked.
        packages: packages whose targets are allowed too.
        read: those of the overrides that somebody's run folder says: they hold as a file's.

    Returns:
        The configuration with its `hydra` node, and the overrides as Hydra needs them.

    Raises:
        ConfigError: one line.
    """
    check_words(overrides)  # Hydra writes them into the run folder
    with allow_packages(packages):  # whose configurations may be named too, as pkg://
        with _as_config_errors():
            tree = ConfigTree(hydra, command, overrides)
        first, completed = _check_words(tree, overrides, multirun=multirun, read=read)
        if added := choose_model(first, tree.parse(completed)):
            words = [*overrides, *added]
            first, completed = _check_words(tree, words, multirun=multirun, read=read)
    return first, completed


def _check_words(
    tree: ConfigTree, overrides: Sequence[str], *, multirun: bool, read: Sequence[str]
) -> tuple[DictConfig, list[str]]:
    """Compose and check each job of a command line; see `check_run`."""
    parsed = tree.parse(overrides)
    completed = [_normalise(tree, override, parsed) for override in parsed]
    completed = open_arguments(tree, completed)
    jobs = _plan_jobs(tree, completed, multirun=multirun)
    lines_read = {line.lstrip("+") for line in read}
    typed = [line for line in completed if line.lstrip("+") not in lines_read]
    first = _check_job(tree, next(jobs), typed)
    for job in jobs:
        _check_job(tree, job, typed)
    return first, completed


@contextmanager
def _as_config_errors(
    tree: ConfigTree | None = None, overrides: Sequence[str] = (), typed: Sequence[str] = ()
) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"provider=.*\s+is not available", UserWarning)
            with bounding_references(typed):
                yield
    except ConfigError:
        raise
    except ForeignError as error:
        raise ConfigError(first_line(error)) from error
    except Exception as error:
        # Also what Hydra and OmegaConf raise by mistake: it is the user's text that they read.
        unknown = find_unknown(tree, overrides) if tree else None
        raise ConfigError(unknown or explain(error, tree)) from error


def _normalise(tree: ConfigTree, override: Override, overrides: Sequence[Override]) -> str:
    """Refuse options that leave the group's folder, and add the + that Hydra wants of a group."""
    line, group = str(override.input_line), override.key_or_group
    value = override.value()
    if isinstance(value, dict) or override.is_delete() or not tree.is_group(group):
        return line
    if _LEAVING.search(line.partition("=")[2]):
        raise ConfigError(
            f"'{line}': an option is a name of the group '{group}', without '..' or a leading '/'."
        )
    if not (override.is_sweep_override() or isinstance(value, str | list)):
        raise ConfigError(
            f"'{line}': '{group}' is a group; choose one of: {', '.join(tree.options(group))}."
        )
    has_option = _has_option_already(tree, group, overrides)
    if override.is_add() and has_option and override.package is None:
        raise ConfigError(
            f"'{line}': '{group}' has an option already; write {line[1:]} to replace it."
        )
    if has_option or line.startswith("+") or override.package is not None:
        return line
    return f"+{line}"


def _has_option_already(tree: ConfigTree, group: str, overrides: Sequence[Override]) -> bool:
    """Return True if the command's own files choose an option of the group.

    Or one that is chosen for a group around it, by name or by a file of another group.
    """
    choices = tree.base.hydra.runtime.choices
    if group in choices:
        return True
    parent = group.rpartition("/")[0]
    choosing = []
    for override in overrides:
        other = override.key_or_group
        is_choice = isinstance(override.value(), str) and tree.is_group(other)
        if parent and is_choice and not other.startswith(f"{parent}/"):
            line = str(override.input_line)
            choosing.append(line if other in choices or override.is_add() else f"+{line}")
    if not choosing:
        return False
    with _as_config_errors(tree, choosing):
        return group in tree.compose(choosing).hydra.runtime.choices


def _plan_jobs(
    tree: ConfigTree, overrides: Sequence[str], *, multirun: bool
) -> Iterator[list[str]]:
    """Yield the first job of a sweep, then one more for every other option of a swept group."""
    parsed = tree.parse(overrides)
    if multirun:
        parsed = [*_read_sweeper_params(tree, parsed), *parsed]
    first = [_list_values(override)[0] for override in parsed]
    for override in parsed:
        if override.is_sweep_override() and not multirun:
            raise ConfigError(
                f"'{override.input_line}' has several values: add -m to run each, write key=[a,b] "
                "for a list or quote the value."
            )
    yield first
    for index, override in enumerate(parsed):
        if override.is_sweep_override() and tree.is_group(override.key_or_group):
            for line in _list_values(override)[1:]:
                yield [*first[:index], line, *first[index + 1 :]]


def _read_sweeper_params(tree: ConfigTree, overrides: Sequence[Override]) -> list[Override]:
    unswept = []
    for override in overrides:
        if not override.is_sweep_override():
            unswept.append(str(override.input_line))
    with _as_config_errors():
        cfg = tree.compose(unswept)
    params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
    return tree.parse([f"{key}={value}" for key, value in params.items()])


def _list_values(override: Override) -> list[str]:
    """Return one override for each value of a sweep; any other override stands for itself."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    if isinstance(value, IntervalSweep):
        values = [str(value.start)]
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"'{override.input_line}' matches nothing.")
    key = override.get_key_element()
    return [f"{key}={value}" for value in values]


def _check_job(tree: ConfigTree, overrides: Sequence[str], typed: Sequence[str]) -> DictConfig:
    typed_keys = [dot_indices(override.key_or_group) for override in tree.parse(typed)]
    with _as_config_errors(tree, overrides, typed_keys):
        cfg = tree.compose(overrides)
        paths, left_open = tree.read_files(overrides)
        _fill_runtime(cfg)
        job, hydra = _resolve(_take_job(cfg)), _resolve(_take_hydra(cfg))
    for path in paths:
        if ".." in path.split("/"):
            raise ConfigError(
                f"the defaults list names '{path}': '..' leaves the configuration folders."
            )
    check_shadowing(cfg)
    _check_top_level(tree, cfg)
    missing = [*left_open, *sorted(key for key, value in walk(job) if value == "???")]
    if missing:
        raise ConfigError(missing_value(missing[0]))
    if cfg.command != tree.command:
        raise ConfigError(
            f"'command' is {cfg.command!r}, but the first word on the command line says "
            f"'{tree.command}'."
        )
    if isinstance(cfg.get("data"), DictConfig) and "_target_" not in cfg.data:
        # A file that the kinds of data share, such as data/base.yaml, is none by itself.
        raise ConfigError(
            "'data' names no class: choose a kind of data, such as data=segmentation."
        )
    check_types(_Common, {name: job[name] for name in _Common._fields if name in job})
    check_plain(job)
    _check_numbers(job)
    # Names come before what Hydra's node says, for which they are imported.
    check_targets({"hydra": hydra})
    check_targets(job)
    check_hydra_node(hydra, typed)
    check_run_name(job)
    check_places(job, hydra, typed, tree.base.paths)
    return cfg


def _take_job(cfg: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _take_hydra(cfg: DictConfig) -> DictConfig:
    """Return Hydra's node without the overrides, whose interpolations stay as typed."""
    node = OmegaConf.masked_copy(cfg.hydra, [str(key) for key in cfg.hydra if key != "overrides"])
    node._set_parent(cfg)
    return node


def _resolve(node: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _fill_runtime(cfg: DictConfig) -> None:
    """Give a stand-in to values that Hydra knows inside a job only, so that all resolve."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.id = "0"
        cfg.hydra.job.num = 0
    HydraConfig.instance().set_config(cfg)  # the run folder refers to it
    folder = str(Path(cfg.hydra.run.dir).absolute())
    nodes: tuple[Any, ...] = (cfg.hydra, HydraConfig.get())
    for node in nodes:
        with read_write(node):
            node.runtime.output_dir = folder


def _check_numbers(job: Mapping[str, Any]) -> None:
    """Refuse NaN, which would fail late, in the middle of a run, or never."""
    for key, value in walk(job):
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"'{key}' is nan: give a number.")


def _check_top_level(tree: ConfigTree, cfg: DictConfig) -> None:
    """Refuse keys that nothing reads; a key of one's own must be used in an interpolation."""
    own_keys = [str(key) for key in cfg if key not in tree.base]
    text = OmegaConf.to_yaml(_take_job(cfg)) if own_keys else ""
    for key in own_keys:
        if re.search(rf"\${{[^}}]*\b{re.escape(key)}\b", text):
            continue
        groups = tree.options("", ObjectType.GROUP)
        if key in groups:
            raise ConfigError(
                f"the file chosen for '{key}' must start with the line '# @package _global_'."
            )
        near = nearest(key, [*map(str, tree.base), *groups])
        raise ConfigError(f"unknown key '{key}'.{did_you_mean(near)} No command reads it.")
