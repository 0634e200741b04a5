"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from lit_data.errors import ConfigError, LitDataError

Level = Literal["ok", "note", "warning", "fault"]

LEVELS: Final[tuple[Level, ...]] = ("fault", "warning", "note", "ok")
"""The worst first: a fault stops runs, a warning slows them or ends them one day, a note may be
meant so."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: How bad it is.
        what: The thing, in a word or two.
        found: How it is, with units.
        remedy: What to do; empty where all is well.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""


def judge(what: str, state: str, *, bad: bool, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of `level` with its remedy if something is bad, else one that all is well.

    Args:
        what: The thing that was looked at.
        state: How it is, with units.
        bad: It is not as it should be.
        remedy: What to do then.
        level: Of the finding then.
    """
    if bad:
        return Finding(level, what, state, remedy)
    return Finding("ok", what, state)


def to_gib(size_bytes: float) -> str:
    """Format bytes for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def describe_torchvision(error: Exception) -> tuple[str, str]:
    """Describe a torchvision that cannot be imported.

    Args:
        error: That its import raised.

    Returns:
        How it is, and the remedy.
    """
    torch_version = _find_version("torch")
    torchvision_version = _find_version("torchvision")
    build = (torch_version or "").partition("+")[2]  # such as cpu or cu128
    index = f", both from PyTorch's index of {build} builds (--index-url)" if build else ""
    cause = " ".join(str(error).split())
    pinned = f"torch=={torch_version}" if torch_version else "torch"
    return (
        f"torch {torch_version or '(version unknown)'} and torchvision "
        f"{torchvision_version or '(version unknown)'} are not of one build "
        f"({type(error).__name__}: {cause[:200]})",
        f"pip uninstall -y torchvision; pip install {pinned} torchvision{index}",
    )


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def naming_unfit_torchvision() -> Iterator[None]:
    """Turn an error of the import of a torchvision of another build into one line.

    Lightning, torchmetrics and others import it.

    Raises:
        ConfigError: An error was raised while torchvision was imported.
    """
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        if any(_is_from_torchvision(cause) for cause in _list_causes(error)):
            raise ConfigError(": ".join(describe_torchvision(error))) from error
        raise


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_from_torchvision(error: BaseException) -> bool:
    """Return True if the error was raised while a module of torchvision was imported."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "torchvision" and frame.f_code.co_name == "<module>":
            return True
    return False
