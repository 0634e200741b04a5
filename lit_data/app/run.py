"""From a checked command line into Hydra's run or sweep."""

import functools
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from lit_data.app.configuration.checks import check_local
from lit_data.app.configuration.compose import check_run, take_composed
from lit_data.app.configuration.names import allow_packages
from lit_data.app.configuration.targets import read_options
from lit_data.app.configuration.tree import ConfigTree, Engine, open_hydra
from lit_data.app.configuration.words import read_key, read_override, show_override
from lit_data.app.job import PROBLEMS, run_job
from lit_data.app.launcher import (
    RESUMED,
    SWEEP_JOB,
    check_alone,
    check_resume,
    claim_folder,
    has_new_folder,
    is_first_rank,
    is_stop,
    place_run,
)
from lit_data.app.machine import find_full_disk
from lit_data.app.run_folder import AUTO
from lit_data.app.sweeps.options import SweepOptions
from lit_data.app.sweeps.process import reporting_to_sweep
from lit_data.app.sweeps.run import run_sweep
from lit_data.app.task_choice import choose_experiment
from lit_data.core.errors import ConfigError, LitDataError, StoreError
from lit_data.core.files import try_writing

if TYPE_CHECKING:
    from lit_data.app.build import Run

_WITHOUT_DATA = ("doctor",)
_CHOOSING = ("experiment", "data", "data._target_", "suite")
"""Keys that choose the data; a suite of benchmarks brings its own."""


def run(
    command: str,
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    packages: Sequence[str] = (),
    multirun: bool = False,
) -> Path:
    """Check the command line, then run the command, once or for each job of a sweep.

    Args:
        command: one of `lit_data.app.COMMANDS`.
        overrides: Hydra overrides.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.
        multirun: run every combination of swept values.

    Returns:
        The folder of the run or the sweep.

    Raises:
        LitDataError: as the check raises it, or with the exit code of a sweep's first job that
            failed.
        SystemExit: a single job failed with the error that is its cause.
    """
    reporting = reporting_to_sweep() if SWEEP_JOB in os.environ else nullcontext()
    with reporting, open_hydra(config_dir) as hydra:
        overrides = name_experiment(hydra, command, overrides)
        cfg, completed = check_run(hydra, command, overrides, multirun=multirun, packages=packages)
        flags = _list_flags(config_dir, packages)
        if multirun or cfg.hydra.mode is RunMode.MULTIRUN:
            options = _read_sweep(cfg)
            check_alone()
            _check_folder(cfg, "hydra.sweep.dir")
            return run_sweep(hydra, cfg, completed, options=options, flags=flags, packages=packages)
        _check_single(cfg, completed)
        task = functools.partial(_run_alone, flags=tuple(flags), packages=tuple(packages))
        take_composed(hydra, cfg, place_run(cfg, completed))
        # Hydra makes the run folder, sets its logs up and calls its callbacks.
        job = hydra.run(command, task, [])
        job_cfg: Any = job.hydra_cfg
        return Path(job_cfg.hydra.runtime.output_dir)


def _read_sweep(cfg: DictConfig) -> SweepOptions:
    return read_options(SweepOptions, cfg.get("sweep", {}), "sweep")


def _check_single(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what a single run cannot use, and its folder if it cannot be made."""
    is_swept = any(read_key(word).partition(".")[0] == "sweep" for word in overrides)
    if is_swept and _read_sweep(cfg).resume is not None:
        raise ConfigError("sweep.resume resumes a sweep: add -m.")
    check_resume(cfg)
    _check_folder(cfg, "hydra.run.dir")


def name_experiment(hydra: Engine, command: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the experiment of the checkpoint, where they choose no data.

    A word without a key that is the name of an experiment chooses that. A run whose kind of data
    alone is chosen has its name.

    Args:
        hydra: The engine of `open_hydra`.
        command: The word on the command line.
        overrides: Those behind it.

    Raises:
        LitDataError: See `choose_experiment`.
    """
    tree = ConfigTree(hydra, command, overrides)
    experiments = tree.options("experiment")
    words = [f"experiment={word}" if word in experiments else word for word in overrides]
    typed = {read_key(word): word for word in words}
    if command not in _WITHOUT_DATA and not any(key in typed for key in _CHOOSING):
        return [f"experiment={choose_experiment(tree, words)}", *words]
    if "data" in typed and not {"experiment", "name"} & typed.keys():
        data = read_override(typed["data"])
        return [*words, f"name={data}"] if data else words
    return words


def _list_flags(config_dir: str | None, packages: Sequence[str]) -> list[str]:
    """Options of the command line that ranks and jobs of a sweep need too."""
    flags = []
    for name in packages:
        flags += ["--package", name]
    if config_dir is not None:
        flags += ["--config-dir", str(Path(config_dir).absolute())]
    return flags


def build_training(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    packages: Sequence[str] = (),
    trainer: Mapping[str, Any] | None = None,
) -> "Run":
    """Build the objects of ``fit`` outside of a run: but for its empty folder nothing is written.

    Args:
        overrides: Hydra overrides.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.
        trainer: arguments of the Trainer that replace those of the configuration.

    Raises:
        LitDataError: the configuration is refused.
        ConfigError: processes or later starts that share a run folder would not find it.
    """
    from lit_data.app.build import build  # with torch, which most commands import later

    with open_hydra(config_dir) as hydra, allow_packages(packages):
        cfg, _ = check_run(hydra, "fit", overrides)
        is_shared = os.environ.get("WORLD_SIZE", "1") != "1" or cfg.resume == AUTO
        if is_shared and has_new_folder(cfg):
            raise ConfigError(
                "other processes and later starts need the same run folder, but each would name "
                "a new one by its time: set paths.run=FOLDER"
            )
        if has_new_folder(cfg):
            with read_write(cfg.hydra):
                cfg.hydra.runtime.output_dir = str(claim_folder(cfg).absolute())
            HydraConfig.instance().set_config(cfg)
        return build(cfg, trainer)


def print_config(
    command: str,
    overrides: Sequence[str],
    *,
    part: str,
    resolve: bool = False,
    config_dir: str | None = None,
    packages: Sequence[str] = (),
    multirun: bool = False,
) -> None:
    """Print the composed configuration as YAML.

    Args:
        command: one of `lit_data.app.COMMANDS`.
        overrides: Hydra overrides.
        part: `job` without Hydra's node, `hydra` for that node alone, `all` for both.
        resolve: replace interpolations by their values.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.
        multirun: print the first job of a sweep.

    Raises:
        ConfigError: the configuration is refused.
    """
    with open_hydra(config_dir) as hydra:
        overrides = name_experiment(hydra, command, overrides)
        cfg, _ = check_run(hydra, command, overrides, multirun=multirun, packages=packages)
        keys = [str(key) for key in cfg]
        if part == "hydra":
            keys = ["hydra"]
        elif part == "job":
            keys.remove("hydra")
        printed = OmegaConf.masked_copy(cfg, keys)
        printed._set_parent(cfg)  # interpolations look there
        print(OmegaConf.to_yaml(printed, resolve=resolve), end="")


def _run_alone(cfg: DictConfig, *, flags: Sequence[str], packages: Sequence[str]) -> None:
    try:
        run_job(cfg, flags=flags, packages=packages)
    except (KeyboardInterrupt, SystemExit) as stop:
        if is_stop(stop) and is_first_rank() and SWEEP_JOB not in os.environ:
            print(f"lit_data: {_describe_next(cfg, flags)}", file=sys.stderr)
        raise
    except Exception as error:
        full = find_full_disk(error)
        if full is not None and is_first_rank() and SWEEP_JOB not in os.environ:
            print(f"lit_data: {_describe_next(cfg, flags)}", file=sys.stderr)
        failure = error if isinstance(error, LitDataError) else full
        if failure is None:
            raise
        if isinstance(failure, ConfigError) and is_first_rank():
            folder = Path(HydraConfig.get().runtime.output_dir)
            _remove_unused(folder, Path(cfg.paths.runs).absolute())
        # The one exception that Hydra leaves alone.
        raise SystemExit(failure.exit_code) from failure


def _describe_next(cfg: DictConfig, flags: Sequence[str]) -> str:
    """Return how to go on with a command that was stopped, with the line to type."""
    changes = _list_changes(cfg, Path(HydraConfig.get().runtime.output_dir))
    replaced = {"ckpt", *changes} if "resume" in changes else changes
    words = []
    for word in HydraConfig.get().overrides.task:
        if read_key(word) not in replaced:
            words.append(word)
    line = shlex.join(["lit-data", cfg.command, *flags, *words])
    line = " ".join([line, *(show_override(key, value) for key, value in changes.items())])
    goes_on = changes or cfg.command == "prepare"
    start = "resume with" if goes_on else "there is nothing to resume, start again with"
    return f"{start}\n{line}"


def _list_changes(cfg: DictConfig, folder: Path) -> dict[str, object]:
    """List the options by which a command goes on with what it left in its folder."""
    is_saved = any((folder / "checkpoints" / name).exists() for name in RESUMED)
    if cfg.command == "fit" and is_saved:
        return {"resume": folder}
    if cfg.command == "predict":
        return {"predict.resume": True, "predict.folder": cfg.predict.folder or folder}
    return {}


def _remove_unused(folder: Path, runs: Path) -> None:
    """Remove the folder of a run that came no further than a wrong value.

    It holds what Hydra and the log put there, or it stays.
    """
    hydra = HydraConfig.get()
    removable = {hydra.output_subdir, f"{hydra.job.name}.log", PROBLEMS}
    removable |= {"failure.json", "report.html"}
    names = {path.name for path in folder.iterdir()}
    if folder.is_symlink() or not names <= removable:
        return
    root_logger = logging.getLogger()
    for handler in list(root_logger.handlers):
        path = Path(getattr(handler, "baseFilename", ""))  # of those that write files
        if path.parent == folder:
            root_logger.removeHandler(handler)
            handler.close()
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    parents = [path for path in folder.parents if path.is_relative_to(runs)]
    with suppress(OSError):  # until one holds other runs
        for path in (folder, *parents):
            path.rmdir()


def _check_folder(cfg: DictConfig, key: str) -> None:
    """Refuse a folder that is not that of all files of a run or sweep, or cannot be made.

    Nothing is left behind.

    Args:
        cfg: The composed configuration with Hydra's node.
        key: Of the folder.
    """
    if Path(cfg.paths.run).absolute() != Path(cfg.hydra.runtime.output_dir):
        raise ConfigError(
            f"paths.run={cfg.paths.run} moves only some files of the run: set "
            f"{key}={cfg.paths.run}, which moves all"
        )
    folder = Path(OmegaConf.select(cfg, key)).absolute()
    check_local("the run folder", folder)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        try_writing(parent)
    except OSError as error:
        raise StoreError(
            f"the run folder {folder} cannot be created: {parent} is not a writable folder "
            f"({error.strerror}). Set paths.runs or {key}."
        ) from error
