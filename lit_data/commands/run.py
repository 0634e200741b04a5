"""From a checked command line into Hydra's run or sweep."""

import functools
import logging
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.configuration.compose import check_run
from lit_data.commands.configuration.hydra_node import check_local
from lit_data.commands.configuration.names import allow_packages
from lit_data.commands.configuration.targets import read_options
from lit_data.commands.configuration.tree import open_hydra
from lit_data.commands.job import PROBLEMS, run_job
from lit_data.commands.launcher import is_first_rank, place_run
from lit_data.commands.sweeps.options import SweepOptions, settle_direction
from lit_data.commands.sweeps.process import reporting_to_sweep
from lit_data.commands.sweeps.run import run_sweep
from lit_data.errors import ConfigError, LitDataError, StoreError

if TYPE_CHECKING:
    from lit_data.commands.build import Run


def run(
    command: str,
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    packages: Sequence[str] = (),
    multirun: bool = False,
    read: Sequence[str] = (),
) -> Path:
    """Check the command line, then run the command in Hydra's run folder, once or for each job of a
    sweep.

    Args:
        command: one of `lit_data.commands.COMMANDS`.
        overrides: Hydra overrides.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.
        multirun: run every combination of swept values.
        read: those of the overrides that a run folder says, see `check_run`.

    Returns:
        The folder of the run or the sweep.

    Raises:
        LitDataError: as the check raises it, or with the exit code of a sweep's first job that
            failed.
        SystemExit: a single job failed with the error that is its cause.
    """
    with reporting_to_sweep(), open_hydra(config_dir) as hydra:
        cfg, words = check_run(
            hydra, command, overrides, multirun=multirun, packages=packages, read=read
        )
        sweeps = multirun or cfg.hydra.mode is RunMode.MULTIRUN
        options, placed = (
            read_options(SweepOptions, cfg.get("sweep", {}), "sweep"),
            place_run(cfg, sweeps=sweeps),
        )
        folder = Path(cfg.hydra.sweep.dir if sweeps else cfg.hydra.run.dir).absolute()
        _check_place(folder)
        flags = [word for name in packages for word in ("--package", name)]
        flags += (
            ["--config-dir", str(Path(config_dir).absolute())] if config_dir is not None else []
        )
        if sweeps:
            options, settled = settle_direction(cfg, options)
            run_sweep(
                hydra, cfg, [*words, *settled], options=options, flags=flags, packages=packages
            )
            return folder
        if options.resume is not None:
            raise ConfigError("sweep.resume goes on with a sweep: add -m.")
        task = functools.partial(_run_alone, flags=tuple(flags), packages=tuple(packages))
        done = hydra.run(command, task, [*words, *placed, "hydra.mode=RUN"])
        left: Any = done.hydra_cfg
        return Path(left.hydra.runtime.output_dir)


def build_training(
    overrides: Sequence[str], *, config_dir: str | None = None, packages: Sequence[str] = ()
) -> "Run":
    """Build the objects of ``fit`` outside of a run: nothing is written, no training is started.

    Args:
        overrides: Hydra overrides.
        config_dir: folder of the user's own groups and experiments.
        packages: packages whose targets are allowed too.

    Raises:
        LitDataError: the configuration is refused.
    """
    from lit_data.commands.build import build  # with torch, which most commands import later

    with open_hydra(config_dir) as hydra, allow_packages(packages):
        cfg, _ = check_run(hydra, "fit", overrides)
        return build(cfg)


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
        command: one of `lit_data.commands.COMMANDS`.
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
        cfg, _ = check_run(hydra, command, overrides, multirun=multirun, packages=packages)
        keys = [str(key) for key in cfg if part == "all" or (key == "hydra") == (part == "hydra")]
        chosen = OmegaConf.masked_copy(cfg, keys)
        chosen._set_parent(cfg)
        print(OmegaConf.to_yaml(chosen, resolve=resolve), end="")


def _run_alone(cfg: DictConfig, *, flags: Sequence[str], packages: Sequence[str]) -> None:
    try:
        run_job(cfg, flags=flags, packages=packages)
    except LitDataError as error:
        if isinstance(error, ConfigError) and is_first_rank():
            _take_back(Path(HydraConfig.get().runtime.output_dir), Path(cfg.paths.runs).absolute())
        raise SystemExit(error.exit_code) from error  # the one exception that Hydra leaves alone


def _take_back(folder: Path, runs: Path) -> None:
    """Remove the folder of a run that came no further than a wrong value: what Hydra and the log put there, no more."""
    hydra = HydraConfig.get()
    own = {hydra.output_subdir, f"{hydra.job.name}.log", "failure.json", "report.html", PROBLEMS}
    if folder.is_symlink() or not {path.name for path in folder.iterdir()} <= own:
        return
    for handler in [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]:
        if Path(handler.baseFilename).parent == folder:
            logging.getLogger().removeHandler(handler)
            handler.close()
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with suppress(OSError):  # until one holds other runs
        for parent in (folder, *(path for path in folder.parents if path.is_relative_to(runs))):
            parent.rmdir()


def _check_place(folder: Path) -> None:
    """Refuse a run folder that cannot be made; nothing is left behind."""
    check_local("the run folder", folder)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise StoreError(
            f"the run folder {folder} cannot be made: {parent} is not a writable folder "
            f"({error.strerror}). Set paths.runs."
        ) from error
