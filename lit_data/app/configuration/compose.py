"""The configuration of a command: Hydra composes its files once, and values that are typed are set.

It is checked before anything of it runs. Complaints of Hydra and OmegaConf become one line, with
the nearest name.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError

from lit_data.app.configuration.checks import check_files, check_job
from lit_data.app.configuration.model_choice import TRAINING, choose_model
from lit_data.app.configuration.names import (
    allow_packages,
    dot_indices,
    join_key,
    resolve_target,
)
from lit_data.app.configuration.suggest import did_you_mean, nearest_key
from lit_data.app.configuration.tree import (
    ComposedLoader,
    ConfigTree,
    Engine,
    as_config_errors,
    list_keys,
    open_hydra,
    take_job,
    unknown_option,
)
from lit_data.app.configuration.view_choice import VIEWED, choose_view
from lit_data.core.addresses import check_words
from lit_data.core.checks import read_arguments
from lit_data.core.errors import ConfigError
from lit_data.core.wheels import DEFAULT_SIZE, find_wheel_weights

_LEAVING = re.compile(r"\.\.|(^|[\[,(\s'\"])[/\\~]")  # a group's folder: .., / or ~ before a name


class ComposedJob(NamedTuple):
    """A composed configuration.

    Attributes:
        cfg: With Hydra's node.
        opened: Keys that are typed, of arguments that a node's class has and its file leaves out.
    """

    cfg: DictConfig
    opened: set[str]


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
        command: one of `lit_data.app.COMMANDS`.
        overrides: Hydra overrides such as `experiment=stripe` or `data.loader.batch_size=64`.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.

    Raises:
        ConfigError: one line that names the key, option or file at fault, and the nearest name.
    """
    with open_hydra(config_dir) as hydra:
        cfg, _ = check_run(hydra, command, overrides, packages=packages)
    return take_job(cfg)


def check_run(
    hydra: Engine,
    command: str,
    overrides: Sequence[str],
    *,
    multirun: bool = False,
    packages: Sequence[str] = (),
) -> tuple[DictConfig, list[str]]:
    """Compose and check what the command line asks for; nothing is imported or written.

    Args:
        hydra: the engine of `open_hydra`.
        command: name of the primary configuration.
        overrides: as typed; `experiment=stripe` stands for `+experiment=stripe`, which Hydra wants.
        multirun: sweeps are allowed; the first job is returned, and every option of a swept group
            is checked.
        packages: packages whose targets are allowed too.

    Returns:
        The configuration with its `hydra` node, and the overrides as Hydra needs them.

    Raises:
        ConfigError: one line.
    """
    check_words(overrides)  # Hydra writes them into the run folder
    with allow_packages(packages):  # whose configurations may be named too, as pkg://
        tree = ConfigTree(hydra, command, overrides)
        with as_config_errors():
            parsed = tree.parse(overrides)
            completed = [_normalise(tree, word, parsed) for word in parsed]
            if command in TRAINING and find_wheel_weights(DEFAULT_SIZE) is None:
                completed += choose_model(tree, tree.parse(completed))
            jobs = _plan_jobs(tree, completed, multirun=multirun)
        lines = next(jobs)
        first = _compose_checked(tree, lines)
        is_viewed = VIEWED.items() <= dict(first.cfg.hydra.runtime.choices).items()
        if command in TRAINING and is_viewed:
            view = choose_view(first.cfg, tree.parse(completed))
            completed += view
            first = _compose_checked(tree, [*lines, *view]) if view else first
        for job in jobs:
            _compose_checked(tree, job)
        HydraConfig.instance().set_config(first.cfg)  # to which the run folder refers
    return first.cfg, open_arguments(tree.parse(completed), first.opened)


def take_composed(hydra: Engine, cfg: DictConfig, placed: Sequence[str]) -> None:
    """Let `hydra.run` take a checked configuration as it is, with the folder of the run.

    Args:
        hydra: the engine.
        cfg: see `check_run`.
        placed: overrides of Hydra's node.
    """
    tree = ConfigTree(hydra, str(cfg.command), [])
    node = cfg.hydra
    with read_write(node):
        for word in tree.parse(placed):
            set_value(tree, cfg, word)
            node.overrides.hydra.append(word.input_line)
        node.mode = RunMode.RUN
        node.job.id = node.job.num = node.runtime.output_dir = "???"  # Hydra says now
    hydra.config_loader = ComposedLoader(hydra.config_loader, cfg)


def _normalise(tree: ConfigTree, word: Override, words: Sequence[Override]) -> str:
    """Refuse options that a group does not have, and add the + that Hydra wants of a group."""
    line, group = str(word.input_line), word.key_or_group
    value = word.value()
    if isinstance(value, dict) or word.is_delete() or not tree.is_group(group):
        return line
    if _LEAVING.search(line.partition("=")[2]):
        raise ConfigError(
            f"'{line}': an option is a name in the group '{group}', without '..' or a leading '/'."
        )
    if not (word.is_sweep_override() or isinstance(value, str | list)):
        raise ConfigError(
            f"'{line}': '{group}' is a group; choose one of: {', '.join(tree.options(group))}."
        )
    for option in value if isinstance(value, list) else [value]:
        if isinstance(option, str) and not tree.has_option(group, option):
            raise ConfigError(unknown_option(option, group, tree.options(group)))
    has_option = _has_option_already(tree, group, words)
    if word.is_add() and has_option and word.package is None:
        raise ConfigError(
            f"'{line}': '{group}' has an option already; write {line[1:]} to replace it."
        )
    if has_option or line.startswith("+") or word.package is not None:
        return line
    return f"+{line}"


def _has_option_already(tree: ConfigTree, group: str, words: Sequence[Override]) -> bool:
    """Return True if the command's own files choose an option of the group.

    Or one that is chosen for a group around it, by name or by a file of another group.
    """
    parent, _, _ = group.rpartition("/")
    if tree.has_default(group) or parent.split("/")[0] == "hydra":
        return True
    choosing = []
    for word in words:
        other = word.key_or_group
        is_choice = isinstance(word.value(), str) and tree.is_group(other)
        if parent and is_choice and not other.startswith(f"{parent}/"):
            line = str(word.input_line)
            choosing.append(line if tree.has_default(other) or word.is_add() else f"+{line}")
    return bool(choosing) and group in tree.list_files(choosing).overrides.known_choices


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
    cfg = compose_job(tree, unswept).cfg
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


def _compose_checked(tree: ConfigTree, lines: Sequence[str]) -> ComposedJob:
    with as_config_errors():
        composed = compose_job(tree, lines)
    cfg = composed.cfg
    words = tree.parse(lines)
    with as_config_errors(cfg):
        check_files(tree, cfg, words)
        _fill_runtime(cfg)
        job, hydra = _resolve(take_job(cfg)), _resolve(_take_hydra(cfg))
    check_job(tree, cfg, job, hydra, words)
    return composed


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
        raise ConfigError(
            f"'{line}': this key already exists; write {line[1:]} to replace its value."
        )
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
