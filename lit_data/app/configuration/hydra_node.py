"""Hydra's own node: what it says of this run, and what it may name to be run.

Beside the ``_target_`` of launchers, sweepers and callbacks it names code in other spellings.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lit_data.app.configuration.addresses import check_addresses
from lit_data.app.configuration.names import find_targets, resolve_target, walk
from lit_data.core.errors import ConfigError

PLUGINS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=ray": "hydra-ray-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}
"""Options that packages bring along, as plugins of Hydra."""
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


def find_typed() -> set[str]:
    """Return the keys of this run's command line; none outside a run."""
    if not HydraConfig.initialized():
        return set()
    overrides: Sequence[str] = HydraConfig.get().overrides.task
    return {override.lstrip("+").partition("=")[0] for override in overrides}


def find_choice(group: str) -> str | None:
    """Return the option of a group that this run has; None without one."""
    if not HydraConfig.initialized():
        return None
    choice: str | None = HydraConfig.get().runtime.choices.get(group)
    return choice


def find_choices(group: str) -> list[str]:
    """Return the options of a group that may have several, as those of a list that is typed."""
    choice = find_choice(group)
    if choice is None and HydraConfig.initialized():  # which notes no list
        typed = [word.lstrip("+").partition("=") for word in HydraConfig.get().overrides.task]
        choice = next((value for key, _, value in typed if key == group), None)
    return re.findall(r"\w+", choice or "")


def check_hydra_node(hydra: Mapping[str, Any], typed: Sequence[str] = ()) -> None:
    """Refuse names of code that are not allowed, however Hydra's node spells them.

    Args:
        hydra: the resolved node as plain data; the names of its targets are checked already.
        typed: overrides of the command line, which may give variables and lines of a shell.

    Raises:
        ConfigError: names the key and the value, or the package that a launcher or sweeper needs.
    """
    for key, target in find_targets(hydra, "hydra"):
        resolve_target(str(target), key)
    for key, name in _find_factories(hydra):
        if name not in _LOGGING_NAMES:
            raise ConfigError(
                f"'{key}' is {name!a}, which is not allowed. Allowed: {', '.join(_LOGGING_NAMES)}."
            )
    if function := (hydra.get("sweeper") or {}).get("custom_search_space"):
        resolve_target(function, "hydra.sweeper.custom_search_space")
    keys = [word.lstrip("+").partition("=")[0] for word in typed]
    for key, value in _list_code(hydra):
        if value and not any(word.startswith(key) for word in keys):
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


def check_run_name(job: Mapping[str, Any]) -> None:
    """Refuse a name, or a place of runs or stores, that would put a run elsewhere than it seems.

    Args:
        job: the resolved configuration as plain data.

    Raises:
        ConfigError: names the key.
    """
    paths, name = job["paths"], str(job["name"])
    if not str(paths["runs"]).strip():
        raise ConfigError(
            "paths.runs is empty: is it a shell variable that is not set? Name a folder, or leave "
            "it out"
        )
    check_addresses(job)
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
