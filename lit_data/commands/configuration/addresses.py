"""Options that name a folder which a run writes to; `paths.runs`, `predict.folder` may be addresses.

A run at an address is worked on in a local folder below `paths.cache`, see
`lit_data.commands.remote_runs`, and predictions in the run folder. Anywhere else an address is
refused in one line: without the check ``Path("s3://bucket/a")`` is a folder ``s3:/bucket/a`` of the
working directory.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

from lit_data.commands.configuration.names import walk
from lit_data.errors import ConfigError
from lit_data.io.remote.options import is_remote, parse_store

_LOCAL_OPTIONS = (
    "paths.cache",
    "paths.run",
    "data.cache_dir",
    "prepare.export",
    "sweep.resume",
)
_OUR_CALLBACKS = "lit_data.callbacks."
_ADDRESS = re.compile(r"[a-z0-9+]+:/", re.IGNORECASE)
_DATABASE = "sqlite:///"
_REFERENCE = "${paths.runs}"


def check_addresses(job: Mapping[str, Any]) -> None:
    """Refuse an address in an option that names a folder or file of this machine.

    Callbacks and loggers of Lightning take addresses themselves; ours write to local folders.

    Args:
        job: the resolved configuration as plain data.

    Raises:
        ConfigError: names the key and the address.
    """
    runs = job["paths"]["runs"]
    if is_remote(runs):
        parse_store(runs, "paths.runs")
        _check_databases(job, runs)
    else:
        check_local("paths.runs", runs)
    predictions = (job.get("predict") or {}).get("folder")
    if isinstance(predictions, str) and is_remote(predictions):
        parse_store(predictions, "predict.folder")
    else:
        check_local("predict.folder", predictions)
    for key in _LOCAL_OPTIONS:
        group, _, name = key.partition(".")
        options = job.get(group)
        if isinstance(options, Mapping):
            check_local(key, options.get(name))
    for key, node in walk(job):
        if isinstance(node, Mapping) and str(node.get("_target_")).startswith(_OUR_CALLBACKS):
            check_local(f"{key}.path", node.get("path"))


def check_local(key: str, folder: object) -> None:
    """Refuse an address where a folder is meant.

    Raises:
        ConfigError: names the key and the address.
    """
    if _ADDRESS.match(str(folder).removeprefix(f"{Path.cwd()}/")):
        raise ConfigError(
            f"{key}={folder} is an address: it must lie on a disk of this machine; name a folder, or "
            "put whole runs at an address with paths.runs=s3://BUCKET/FOLDER"
        )


def _check_databases(job: Mapping[str, Any], runs: str) -> None:
    for key, value in walk(job):
        if isinstance(value, str) and value.startswith(f"{_DATABASE}{runs}"):
            raise ConfigError(
                f"{key}={value} is a database, which cannot lie at an address: give "
                f"{key}=http://SERVER or {key}={_DATABASE}/FOLDER/mlflow.db"
            )


def local_runs(runs: str, cache: str) -> Path:
    """Return the local folder in which this machine works on the runs of an address.

    Args:
        runs: the address, which is `paths.runs`.
        cache: `paths.cache`.
    """
    address = parse_store(runs, "paths.runs")
    digest = hashlib.sha256(address.url.encode("utf-8", "surrogateescape")).hexdigest()
    return Path(cache).expanduser().absolute() / "runs" / f"{address.slug}-{digest[:12]}"


def choose_runs_folder(cfg: DictConfig) -> Path:
    """Return the folder of this machine that holds all run folders."""
    runs = cfg.paths.runs
    return local_runs(runs, cfg.paths.cache) if is_remote(runs) else Path(runs)


def name_remote(path: Path, runs: str, cache: str) -> str:
    """Return the address of a file or folder of a run that is worked on locally.

    Args:
        path: absolute.
        runs: the address of all runs.
        cache: `paths.cache`.

    Raises:
        ConfigError: the run lies elsewhere.
    """
    folder = local_runs(runs, cache)
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"hydra.run.dir={path} lies outside of paths.runs={runs}: leave it out, or name a "
            "folder in paths.runs too"
        )
    return f"{runs.rstrip('/')}/{path.relative_to(folder).as_posix()}"


def settle_folders(cfg: DictConfig) -> None:
    """Let the run folder be a local one where `paths.runs` is an address.

    Args:
        cfg: the composed configuration, whose `hydra.run.dir` and `hydra.sweep.dir` are changed.

    Raises:
        ConfigError: the address is refused.
    """
    runs = cfg.paths.runs
    if not is_remote(runs):
        return
    folder = str(local_runs(runs, cfg.paths.cache))
    with read_write(cfg.hydra):
        for node in (cfg.hydra.run, cfg.hydra.sweep):
            texts: Any = OmegaConf.to_container(node, resolve=False)
            # What else it refers to, such as the time, is still told by its text.
            node.dir = str(texts["dir"]).replace(_REFERENCE, folder).replace(runs, folder)
