"""``rerun``: start a run or a sweep again from what its folder says of its command line, with changes if any."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from yaml import YAMLError

from lit_data.commands.configuration.suggest import Parser
from lit_data.commands.reports.settings import as_dict, find_config_dir
from lit_data.commands.reports.untrusted import parse_yaml, read_text
from lit_data.errors import ConfigError, DataError

_HELP: Final = """\
usage: python -m lit_data rerun RUN [key=value ...] [--package NAME] [--print]

Starts the run again, or the sweep, with its own command line; what is typed behind RUN comes on top. Relative paths are
read from the folder where the run was started, if it is there. Type again what decides which code runs: --package, and
words of Hydra itself such as hydra/launcher=slurm, and what writes outside of
paths.runs or sends results to a server. --print shows the command line and stops."""


@dataclass(frozen=True)
class Started:
    """How a run was started.

    Attributes:
        command: The word on the command line.
        words: The overrides but for Hydra's own, which may name programs: the folder may be
            anybody's.
        config_dir: The user's own folder of configurations, if any.
        folder: Where it was started.
        sweeps: Whether it is a sweep.
    """

    command: str
    words: tuple[str, ...]
    config_dir: str | None
    folder: Path
    sweeps: bool

    def replace(self, typed: Sequence[str], *, without: Sequence[str] = ()) -> tuple[str, ...]:
        """The overrides with those that are typed now in place of those of the same key; some keys are left out."""
        keys = {_key(word) for word in typed} | set(without)
        return (*(word for word in self.words if _key(word) not in keys), *typed)

    def list_read(self, run: Path, typed: Sequence[str]) -> list[str]:
        """The overrides that hold as a file's: those that are not typed now, but for the place where the run lies."""
        keys = {_key(word) for word in typed}
        runs = (run.resolve() / "../../..").resolve()  # COMMAND/NAME/TIME lie below it
        return [
            word
            for word in self.words
            if _key(word) not in keys
            and (
                _key(word) != "paths.runs"
                or (self.folder / word.partition("=")[2]).resolve() != runs
            )
        ]


def read_started(run: Path) -> Started:
    """Read how a run or a sweep was started.

    Raises:
        DataError: The folder is none, or does not say.
    """
    sweeps = (run / "multirun.yaml").is_file()
    names = ("multirun.yaml",) * 2 if sweeps else (".hydra/hydra.yaml", ".hydra/config.yaml")
    try:
        said, config = (as_dict(parse_yaml(read_text(run, run / name))) for name in names)
    except FileNotFoundError as error:
        raise DataError(
            f"{run} is no run and no sweep of lit_data: there is no {names[0]} in it"
        ) from error
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise DataError(
            f"{run} does not say how it was started: {str(error).splitlines()[0]}"
        ) from error
    hydra = as_dict(said.get("hydra"))
    words, command = as_dict(hydra.get("overrides")).get("task"), config.get("command")
    if not isinstance(words, list) or not isinstance(command, str):
        raise DataError(
            f"{run} does not say how it was started: its configuration is not one of lit_data"
        )
    folder = Path(str(as_dict(hydra.get("runtime")).get("cwd")))
    config_dir = dict(zip(*[iter(find_config_dir(hydra))] * 2, strict=True)).get("--config-dir")
    plain = tuple(str(word) for word in words if not re.match(r"hydra\b", _key(str(word))))
    return Started(command, plain, config_dir, folder, sweeps)


def main(words: Sequence[str]) -> None:
    """Start a run again.

    Args:
        words: Those behind ``rerun``.

    Raises:
        LitDataError: There is no such run, or as the command raises it.
    """
    parser = Parser("python -m lit_data rerun")
    parser.add_argument("--package", action="append", default=[])
    parser.add_argument("--print", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.read(words)
    if options.help:
        print(_HELP)
        return
    if not options.words:
        raise ConfigError(
            "rerun needs the folder of a run or a sweep, such as "
            "runs/fit/stripe/2026-01-31_12-00-00"
        )
    place, typed = Path(options.words[0]), options.words[1:]
    started = read_started(place)
    read = started.list_read(place, typed)
    overrides = started.replace(typed)
    line = _join(started, overrides, options.package)
    if options.print:
        print(line)
        return
    print(line, file=sys.stderr)
    if started.folder.is_dir():
        sys.path[:] = [
            place or str(Path.cwd()) for place in sys.path
        ]  # imports nothing of the folder that it goes to
        os.chdir(started.folder)
    from lit_data.commands.run import run  # Hydra is imported only here

    places = {
        "config_dir": started.config_dir,
        "packages": options.package,
        "multirun": started.sweeps,
        "read": read,
    }
    run(started.command, overrides, **places)


def _join(started: Started, overrides: Sequence[str], packages: Sequence[str]) -> str:
    flags = [word for name in packages for word in ("--package", name)]
    flags += ["--config-dir", started.config_dir] if started.config_dir else []
    words = [started.command, *["-m"] * started.sweeps, *overrides, *flags]
    return shlex.join(["python", "-m", "lit_data", *words])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
