"""Every error that lit_data raises on purpose, and the exit code each one gives the command line.

Each class takes one string that holds all a user needs: what is wrong, with which file or option, what was found, what
is allowed, what to do. One string only, and defined at module level, because torch rebuilds the exception of a worker
as ``type(text)``; a class that cannot be rebuilt so hangs the loader (pytorch/pytorch#142884).
"""

import os
from typing import ClassVar


class LitDataError(Exception):
    """Base of all errors a user can act on."""

    exit_code: ClassVar[int] = 1


class ConfigError(LitDataError, ValueError):
    """A wrong option, an unknown key or a refused ``_target_``."""

    exit_code = 2


class DataError(LitDataError):
    """An image, mask, label or path of the user is bad."""

    exit_code = 3


class MachineError(LitDataError):
    """A file cannot be read now, and it is the machine or a disk in the network that cannot: nothing is said of it."""

    exit_code = 4


class StoreError(LitDataError):
    """Base of everything that is wrong with a decoded store or another file written by lit_data."""

    exit_code = 4


class StoreCorruptError(StoreError):
    """The store's bytes are not what its header says."""


class StoreStaleError(StoreError):
    """The sources or the decode options changed since the store was built, and rebuilding is off."""


class StoreBusyError(StoreError):
    """Another process held the store's lock for longer than the stated wait."""


class StoreSpaceError(StoreError):
    """The disk has no room for the store."""


class BatchMemoryError(LitDataError):
    """A batch does not fit into memory even with one sample."""

    exit_code = 5


class WorkerDiedError(LitDataError):
    """A worker died, hung past its timeout or could not report its own error."""

    exit_code = 6


class RankMismatchError(LitDataError):
    """The ranks disagree about the work to do."""

    exit_code = 6


SHOWN = 100
"""How many problems one message lists; the rest is counted."""


def escape(text: str) -> str:
    """Show control characters, line breaks and undecodable bytes as escapes, so that a text prints anywhere."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape_character(c) for c in text)


def show_path(path: str | os.PathLike[str]) -> str:
    """A path for a message: bytes that are not UTF-8 and control characters are shown as escapes.

    Args:
        path: Any path, also one that ``os.fsdecode`` gave for a name that is not UTF-8.
    """
    return escape(os.fspath(path))


class Problems:
    """A list of (path, what is wrong) that becomes one ``DataError`` or a report of what was skipped."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, path: str | os.PathLike[str], message: str) -> None:
        """Note one problem; a message that already starts with its path is not prefixed again."""
        self._entries.append((os.fspath(path), message))

    def extend(self, others: "Problems") -> None:
        """Note the problems of another list after those of this one."""
        self._entries += others._entries

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """(path, what is wrong) in the order they were added."""
        return tuple(self._entries)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The paths with a problem, each once, in the order they were added."""
        return tuple(dict.fromkeys(path for path, _ in self._entries))

    def report(self) -> str:
        """All problems, one a line."""
        return "\n".join(self._lines())

    def describe(self, what: str) -> str:
        """A heading, such as ``"3 of 10 images are bad"``, with the first 100 problems and the number of the rest."""
        lines = self._lines()
        more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        return "\n  ".join([f"{what}:", *lines[:SHOWN], *more])

    def raise_if_any(self, what: str) -> None:
        """Raise one error for all problems.

        Raises:
            DataError: There is a problem, see `describe`.
        """
        if self._entries:
            raise DataError(self.describe(what))

    def _lines(self) -> list[str]:
        return [_join(show_path(path), message) for path, message in self._entries]


def _join(shown: str, message: str) -> str:
    return message if message.startswith(shown) else f"{shown}: {message}"


def _escape_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how os.fsdecode carries a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
