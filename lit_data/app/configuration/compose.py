"""The configuration of a command: Hydra composes its files once, and values that are typed are set.

It is checked before anything of it runs. Complaints of Hydra and OmegaConf become one line, with
the nearest name.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_data.app.configuration.faults import as_config_errors, unknown_option
from lit_data.app.configuration.hydra_node import check_hydra_node, check_run_name
from lit_data.app.configuration.model_choice import TRAINING, choose_model
from lit_data.app.configuration.names import allow_packages, check_targets, walk
from lit_data.app.configuration.rows import CONF, Files
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.app.configuration.tree import (
    ComposedLoader,
    ConfigTree,
    Engine,
    check_files,
    missing_value,
    open_hydra,
)
from lit_data.app.configuration.values import ComposedJob, compose_job, open_arguments, set_value
from lit_data.app.configuration.view_choice import VIEWED, choose_view
from lit_data.core.addresses import check_plain, check_words
from lit_data.core.checks import check_types
from lit_data.core.errors import ConfigError
from lit_data.core.wheels import DEFAULT_SIZE, find_wheel_weights

_LEAVING = re.compile(r"\.\.|(^|[\[,(\s'\"])[/\\~]")  # a group's folder: .., / or ~ before a name


class _Common(NamedTuple):
    """Keys of every command."""

    name: str | float
    tags: Sequence[str | float]
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
        command: one of `lit_data.app.COMMANDS`.
        overrides: Hydra overrides such as `experiment=stripe` or `data.loader.batch_size=64`.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.

    Raises:
        ConfigError: one line that names the key, option or file at fault, and the nearest name.
    """
    with open_hydra(config_dir) as hydra:
        cfg, _ = check_run(hydra, command, overrides, packages=packages)
    return _take_job(cfg)


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
        first = _check_job(tree, lines)
        is_viewed = VIEWED.items() <= dict(first.cfg.hydra.runtime.choices).items()
        if command in TRAINING and is_viewed:
            view = choose_view(first.cfg, tree.parse(completed))
            completed += view
            first = _check_job(tree, [*lines, *view]) if view else first
        for job in jobs:
            _check_job(tree, job)
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
            f"'{line}': an option is a name of the group '{group}', without '..' or a leading '/'."
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
    choices = {*Files([CONF]).choose([]), "hydra"}
    if group in choices or parent.split("/")[0] == "hydra":
        return True
    choosing = []
    for word in words:
        other = word.key_or_group
        is_choice = isinstance(word.value(), str) and tree.is_group(other)
        if parent and is_choice and not other.startswith(f"{parent}/"):
            line = str(word.input_line)
            choosing.append(line if other in choices or word.is_add() else f"+{line}")
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


def _check_job(tree: ConfigTree, lines: Sequence[str]) -> ComposedJob:
    with as_config_errors():
        composed = compose_job(tree, lines)
    cfg = composed.cfg
    with as_config_errors(cfg):
        check_files(tree, cfg, tree.parse(lines))
        _fill_runtime(cfg)
        job, hydra = _resolve(_take_job(cfg)), _resolve(_take_hydra(cfg))
    _check_top_level(tree, cfg)
    missing = sorted(key for key, value in walk(job) if value == "???")
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
    check_hydra_node(hydra, lines)
    check_run_name(job)
    return composed


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
    groups = tree.options("", ObjectType.GROUP)
    known = {"hydra", "command"}
    known |= {key.partition(".")[0] for key in Files([CONF]).compose(tree.command, [])}
    own_keys = [str(key) for key in cfg if key not in known]
    text = OmegaConf.to_yaml(_take_job(cfg)) if own_keys else ""
    for key in own_keys:
        if re.search(rf"\${{[^}}]*\b{re.escape(key)}\b", text):
            continue
        if key in groups:
            raise ConfigError(
                f"the file chosen for '{key}' must start with the line '# @package _global_'."
            )
        near = nearest(key, [*known, *groups])
        raise ConfigError(f"unknown key '{key}'.{did_you_mean(near)} No command reads it.")
