"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from lit_data.errors import ConfigError, LitDataError

Level = Literal["ok", "note", "warning", "fault"]

LEVELS: Final[tuple[Level, ...]] = ("fault", "warning", "note", "ok")
"""The worst first: a fault stops runs, a warning slows them or ends them one day, a note may be meant so."""


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


def judge(what: str, found: str, *, bad: bool, remedy: str, level: Level = "warning") -> Finding:
    """A finding of `level` with its remedy if something is bad, else one that all is well."""
    return Finding(level, what, found, remedy) if bad else Finding("ok", what, found)


def to_gib(size_bytes: float) -> str:
    """Bytes for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def describe_torchvision(error: Exception) -> tuple[str, str]:
    """What is said of a torchvision that cannot be imported: what was found, and the cure.

    Args:
        error: That its import raised.
    """
    versions = {}
    for name in ("torch", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    torch = versions.get("torch", "")
    build = torch.partition("+")[2]
    index = f", both from PyTorch's index of {build} builds (--index-url)" if build else ""
    shown = " and ".join(
        f"{name} {versions.get(name, '(version unknown)')}" for name in ("torch", "torchvision")
    )
    cause = " ".join(str(error).split())
    pinned = f"torch=={torch}" if torch else "torch"
    return (
        f"{shown} are not of one build ({type(error).__name__}: {cause[:200]})",
        f"pip uninstall -y torchvision; pip install {pinned} torchvision{index}",
    )


@contextmanager
def naming_unfit_torchvision() -> Iterator[None]:
    """Turn whatever the import of a torchvision of another build ends in into one line.

    Lightning, torchmetrics and others import it.

    Raises:
        ConfigError: An error was raised while torchvision was imported.
    """
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        if any(map(_is_from_torchvision, _chain(error))):
            raise ConfigError(": ".join(describe_torchvision(error))) from error
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_from_torchvision(error: BaseException) -> bool:
    """Whether the error was raised while a module of torchvision was imported."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_code.co_name == "<module>"
        and str(frame.f_globals.get("__name__")).partition(".")[0] == "torchvision"
        for frame in frames
    )
