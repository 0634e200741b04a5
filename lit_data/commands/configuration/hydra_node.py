"""Limits of what files of a configuration say: under `hydra`, and where to write and send.

The command line may say more.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lit_data.commands.configuration.addresses import check_addresses
from lit_data.commands.configuration.names import (
    check_targets,
    find_targets,
    resolve_target,
    walk,
)
from lit_data.errors import ConfigError
from lit_data.io.remote.options import is_remote

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
_EXTRAS = {
    "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher",
    "hydra_plugins.hydra_submitit_launcher": "hydra-submitit-launcher",
    "hydra_plugins.hydra_optuna_sweeper": "hydra-optuna-sweeper",
}
PLUGINS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=ray": "hydra-ray-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}
"""Options that packages bring along, as plugins of Hydra."""
_LOG_GROUPS = ("hydra_logging", "job_logging")
_SHELL_KEYS = ("setup", "additional_parameters")
_FACTORY_KEYS = ("()", "class", "queue", "listener")
_CODE_PATHS = ("LD_", "DYLD_", "PYTHON", "PATH")
"""Beginnings of variables that decide which code a child process loads."""

_SECTIONS = ("callbacks", "extra_callbacks", "logger", "trainer")
_WRITERS = ("lightning", "lit_data.callbacks")
"""Classes that write files or send, wherever a node has them."""
_PLACES = (
    "paths.run",
    "prepare.shards",
    "prepare.export",
    "predict.folder",
    "sweep.resume",
)
_FOLDER = re.compile(r"(.*_)?(dir|dirpath|path|folder|location|root|_args_)", re.IGNORECASE)
_SERVER = re.compile(
    r"(.*_)?(url|uri|host|server|address|endpoint|entity|workspace|api_key)", re.IGNORECASE
)
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:/\S*")
_LOCAL = ("sqlite:///", "file://")
_READ = ("_target_", "weights")

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


def check_hydra_node(hydra: Mapping[str, Any], typed: Sequence[str] = ()) -> None:
    """Refuse launchers, sweepers, log handlers and variables that would run something else.

    Args:
        hydra: the resolved node as plain data; the names of its targets are checked already.
        typed: overrides of the command line, which may say more than a file.

    Raises:
        ConfigError: names the key and the value, or the package that a launcher or sweeper needs.
    """
    for key, target in find_targets(hydra, "hydra"):
        _check_installed(str(target), key)
        resolve_target(str(target), key)
    _check_launcher(hydra.get("launcher") or {}, typed)
    _check_sweeper(hydra.get("sweeper") or {})
    for group in _LOG_GROUPS:
        for key, name in _find_factories(hydra.get(group), f"hydra.{group}"):
            if name not in _LOGGING_NAMES:
                raise ConfigError(
                    f"'{key}' is {name!a}, which is not allowed. Allowed: "
                    f"{', '.join(_LOGGING_NAMES)}."
                )
    _check_output_subdir(hydra, typed)
    _check_log_files(hydra, typed)
    # Variables of the run: most programs that it starts read some of them.
    for name in hydra.get("job", {}).get("env_set") or {}:
        _check_variable(str(name), typed)


def _check_variable(name: str, typed: Sequence[str]) -> None:
    where = " in a file"
    if name.upper().startswith(_CODE_PATHS):
        where = ""  # not on the command line either
    elif _is_typed(f"hydra.job.env_set.{name}", typed):
        return
    raise ConfigError(
        f"'hydra.job.env_set.{name}' is not allowed{where}; set {name} in the shell that starts "
        "the run."
    )


def _check_output_subdir(hydra: Mapping[str, Any], typed: Sequence[str]) -> None:
    subdir = hydra.get("output_subdir")
    if not subdir or _is_typed("hydra.output_subdir", typed):
        return
    if len(Path(str(subdir)).parts) != 1:
        raise ConfigError(f"'hydra.output_subdir' is {subdir!r}: it must be a plain name.")


def _check_log_files(hydra: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Refuse logs that a file leads out of the run folder: a shell reads some as it starts."""
    run_folder = Path(str(hydra.get("runtime", {}).get("output_dir", "."))).absolute()
    for group in _LOG_GROUPS:
        for name, handler in ((hydra.get(group) or {}).get("handlers") or {}).items():
            key = f"hydra.{group}.handlers.{name}.filename"
            filename = handler.get("filename") if isinstance(handler, Mapping) else None
            if filename is None or _is_typed(key, typed):
                continue
            path = Path(str(filename))
            is_log = path.suffix == ".log" and not path.name.startswith(".")
            if not is_log or path.absolute().parent != run_folder:
                raise ConfigError(
                    f"'{key}' is {str(filename)!a}: a file may only name a .log in the run folder; "
                    "give others on the command line."
                )


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


def check_places(
    job: Mapping[str, Any],
    hydra: Mapping[str, Any],
    typed: Sequence[str],
    packaged: Mapping[str, Any],
) -> None:
    """Refuse what only the command line may say: to write outside of `paths.runs`, and to send.

    Args:
        job: the resolved configuration as plain data.
        hydra: the resolved node.
        typed: overrides of the command line.
        packaged: `paths` as the package has it.

    Raises:
        ConfigError: names the key and the value.
    """
    paths = job.get("paths") or {}
    # All other places are held against this one, so it is looked at first.
    if paths.get("runs") != packaged.get("runs") and not _is_typed("paths.runs", typed):
        raise _untyped("paths.runs", paths.get("runs"), "choose where results go")
    _check_cache(job, typed, packaged.get("cache"))
    # What passes here may hold what comes behind it.
    runs = paths.get("runs")
    roots = [runs]
    for key, folder in _list_folders(job, hydra).items():
        if folder is not None and not _is_typed(key, typed) and not _is_below(str(folder), roots):
            raise _untyped(key, folder, "write outside of paths.runs")
        if key == "hydra.run.dir":
            roots.append((hydra.get("runtime") or {}).get("output_dir"))
        roots.append(folder)
    texts = [_list_texts(job)]
    for name in ("launcher", "sweeper"):
        texts.append(_list_texts(hydra.get(name), f"hydra.{name}", writes=True))
    for key, text in itertools.chain(*texts):
        _check_text(key, text, roots, typed)


def _check_cache(job: Mapping[str, Any], typed: Sequence[str], packaged: object) -> None:
    """Refuse a place of decoded data that is not typed, and not that of this machine."""
    data = job.get("data")
    cache = job["paths"]["cache"]
    stores = data.get("cache_dir", cache) if isinstance(data, Mapping) else cache
    for key, folder, allowed in (
        ("paths.cache", cache, packaged),
        ("data.cache_dir", stores, cache),
    ):
        is_allowed = folder in (None, allowed) or _is_below(str(folder), [allowed])
        if not is_allowed and not _is_typed(key, typed):
            raise _untyped(key, folder, "choose where decoded data lie")


def _list_folders(job: Mapping[str, Any], hydra: Mapping[str, Any]) -> dict[str, Any]:
    """Folders that a run writes to by its own options, by their keys, outer ones first."""
    sweep = hydra.get("sweep") or {}
    folders: dict[str, Any] = {
        "hydra.run.dir": (hydra.get("run") or {}).get("dir"),
        "hydra.sweep.dir": sweep.get("dir"),
        "hydra.sweep.subdir": os.path.join(str(sweep.get("dir")), str(sweep.get("subdir"))),  # noqa: PTH118
    }
    for key in _PLACES:
        group, _, name = key.partition(".")
        folders[key] = (job.get(group) or {}).get(name)
    if folders["sweep.resume"] == "latest":  # which lies beside hydra.sweep.dir
        del folders["sweep.resume"]
    return folders


def _check_text(key: str, text: str, roots: Sequence[object], typed: Sequence[str]) -> None:
    """Hold one text of a logger, a callback or the trainer to what a file may say."""
    name = re.sub(r"\[\d+\]", "", key).rpartition(".")[2]
    if not text or name in _READ or _is_typed(key, typed):
        return
    # A database or store on this disk is a folder in another spelling.
    local = next((text.removeprefix(start) for start in _LOCAL if text.startswith(start)), text)
    if _is_below(local, roots):
        return
    if _SERVER.fullmatch(name) or _ADDRESS.fullmatch(text):
        raise _untyped(key, text, "choose where results are sent")
    if _FOLDER.fullmatch(name) or text.startswith(("/", "~")) or ".." in Path(text).parts:
        raise _untyped(key, text, "write outside of paths.runs")


def _list_texts(node: object, key: str = "", *, writes: bool = False) -> Iterator[tuple[str, str]]:
    """Yield texts below the nodes of what writes or sends; `writes` if the node itself does."""
    writers = [key] if writes else []
    for inner_key, value in walk(node, key):
        target = value.get("_target_", "") if isinstance(value, Mapping) else ""
        if inner_key in _SECTIONS or str(target).startswith(_WRITERS):
            writers.append(inner_key)
        is_below = any(inner_key.startswith((f"{writer}.", f"{writer}[")) for writer in writers)
        if is_below and isinstance(value, str):
            yield inner_key, value


def _is_below(path: str, roots: Sequence[object]) -> bool:
    """Return True if a path is one of some folders or lies in one, as it is spelt."""
    folders = [str(root) for root in roots if root is not None]
    if _ADDRESS.fullmatch(path):
        addresses = [f"{folder}/" for folder in folders if is_remote(folder)]
        return ".." not in path.split("/") and path.startswith(tuple(addresses))
    normal = _normalise(path)
    local_folders = [_normalise(folder) for folder in folders if not is_remote(folder)]
    return any(normal.is_relative_to(folder) for folder in local_folders)


def _normalise(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - takes .. away and follows no link


def _untyped(key: str, value: object, what: str) -> ConfigError:
    return ConfigError(
        f"'{key}' is {str(value)!a:.200}: only the command line may {what}, no file; type "
        f"{key}=... to have it so, or leave it out."
    )


def _is_typed(key: str, typed: Sequence[str]) -> bool:
    """Return True if the command line gives a key, a part of it, or a dict that it lies in."""
    for word in typed:
        name, _, value = word.lstrip("+").partition("=")
        if name == key or name.startswith(f"{key}."):
            return True
        if key.startswith(f"{name}.") and re.search(r"(?<!\$)\{", value):
            return True
    return False


def _check_installed(target: str, key: str) -> None:
    for module, package in _EXTRAS.items():
        if f"{target}.".startswith(f"{module}.") and not _is_installed(module):
            raise ConfigError(
                f"'{key}' is '{target}', which needs a package: pip install {package}."
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package around it
        return False


def _check_launcher(launcher: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Refuse texts of a file that would become lines of a shell script."""
    for name in _SHELL_KEYS:
        key = f"hydra.launcher.{name}"
        if launcher.get(name) and not _is_typed(key, typed):
            raise ConfigError(
                f"'{key}' goes into a shell script: give it on the command line, not in a file."
            )
    for name, value in launcher.items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"'hydra.launcher.{name}' is {value!a}: it must be one line of text.")


def _check_sweeper(sweeper: Mapping[str, Any]) -> None:
    """Refuse what a sweeper imports by itself, and values whose options would not be checked."""
    if sweeper.get("search_space"):
        raise ConfigError(
            "'hydra.sweeper.search_space' is outdated: write 'hydra.sweeper.params', KEY: "
            "choice(a, b)."
        )
    if function := sweeper.get("custom_search_space"):
        check_targets({"hydra": {"sweeper": {"custom_search_space": {"_target_": function}}}})
        key = "hydra.sweeper.custom_search_space"
        resolve_target(function, key)


def _find_factories(node: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield what a logging configuration would import, by its keys and by addresses of objects."""
    for inner_key, value in walk(node, key):
        is_address = isinstance(value, str) and "://" in value
        if is_address or inner_key.rpartition(".")[2] in _FACTORY_KEYS:
            yield inner_key, value
