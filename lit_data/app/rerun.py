"""``rerun``: start a run or a sweep again with the command line of its folder, and changes."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import ScalarEvent, YAMLError

from lit_data.app import SCORING
from lit_data.app.cli import Parser
from lit_data.app.configuration.model_choice import WITHOUT_WEIGHTS
from lit_data.app.configuration.words import read_override, write_override
from lit_data.app.remote_runs import RECORDS, fetching_runs
from lit_data.app.run_folder import SPLIT_TABLE, SPLITTING
from lit_data.app.untrusted import as_dict, find_config_dir, read_text
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, DataError, escape, first_line, show_path
from lit_data.core.files import is_there
from lit_data.core.opening import decode_text, read_within
from lit_data.core.plain import check_number, measure_yaml, parse_yaml

_HELP = """\
usage: lit-data rerun RUN [key=value ...] [--cwd FOLDER] [--package NAME] [--print]

Starts a run or a sweep again with its command line. Options after RUN override those of the run. RUN may be an
address. If the run was started in another folder, give --cwd FOLDER, from which relative paths are read and written.
Repeat options that decide which code runs (--package, and Hydra's own, such as hydra/launcher=slurm), that write
outside of paths.runs or that send results to a server. --print shows the command line and exits."""


_BUILT = ("paths", "data", "model")
_CACHE = "LIT_DATA_CACHE"
_MOST_BYTES = 2**20  # of a configuration
_OF_TRAINING = ("resume", "ckpt", "report", "paths.run")
"""Keys of a run of ``fit`` that other commands on it do not take over."""
_OF_SCORES = ("experiment", "name", "data", "model", "synthesis", "augment", "seed")
"""First parts of keys that scores and predictions depend on; others say where results go, and how fast."""
_OF_IMAGES = ("data.root", "data.splits")
"""Keys of the images that were trained on."""
_OF_SPLITS = tuple(f"data.{name}" for name in SPLITTING)
_CACHES = ("paths.cache", "data.cache_dir")
"""Keys of the places of decoded data, which are those of this machine unless they are typed."""
_PATHS: Mapping[str, Sequence[str]] = {
    "ckpt": ("best", "last"),
    "data.root": (),
    "data.splits": ("auto", "folders"),
    "paths.cache": (),
    "paths.run": (),
    "paths.runs": (),
}
"""Keys with paths, and their values that are none."""
_IS_ADDRESS = re.compile(r"~|[\w+.-]+://").match
_IS_OF_HYDRA = re.compile(r"hydra\b").match


@dataclass(frozen=True)
class Started:
    """Command line of a run, and where it was given.

    Attributes:
        command: The word on the command line.
        overrides: Without Hydra's own, which may name programs: the folder may be anybody's.
        config_dir: The user's own folder of configurations, if any.
        folder: Where it was started.
        sweeps: True for a sweep.
        model: The model that an experiment chose by the weights of the machine; None for others.
    """

    command: str
    overrides: tuple[str, ...]
    config_dir: str | None
    folder: Path
    sweeps: bool
    model: str | None = None

    def replace(self, typed: Sequence[str], *, without: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the overrides with those that are typed now in place of those of the same key.

        Decoded data lie where this machine has them, whatever the run says.

        Args:
            typed: Overrides.
            without: Keys that are left out.
        """
        keys = {_read_key(override) for override in typed} | {*without, *_CACHES}
        remaining = [override for override in self.overrides if _read_key(override) not in keys]
        return (*remaining, *typed)


def read_started(run: Path) -> Started:
    """Read how a run or a sweep was started.

    Where it does not lie in its `paths.runs`, that is left out.

    Raises:
        DataError: The folder is none, or does not say.
    """
    is_sweep = is_there(run / "multirun.yaml")
    hydra_file, config_file = ".hydra/hydra.yaml", ".hydra/config.yaml"
    if is_sweep:
        hydra_file = config_file = "multirun.yaml"
    try:
        hydra = as_dict(_read_yaml(run, hydra_file).get("hydra"))
        config = _read_yaml(run, config_file)
    except FileNotFoundError as error:
        raise DataError(
            f"{run} is neither a run nor a sweep of lit_data: it has no {hydra_file}"
        ) from error
    except (OSError, DataError, YAMLError, RecursionError) as error:
        raise DataError(f"{run} does not record how it was started: {first_line(error)}") from error
    typed = as_dict(hydra.get("overrides")).get("task")
    command = config.get("command")
    runtime = as_dict(hydra.get("runtime"))
    model = as_dict(runtime.get("choices")).get("model")
    if not isinstance(typed, list) or not isinstance(command, str):
        raise DataError(
            f"{run} does not record how it was started: its configuration is not from lit_data"
        )
    folder = Path(str(runtime.get("cwd")))
    flags = find_config_dir(hydra)  # --config-dir FOLDER for each; the last one counts
    config_dir = flags[-1] if flags else None
    lines = map(str, typed)
    overrides = []
    for line in lines:
        key = _read_key(line)
        is_elsewhere = key == "paths.runs" and not _holds(folder, read_override(line), run)
        if not _IS_OF_HYDRA(key) and not is_elsewhere:
            overrides.append(line)
    if command != "fit" or is_sweep or model not in WITHOUT_WEIGHTS:
        model = None
    return Started(command, tuple(overrides), config_dir, folder, is_sweep, model)


def _holds(started: Path, runs: str | None, run: Path) -> bool:
    """Return True if a run lies in COMMAND/NAME/TIME of its folder of runs, as it was written."""
    parent = (run.resolve() / "../../..").resolve()
    return runs is not None and (started / runs).resolve() == parent


def read_config(run: Path) -> DictConfig:
    """Read the configuration of a run, for what is built of it outside of a run.

    Raises:
        ConfigError: The configuration cannot be read, or stands for too much.
        DataError: The folder is none, or its configuration is none of ours.
    """
    path = run / ".hydra/config.yaml"
    cfg = _load_config(path)
    if not all(isinstance(cfg.get(name), DictConfig) for name in _BUILT):
        raise DataError(
            f"{show_path(path)} is not the configuration of a fit, with {', '.join(_BUILT)}"
        )
    return cfg


def _load_config(path: Path) -> DictConfig:
    """Read a configuration that may be anybody's: it is measured before OmegaConf reads it."""
    try:
        for event in measure_yaml(decode_text(read_within(path, _MOST_BYTES))):
            if isinstance(event, ScalarEvent):
                check_number(event)
        cfg = OmegaConf.load(path)
    except DataError as error:
        text = str(error).removeprefix(f"{show_path(path)}: ")
        raise ConfigError(f"{show_path(path)}: {text}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{show_path(path)} cannot be read: {reason}") from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError(f"{show_path(path)} holds no keys, unlike the configuration of a run")
    return cfg


def _read_yaml(run: Path, name: str) -> dict[str, Any]:
    return as_dict(parse_yaml(read_text(run, run / name)))


def main(arguments: Sequence[str]) -> None:
    """Start a run again.

    Args:
        arguments: Those behind ``rerun``.

    Raises:
        LitDataError: There is no such run, or as the command raises it.
    """
    parser = Parser("rerun")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--cwd")
    options = parser.read(arguments)
    if options.help:
        print(_HELP)
        return
    if not options.words:
        raise ConfigError(
            "rerun needs the folder of a run or a sweep, such as "
            "runs/fit/stripe/2026-01-31_12-00-00"
        )
    run, *typed = options.words
    with fetching_runs([run], RECORDS) as (run_folder,):
        started = read_started(run_folder)
    overrides = name_model(started, started.replace(typed), typed)
    line = _join(started, overrides, options.package)
    if options.print:
        print(line)
        return
    folder = choose_folder(started, ["rerun", *options.words], options.cwd)
    print(line, file=sys.stderr)
    go_to(folder)
    from lit_data.app.run import run  # Hydra is imported only here

    run(
        started.command,
        overrides,
        config_dir=started.config_dir,
        packages=options.package,
        multirun=started.sweeps,
    )


def name_model(
    started: Started, overrides: tuple[str, ...], typed: Sequence[str]
) -> tuple[str, ...]:
    """Name the model that the run had, or this machine would choose by the weights that it has."""
    is_chosen = "model" in map(_read_key, overrides)
    is_changed = not {"experiment", "data"}.isdisjoint(map(_read_key, typed))
    if started.model is None or is_chosen or is_changed:
        return overrides
    return (*overrides, f"model={started.model}")


def choose_folder(started: Started, words: Sequence[str], typed: str | None) -> Path:
    """Return the folder whose relative paths a command reads and writes.

    A run folder may be anybody's, and does not choose where results go.

    Args:
        started: How a run was started.
        words: Of the command line, for the message.
        typed: What the user gave as --cwd, if anything.

    Raises:
        ConfigError: The run was started elsewhere and nothing was typed, or there is no such folder.
    """
    here = Path.cwd()
    if typed is not None:
        folder = Path(typed).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--cwd {typed}: there is no such folder")
        return folder.absolute()
    if not started.folder.is_dir() or started.folder.resolve() == here:
        return here
    line = shlex.join(["lit-data", *words, "--cwd", str(started.folder)])
    raise ConfigError(
        f"the run was started in {show_path(started.folder)}, and you are in {here}: type "
        f"{escape(line)} to write there, or --cwd . to write here"
    )


def go_to(folder: Path) -> None:
    """Make a folder the one that relative paths are read from; what is typed stays what it was."""
    if not folder.is_dir():
        return
    # Nothing is imported from the folder that it goes to.
    sys.path[:] = [str(Path.cwd() / entry) for entry in sys.path]
    if _CACHE in os.environ:
        os.environ[_CACHE] = str(Path.cwd() / os.environ[_CACHE])
    os.chdir(folder)


class OnRun(NamedTuple):
    """Command line of a command on the checkpoint, the data and the model of a run.

    Attributes:
        overrides: Of the run, with what is typed on top.
        config_dir: The folder of configurations that the run was started with, if any.
    """

    overrides: tuple[str, ...]
    config_dir: str | None


def take_run(command: str, run: str, typed: Sequence[str], cwd: str | None = None) -> OnRun:
    """Read the command line that a run was trained with, for a command that writes a run.

    Relative paths are those of the folder where the run was started, and those that are typed of
    this one; a run without relative paths is worked on from this one.

    Args:
        command: Such as ``calibrate``.
        run: Folder or address of the run.
        typed: Overrides behind it.
        cwd: What was typed as --cwd, see `choose_folder`.

    Raises:
        ConfigError: It is no run of ``fit``, or was started in another folder.
        DataError: The folder is none, or does not say how it was started.
    """
    started = _read_training(command, run)
    if command in SCORING:
        started = replace(started, overrides=_list_deciding(command, started.overrides))
    on_run = _join_run(started, run, typed)
    if cwd is not None or any(map(_has_relative_path, started.overrides)):
        go_to(choose_folder(started, [command, run, *typed], cwd))
    return on_run


def _read_training(command: str, run: str) -> Started:
    with fetching_runs([run], RECORDS) as (run_folder,):
        started = read_started(run_folder)
    if started.command != "fit" or started.sweeps:
        kind = "sweep" if started.sweeps else started.command
        raise ConfigError(
            f"{command} needs the folder of a run of fit, but {run} is a run of {kind}"
        )
    return started


def _join_run(started: Started, run: str, typed: Sequence[str]) -> OnRun:
    address = run if is_remote(run) else str(Path(run).resolve())
    typed = [_make_absolute(override) for override in typed]
    without = [*_OF_TRAINING]
    has_path = any(_find_path(override) for override in typed if override.startswith("ckpt="))
    if not has_path:  # which is given in the place of a run
        typed = [write_override("run", address), *typed]
    if is_there(Path(run) / SPLIT_TABLE) and not _chooses_images(started, typed):
        # The table has the splits of the training, also after images were added or removed.
        without += _OF_SPLITS
    return OnRun(started.replace(typed, without=without), started.config_dir)


def _chooses_images(started: Started, typed: Sequence[str]) -> bool:
    """Return True if what is typed chooses other images than those of the run, or other splits."""
    if not set(_OF_SPLITS).isdisjoint(map(_read_key, typed)):
        return True
    root = _find_root(typed, Path())
    return root is not None and root != _find_root(started.overrides, started.folder)


def _find_root(overrides: Sequence[str], folder: Path) -> str | None:
    """Return the root of overrides, whose relative path is below a folder; None if they have none."""
    root = None
    for override in overrides:
        if _read_key(override) == "data.root":
            root = read_override(override)  # the last one counts
    if root is None or _IS_ADDRESS(root):
        return root
    return os.path.realpath(folder / root)


def _find_path(override: str) -> str | None:
    """Return the path that an override gives; None if it gives none."""
    key = _read_key(override)
    text = read_override(override) if key in _PATHS else None
    return None if not text or text in _PATHS[key] else text


def _list_deciding(command: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return what scores depend on, and predictions but for the images, which are others."""
    words = []
    for override in overrides:
        key = _read_key(override)
        is_taken = command != "predict" or key not in _OF_IMAGES
        if is_taken and key.partition(".")[0] in _OF_SCORES:
            words.append(override)
    return tuple(words)


def _has_relative_path(override: str) -> bool:
    path = _find_path(override)
    return path is not None and not Path(path).is_absolute() and not _IS_ADDRESS(path)


def _make_absolute(override: str) -> str:
    """Return an override whose path, if any, does not depend on the current folder."""
    path = _find_path(override)
    if path is None or _IS_ADDRESS(path):
        return override
    return write_override(override.partition("=")[0], Path.cwd() / path)


def _join(started: Started, overrides: Sequence[str], packages: Sequence[str]) -> str:
    arguments = ["lit-data", started.command]
    if started.sweeps:
        arguments.append("-m")
    arguments += overrides
    for name in packages:
        arguments += ["--package", name]
    if started.config_dir:
        arguments += ["--config-dir", started.config_dir]
    return shlex.join(arguments)


def _read_key(override: str) -> str:
    """Return the key of an override."""
    return override.lstrip("+~").partition("=")[0]
