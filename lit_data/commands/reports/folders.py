"""Which folders are runs, and which are folders of runs."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from lit_data.errors import DataError

_DEEPEST: Final = 4
_SKIPPED: Final = (".", "replaced")  # a sweep that went on with other values keeps the earlier jobs there
_WHAT_IT_IS: Final = (
    "a run is a folder that a command of lit_data wrote, with .hydra/config.yaml or summary.json in it; a sweep, or "
    "runs/fit/NAME, is a folder of runs"
)


def is_run(folder: Path) -> bool:
    """Whether a command of lit_data wrote this folder, also if it broke off."""
    return (folder / ".hydra" / "config.yaml").is_file() or (folder / "summary.json").is_file()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """All runs that the paths name, each once.

    Args:
        paths: Folders of runs, of sweeps, or of both at any depth up to 4.

    Raises:
        DataError: A path is none of these, or cannot be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise DataError(f"{path} is {'not a folder' if path.exists() else 'not there'}: {_WHAT_IT_IS}")
        try:
            runs = [path] if is_run(path) else _find_below(path)
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        if not runs:
            raise DataError(f"{path} is no run and holds none: {_WHAT_IT_IS}")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def choose_folder(paths: Sequence[Path]) -> Path:
    """Where the page goes: into the one folder that was named, of several into the one that holds them all."""
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.resolve() for path in paths]))


def _find_below(folder: Path, depth: int = 1) -> list[Path]:
    """Runs in the order of their names, numbers as numbers; within a run nothing is looked for."""
    found: list[Path] = []
    for child in _sort(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(_SKIPPED)):
        if is_run(child):
            found.append(child)
        elif depth < _DEEPEST:
            found += _find_below(child, depth + 1)
    return found


def _sort(paths: Iterable[Path]) -> list[Path]:
    return sorted(
        paths, key=lambda path: [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]
    )
