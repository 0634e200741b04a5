"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

from dataclasses import dataclass
from typing import Final, Literal

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
