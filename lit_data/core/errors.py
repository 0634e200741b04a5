"""All errors that lit_data raises on purpose, with their exit codes for the command line.

Each class takes one string with everything a user needs: what is wrong, with which file or option,
what was found, what is allowed, and what to do. There is only one string, and classes are defined
at module level, because torch rebuilds the exception of a worker as ``type(text)``; a class that
cannot be rebuilt so hangs the loader (pytorch/pytorch#142884).
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import lit_inspect.errors
from lit_inspect.counts import counted

escape = lit_inspect.errors.escape
"""Escapes for control characters, line breaks and undecodable bytes of a text."""

_CAUSES = 5  # so that a message fits into one screen of 100 x 30
_NAMES = 3
_CHARACTERS = 1000  # of all causes
_MOST_NAMES = 20
_LONGEST_LINE = 200
_CURE = re.compile(r"; (?=[^;]*\bdata\.[a-z_])")
_VALUES = re.compile(r"'[^']*'|\S*/\S*|\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*")


class LitDataError(Exception):
    """Base of all errors a user can act on.

    Attributes:
        problems: (path, what is wrong) of every bad file, even if the text shows only some.
    """

    exit_code: ClassVar[int] = 1
    problems: tuple[tuple[str, str], ...] = ()

    @property
    def headline(self) -> str:
        """Line that states what is wrong; details above it are indented."""
        return find_headline(str(self))


class ConfigError(LitDataError, ValueError):
    """Error of a wrong option, an unknown key or a refused ``_target_``."""

    exit_code = 2


class DataError(LitDataError):
    """Error of a bad image, mask, label or path of the user."""

    exit_code = 3


class MachineError(LitDataError):
    """Error of a machine or a network disk that cannot read now; the file may be good."""

    exit_code = 4


class StoreError(LitDataError):
    """Base of errors of a decoded store, or of another file written by lit_data."""

    exit_code = 4


class StoreCorruptError(StoreError):
    """Error of a store whose bytes do not match its header."""


class StoreStaleError(StoreError):
    """Error of a store whose sources or decode options changed, if rebuilding is off."""


class StoreBusyError(StoreError):
    """Error of a store whose lock another process held for longer than the stated wait."""


class StoreSpaceError(StoreError):
    """Error of a disk without enough space for the store."""


class BatchMemoryError(LitDataError):
    """Error of a batch that does not fit into memory even with one sample."""

    exit_code = 5


class WorkerDiedError(LitDataError):
    """Error of a worker that died, hung past its timeout or could not report its own error."""

    exit_code = 6


class RankMismatchError(LitDataError):
    """Error of ranks that disagree about the work to do."""

    exit_code = 6


def list_some(names: Sequence[object]) -> str:
    """Return the first few names, for a message that may be one of many."""
    return list_first(names, _MOST_NAMES)


def list_first(names: Sequence[object], count: int = 4) -> str:
    """Return the first names, and the number of further ones."""
    text = ", ".join(escape(str(name)) for name in names[:count])
    more = len(names) - count
    return f"{text} and {more} more" if more > 0 else text


def first_line(error: BaseException) -> str:
    """Return the first line of the error of a library, or its class if it has no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_LONGEST_LINE]


def causes_of(
    error: BaseException | None, *, contexts: Literal["none", "shown", "all"] = "none"
) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from, the last one first.

    Args:
        error: The last error; None yields nothing.
        contexts: Also yield errors that were being handled when it was raised; `shown` leaves out
            those that ``from None`` hides.
    """
    seen: set[int] = set()  # causes may form a ring
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        has_context = contexts == "all" or (contexts == "shown" and not error.__suppress_context__)
        error = error.__cause__ or (error.__context__ if has_context else None)


def show_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message, with control characters and bytes that are not UTF-8 as escapes.

    Args:
        path: Any path, including one from ``os.fsdecode`` for a name that is not UTF-8.
    """
    return escape(os.fspath(path))


class Problems:
    """Faults of files, which become one ``DataError`` or a report of skipped files."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, path: str | os.PathLike[str], message: str) -> None:
        """Add one problem; a message that already starts with its path is not prefixed again."""
        self._entries.append((os.fspath(path), message))

    def extend(self, others: "Problems") -> None:
        """Append the problems of another list."""
        self._entries += others._entries

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """(path, what is wrong) of each problem, in the order of addition."""
        return tuple(self._entries)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Paths with a problem, each once, in the order of addition."""
        return tuple(dict.fromkeys(path for path, _ in self._entries))

    def report(self) -> str:
        """Return all problems, one per line."""
        return "\n".join(_join(path, message) for path, message in self._entries)

    def describe(self, what: str, cure: str = "") -> str:
        """List the causes, each with a count and at most three names.

        The last lines are the headline and the advice.

        Args:
            what: The headline, such as ``"3 of 10 images are bad"``.
            cure: Advice for any cause.
        """
        # Lists the most frequent causes, and all of their cures.
        groups = self._group()
        named, others = groups[:_CAUSES], groups[_CAUSES:]
        longest = _CHARACTERS // max(1, len(named))
        details: list[str] = []
        for group in named:
            details += _describe_group(group, longest)
        if others:
            causes = counted(len(others), "other cause")
            details.append(f"{sum(map(len, others))} more with {causes}")
        advice = _list_cures(named, has_counts=len(groups) > 1 and len(self) > _CAUSES)
        if cure:
            advice.append(cure)
        headline = f"{what}:" if advice else what
        return "\n".join([*_indent(details), headline, *_indent(advice)])

    def make_error(self, what: str, cure: str = "") -> DataError:
        """Make one error for all problems, with the problems attached; see `describe`."""
        error = DataError(self.describe(what, cure))
        error.problems = self.entries
        return error

    def raise_if_any(self, what: str, cure: str = "") -> None:
        """Raise one error for all problems.

        Raises:
            DataError: There are problems, see `describe`.
        """
        if self._entries:
            raise self.make_error(what, cure)

    def warn_if_any(self, log: logging.Logger, what: str) -> None:
        """Log one warning for all problems; commands also list them in a file."""
        if self._entries:
            log.warning("%s", self.describe(what), extra={"problems": self.entries})

    def _group(self) -> list[list[tuple[str, str]]]:
        """Group the problems by cause, the largest group first.

        A cause is a message without paths, numbers and values. A few problems are not grouped.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        are_few = len(self) <= _CAUSES
        for path, message in self._entries:
            name = show_path(path)
            text = escape(message).removeprefix(f"{name}: ")
            cause = f"{name}: {text}" if are_few else _VALUES.sub("*", text)
            groups.setdefault(cause, []).append((name, text))
        return sorted(groups.values(), key=len, reverse=True)


def list_problems(entries: Sequence[tuple[str, str]]) -> Problems:
    """Return `Problems` of (path, what is wrong)."""
    problems = Problems()
    problems._entries += entries
    return problems


def find_headline(text: str) -> str:
    """Return the first line of a message that is not indented; details above it are."""
    lines = text.strip("\n").splitlines()
    for line in lines:
        if line.strip() and not line.startswith(" "):
            return line
    return lines[0].strip() if lines else ""


def settle_lines(text: str) -> str:
    """Escape a message for a terminal or a log.

    The result has no control characters, and only one line that is not indented, so that a name
    with a line break cannot look like a line of the program.
    """
    lines = []
    has_head = False
    for line in map(escape, text.split("\n")):
        is_indented = line.startswith(" ")
        if has_head and line and not is_indented:
            line = f"  {line}"
        has_head = has_head or (bool(line) and not is_indented)
        lines.append(line)
    return "\n".join(lines)


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _describe_group(group: Sequence[tuple[str, str]], longest: int) -> list[str]:
    first, message = group[0]
    cause, _ = _split(message)
    if len(cause) > longest:
        cause = f"{cause[:longest]}..."
    if len(group) == 1:
        return [_join(first, cause)]
    paths = list(dict.fromkeys(path for path, _ in group))
    # The folder of the first path is not repeated for the others.
    folder = first[: first.rfind("/") + 1]
    names = [first, *(path.removeprefix(folder) for path in paths[1:_NAMES])]
    listed = ", ".join(names)
    if len(paths) > _NAMES:
        listed += f" and {len(paths) - _NAMES} more"
    return [f"{len(group)} times, such as: {cause}", f"  {listed}"]


def _list_cures(groups: Sequence[Sequence[tuple[str, str]]], *, has_counts: bool) -> list[str]:
    """List the cures of groups, each once, with the number of its files."""
    counts: dict[str, int] = {}
    for group in groups:
        cure = max((_split(message)[1] for _, message in group), key=_numbers)
        if cure:
            counts[cure] = counts.get(cure, 0) + len(group)
    if not has_counts:
        return list(counts)
    return [f"for {count}: {cure}" for cure, count in counts.items()]


def _split(message: str) -> tuple[str, str]:
    """Split a message into the cause, and the cure if it names a key."""
    cause, *cures = _CURE.split(message, maxsplit=1)
    return cause, cures[0] if cures else ""


def _numbers(text: str) -> tuple[bool, list[int]]:
    """Return the sort key of a cure: of ``classes=3`` and ``classes=5``, the larger one suits all files."""
    return bool(text), [int(number) for number in re.findall(r"\d{1,9}", text)]


def _join(path: str, message: str) -> str:
    name, text = show_path(path), escape(message)
    return text if text.startswith(name) else f"{name}: {text}"
