"""Folder of a run or a sweep, claimed so that no other one writes there, and its checkpoints."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from omegaconf import DictConfig

from lit_data.app.untrusted import as_dict, read_text
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.files import is_there
from lit_data.core.plain import parse_yaml

AUTO = "auto"
"""Value of `resume` that goes on in the folder of the run itself."""
SPLIT_TABLE = "splits.csv"
"""Of a run: the split of each image, as `data.splits` takes it."""
SPLITTING = ("splits", "split_seed", "folds", "fold", "groups", "near_duplicates", "protocol")
"""Options of the data that decide which images are of which split."""
_MARK = ".hydra"
"""Folder that the first start makes: no second one can make it too."""


def is_run(folder: Path) -> bool:
    """Return True if a command of lit_data wrote this folder, also if it broke off."""
    return is_there(folder / _MARK / "config.yaml") or is_there(folder / "summary.json")


def claim_new(folder: Path) -> Path:
    """Make a folder or, where another start has made it, the next free one: NAME-2, NAME-3, ..."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    claimed, number = folder, 1
    while not _make(claimed):
        number += 1
        claimed = folder.with_name(f"{folder.name}-{number}")
    return claimed


def claim_typed(folder: Path) -> bool:
    """Claim a folder that the user has named; return False where a run or a sweep has it."""
    if is_run(folder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    return _make(folder / _MARK)


def _make(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def check_typed(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Claim the run folder that the user has named, or refuse it.

    Args:
        cfg: The composed configuration with Hydra's node.
        overrides: Of the command line.

    Raises:
        ConfigError: Another run lies there, and this one does not go on with it.
    """
    folder = Path(cfg.hydra.run.dir)
    if claim_typed(folder) or _goes_on(cfg, folder):
        return
    cure = ""
    if cfg.command == "fit":
        cure = f", or resume it with resume={AUTO}"
    elif _was_started(folder, cfg.command, overrides):
        return
    elif cfg.command == "predict":
        cure = ", or resume it with predict.resume=true"
    raise ConfigError(
        f"hydra.run.dir={folder} already holds another run: choose another folder{cure}"
    )


def _goes_on(cfg: DictConfig, folder: Path) -> bool:
    """Return True if a run takes up what lies in its folder, or nothing of worth lies there."""
    if cfg.command == "predict" and cfg.predict.resume:
        return True
    for start in (cfg.get("ckpt"), cfg.get("resume")):
        is_inside = Path(str(start)).absolute().is_relative_to(folder.absolute())
        if cfg.command == "fit" and (start == AUTO or is_inside):
            return True
    return is_there(folder / "failure.json") and not (folder / "checkpoints").exists()


def _was_started(folder: Path, command: str, overrides: Sequence[str]) -> bool:
    """Return True if the same words were started there before, as where a machine has died."""
    earlier: list[Any] = []
    with suppress(OSError, DataError):
        config = as_dict(parse_yaml(read_text(folder, folder / _MARK / "config.yaml")))
        typed = parse_yaml(read_text(folder, folder / _MARK / "overrides.yaml"))
        earlier = [config.get("command"), *typed]
    words = [word for word in overrides if not word.lstrip("+~").startswith("hydra.")]
    return earlier == [command, *words]


class Written(NamedTuple):
    """A checkpoint below a folder; the one that was written last is the largest.

    Attributes:
        mtime_s: When.
        rank: Of its name among those that were asked for.
        name: Path below the folder.
    """

    mtime_s: float
    rank: int
    name: str

    @property
    def run(self) -> str:
        """Folder of its run, below the folder; ``.`` for the folder itself."""
        return str(PurePosixPath(self.name).parents[1])


def list_checkpoints(
    folder: Path, names: Sequence[str], below: str = "**/checkpoints"
) -> list[Written]:
    """List the checkpoints of some names.

    Args:
        folder: Of all runs of an experiment, or of one.
        names: Of the files.
        below: Pattern of the folders that hold them.
    """
    written = []
    for rank, name in enumerate(names):
        for path in folder.glob(f"{below}/{name}"):
            written.append(Written(path.stat().st_mtime, rank, path.relative_to(folder).as_posix()))
    return written
