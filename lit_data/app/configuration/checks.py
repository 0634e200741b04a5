"""Checks of a composed configuration, before anything of it runs: files, keys, values, names and places.

Hydra's own node names code in more spellings than ``_target_``. An option that names a folder may be
no address: ``Path("s3://bucket/a")`` would be a folder ``s3:/bucket/a`` of the working directory.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lit_data.app.configuration.installed import list_conf_packages
from lit_data.app.configuration.names import (
    check_targets,
    join_key,
    resolve_target,
    resolve_targets,
    walk,
)
from lit_data.app.configuration.rows import CONF, Files
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.app.configuration.tree import (
    PACKAGED_FOLDER,
    ConfigTree,
    missing_value,
    take_job,
    walk_unresolved,
)
from lit_data.core.addresses import check_plain, is_remote, parse_store
from lit_data.core.checks import check_types
from lit_data.core.errors import ConfigError
from lit_data.core.wings import print_once

_OUR_PROVIDERS = {"hydra", "main", "schema"}
"""As Hydra calls itself, `lit_data.conf`, and what it has as classes."""
_LOGGING_NAMES = (
    "logging.Formatter",
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.handlers.RotatingFileHandler",
    "colorlog.ColoredFormatter",
    "ext://sys.stdout",
    "ext://sys.stderr",
)
_FACTORY_KEYS = ("()", "class", "queue", "listener")
_LONGEST_NAME = 200
_LOCAL_OPTIONS = (
    "paths.runs",
    "paths.cache",
    "paths.run",
    "data.cache_dir",
    "prepare.export",
    "sweep.resume",
)
_OUR_CALLBACKS = "lit_data.callbacks."
_ADDRESS = re.compile(r"[a-z0-9+]+:/", re.IGNORECASE)


class _Common(NamedTuple):
    """Keys of every command."""

    name: str | float
    tags: Sequence[str | float]
    seed: int
    paths: Mapping[str, str | None]


def check_job(
    tree: ConfigTree,
    cfg: DictConfig,
    job: Mapping[str, Any],
    hydra: Mapping[str, Any],
    words: Sequence[Override],
) -> None:
    """Refuse a configuration that no command could run.

    Args:
        tree: What it is composed from.
        cfg: The configuration with Hydra's node.
        job: The resolved configuration as plain data, without that node.
        hydra: The same of that node.
        words: Of the command line.

    Raises:
        ConfigError: One line that names the key.
    """
    if _may_add_keys(cfg, words):
        _check_top_level(tree, cfg)
    values = dict(walk(job))
    missing = sorted(key for key, value in values.items() if value == "???")
    if missing:
        raise ConfigError(missing_value(missing[0]))
    if cfg.command != tree.command:
        raise ConfigError(
            f"'command' is {cfg.command!r}, but the first word on the command line is "
            f"'{tree.command}'."
        )
    if isinstance(cfg.get("data"), DictConfig) and "_target_" not in cfg.data:
        # A file that the kinds of data share, such as data/base.yaml, is none by itself.
        raise ConfigError(
            "'data' names no class: choose a kind of data, such as data=segmentation."
        )
    check_types(_Common, {name: job[name] for name in _Common._fields if name in job})
    check_plain(job)
    _check_numbers(values)
    check_targets(job)
    _check_hydra_node(hydra, words)
    _check_run_name(job)
    _check_addresses(values)


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse NaN, which would fail late, in the middle of a run, or never."""
    for key, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"'{key}' is nan: give a number.")


def _may_add_keys(cfg: DictConfig, words: Sequence[Override]) -> bool:
    """Return True if files of the user's, or words that add something, may bring further keys."""
    providers = {source.provider for source in cfg.hydra.runtime.config_sources}
    if not providers <= _OUR_PROVIDERS:
        return True
    for word in words:
        is_added = word.is_add() or word.is_force_add()
        if word.package is not None or (is_added and word.key_or_group != "experiment"):
            return True
    return False


def _check_top_level(tree: ConfigTree, cfg: DictConfig) -> None:
    """Refuse keys that nothing reads; a key of one's own must be used in an interpolation."""
    groups = tree.options("", ObjectType.GROUP)
    known = {"hydra", "command"}
    known |= {key.partition(".")[0] for key in Files([CONF]).compose(tree.command, [])}
    own_keys = [str(key) for key in cfg if key not in known]
    text = OmegaConf.to_yaml(take_job(cfg)) if own_keys else ""
    for key in own_keys:
        if re.search(rf"\${{[^}}]*\b{re.escape(key)}\b", text):
            continue
        if key in groups:
            raise ConfigError(
                f"the file chosen for '{key}' must start with the line '# @package _global_'."
            )
        near = nearest(key, [*known, *groups])
        raise ConfigError(f"unknown key '{key}'.{did_you_mean(near)} No command reads it.")


def check_files(tree: ConfigTree, cfg: DictConfig, words: Sequence[Override]) -> None:
    """Refuse files outside of the folders, hidden files, and keys that files ask for.

    OmegaConf keeps an earlier file's value under a later file's `???`, so an experiment that asks
    for `data.root` would run without it.

    Args:
        tree: What the configuration is composed from.
        cfg: The configuration with Hydra's node.
        words: Of the command line.

    Raises:
        ConfigError: Names the file or the key.
    """
    sources = cfg.hydra.runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file"]
    experiment = PACKAGED_FOLDER / f"experiment/{cfg.hydra.runtime.choices.get('experiment')}.yaml"
    if not folders and not (experiment.is_file() and "???" in experiment.read_text("utf-8")):
        return
    installed = {package.folder for package in list_conf_packages()}
    _check_hidden([folder for folder in folders if folder not in installed])
    choosing = [str(word.input_line) for word in words if tree.chooses_file(word)]
    left_open = set()
    for default in tree.list_files(choosing).defaults:
        name = str(default.config_path)
        if ".." in name.split("/"):
            raise ConfigError(
                f"the defaults list names '{name}': '..' leaves the configuration folders."
            )
        paths = [folder / f"{name}.yaml" for folder in (PACKAGED_FOLDER, *folders)]
        path = _choose_file([path for path in paths if path.is_file()])
        content = OmegaConf.load(path) if path else OmegaConf.create()
        for inner, value in walk_unresolved(content):
            key = join_key(default.package or "", inner)
            if value == "???":
                left_open.add(key)
            elif not isinstance(value, Mapping | list):
                left_open.discard(key)
    closed = ("hydra.", *(f"{word.key_or_group}." for word in words))
    for key in sorted(left_open):
        if not f"{key}.".startswith(closed):
            raise ConfigError(missing_value(key))


def _choose_file(paths: Sequence[Path]) -> Path | None:
    """Return the file that is read of those of one name, ours first; None without any.

    Raises:
        ConfigError: The order of packages would choose it.
    """
    if len(paths) > 1:
        first, second = paths[:2]
        if not first.is_relative_to(PACKAGED_FOLDER):
            raise ConfigError(
                f"{first} and {second} have one name: rename one of them, or uninstall its package"
            )
        print_once(f"{second} is not read, because lit_data has a file with that name")
    return paths[0] if paths else None


def _check_hidden(folders: Sequence[Path]) -> None:
    """Refuse a user's file that has the name of a packaged one."""
    for folder in folders:
        for packaged in PACKAGED_FOLDER.rglob("*.yaml"):
            path = folder / packaged.relative_to(PACKAGED_FOLDER)
            if path.is_file() and not path.samefile(packaged):
                raise ConfigError(
                    f"{path} would never be read, because lit_data has a file with that name: "
                    "rename yours."
                )


def _check_hydra_node(hydra: Mapping[str, Any], words: Sequence[Override]) -> None:
    """Refuse names of code that are not allowed, however Hydra's node spells them.

    Args:
        hydra: the resolved node as plain data.
        words: of the command line, which may give variables and lines of a shell.

    Raises:
        ConfigError: names the key and the value, or the package that a launcher or sweeper needs.
    """
    resolve_targets(hydra, "hydra")
    for key, name in _find_factories(hydra):
        if name not in _LOGGING_NAMES:
            raise ConfigError(
                f"'{key}' is {name!a}, which is not allowed. Allowed: {', '.join(_LOGGING_NAMES)}."
            )
    if function := (hydra.get("sweeper") or {}).get("custom_search_space"):
        resolve_target(function, "hydra.sweeper.custom_search_space")
    keys = [word.key_or_group for word in words if not word.is_delete()]
    for key, value in _list_code(hydra):
        if value and not any(typed.startswith(key) for typed in keys):
            raise ConfigError(f"'{key}' runs code: give it on the command line, not in a file.")
    for key, value in walk(hydra.get("launcher"), "hydra.launcher"):
        if isinstance(value, str) and not value.isprintable():  # they become lines of a script
            raise ConfigError(f"'{key}' is {value!a}: it must be one line of text.")


def _find_factories(hydra: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what the logging of Python would import, by its keys and by addresses of objects."""
    for group in ("hydra_logging", "job_logging"):
        for key, value in walk(hydra.get(group), f"hydra.{group}"):
            is_address = isinstance(value, str) and "://" in value
            if is_address or key.rpartition(".")[2] in _FACTORY_KEYS:
                yield key, value


def _list_code(hydra: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield variables by which programs load code, and lines of a shell."""
    variables = (hydra.get("job") or {}).get("env_set") or {}
    yield (
        "hydra.job.env_set",
        [name for name, value in variables.items() if os.environ.get(name) != value],
    )
    launcher = hydra.get("launcher") or {}
    for name in ("setup", "additional_parameters"):
        yield f"hydra.launcher.{name}", launcher.get(name)


def _check_run_name(job: Mapping[str, Any]) -> None:
    """Refuse a name, or a place of runs or stores, that would put a run elsewhere than it seems.

    Args:
        job: the resolved configuration as plain data.

    Raises:
        ConfigError: names the key.
    """
    paths, name = job["paths"], str(job["name"])
    if not str(paths["runs"]).strip():
        raise ConfigError(
            "paths.runs is empty: is it a shell variable that is not set? Name a folder, or "
            "remove it"
        )
    path = Path(name)
    if not path.parts or ".." in path.parts or path.is_absolute():
        raise ConfigError(
            f"name={name!r} is part of the run folder: choose a plain name, without '..' or a "
            "leading /"
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"name={name[:40]!r}... has {len(name)} letters: it is part of the run folder, for which "
            f"up to {_LONGEST_NAME} letters are allowed"
        )


def _check_addresses(values: Mapping[str, Any]) -> None:
    """Refuse an address in an option that names a folder or file of this machine.

    Callbacks and loggers of Lightning take addresses themselves; ours write to local folders.

    Args:
        values: nodes and values of the resolved configuration by their keys.

    Raises:
        ConfigError: names the key and the address.
    """
    predictions = values.get("predict.folder")
    if isinstance(predictions, str) and is_remote(predictions):
        parse_store(predictions, "predict.folder")
    else:
        check_local("predict.folder", predictions)
    for key in _LOCAL_OPTIONS:
        check_local(key, values.get(key))
    for key, node in values.items():
        if isinstance(node, Mapping) and str(node.get("_target_")).startswith(_OUR_CALLBACKS):
            check_local(f"{key}.path", node.get("path"))


def check_local(key: str, folder: object) -> None:
    """Refuse an address where a folder is meant.

    Raises:
        ConfigError: names the key and the address.
    """
    if _ADDRESS.match(str(folder).removeprefix(f"{Path.cwd()}/")):
        raise ConfigError(
            f"{key}={folder} is an address, but it must be on a disk of this machine: name a "
            "folder; only checkpoints may be at an address, "
            "callbacks.last.dirpath=s3://BUCKET/RUN/checkpoints"
        )
