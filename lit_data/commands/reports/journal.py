"""What happened in a run, from its log."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lit_data.commands.reports.untrusted import Masker, open_inside

_LINE: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)$"
)
_MOST_BYTES: Final = 4 * 2**20
_MOST_CHARACTERS: Final = 4000
_KINDS: Final = (
    (
        "out of memory",
        re.compile(r"out of memory|OutOfMemory|does not fit into memory|needed cached memory back"),
    ),
    ("precision", re.compile(r"^AMP: |loss scale|precision")),
    ("memory", re.compile(r"memory grows|EmptyCache")),
    ("batch size", re.compile(r"^batch size \d|samples at once")),
    ("stop", re.compile(r"SIG(TERM|INT|USR)|stopped after step")),
    ("loader", re.compile(r"^(loader|defects): |worker")),
)
_LIMITED: Final = "DataWaitMonitor: "


@dataclass(frozen=True)
class LogEntry:
    """A line of the log, with the lines below it that belong to it.

    Attributes:
        time: Date and time as logged.
        level: ``INFO`` and so on.
        source: Name of the logger.
        text: Without secrets.
    """

    time: str
    level: str
    source: str
    text: str

    @property
    def kind(self) -> str:
        """What it is about."""
        found = next((kind for kind, pattern in _KINDS if pattern.search(self.text)), "")
        return found or ("error" if self.level in ("ERROR", "CRITICAL") else "warning")


@dataclass(frozen=True)
class RunLog:
    """The log of a run.

    Attributes:
        entries: In the order of the file.
    """

    entries: tuple[LogEntry, ...] = ()

    @property
    def began(self) -> str:
        """Date and time of the first line."""
        return self.entries[0].time if self.entries else ""

    @property
    def ended(self) -> str:
        """Date and time of the last line."""
        return self.entries[-1].time if self.entries else ""

    @property
    def limited_by(self) -> str:
        """What limited the training, as `DataWaitMonitor` said last; empty if it did not."""
        texts = [entry.text for entry in self.entries if entry.text.startswith(_LIMITED)]
        return texts[-1].removeprefix(_LIMITED) if texts else ""

    @property
    def events(self) -> list[LogEntry]:
        """Warnings and errors, sizes that moved, and the choice of loaders and workers."""
        return [
            entry
            for entry in self.entries
            if entry.level not in ("DEBUG", "INFO") or entry.kind in ("batch size", "stop")
        ]

    @property
    def last_error(self) -> str:
        """The last error that was logged; empty if none was."""
        return next(
            (
                entry.text
                for entry in reversed(self.entries)
                if entry.level in ("ERROR", "CRITICAL")
            ),
            "",
        )


def read_journal(folder: Path, masker: Masker, notes: list[str]) -> RunLog:
    """Read the newest log of a run folder, of a long one its begin and its end.

    Args:
        folder: Of the run.
        masker: That of the run.
        notes: Gets a sentence if something is left out.
    """
    paths = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return RunLog()
    try:
        lines = _read_ends(folder, paths[-1], notes)
    except OSError as error:
        notes.append(f"{paths[-1].name} cannot be read: {error.strerror}")
        return RunLog()
    return RunLog(tuple(_read_entries(lines, masker)))


def _read_ends(folder: Path, path: Path, notes: list[str]) -> list[str]:
    size_bytes = path.stat().st_size
    with open_inside(folder, path, most_bytes=sys.maxsize) as file:
        if size_bytes <= 2 * _MOST_BYTES:
            content = file.read()
        else:
            notes.append(
                f"{path.name} has {size_bytes / 2**20:.0f} MiB: only its begin and its end are read"
            )
            begin = file.read(_MOST_BYTES)
            file.seek(-_MOST_BYTES, 2)
            content = begin + b"\n" + file.read()
        return content.decode("utf-8", "replace").splitlines()


def _read_entries(lines: Iterable[str], masker: Masker) -> Iterator[LogEntry]:
    entry: LogEntry | None = None
    for line in lines:
        found = _LINE.match(line)
        if found:
            if entry is not None:
                yield entry
            entry = LogEntry(
                found[1], found[2], found[3], masker.mask_text(found[4][:_MOST_CHARACTERS])
            )
        elif entry is not None and line.strip() and len(entry.text) < _MOST_CHARACTERS:
            entry = replace(
                entry, text=f"{entry.text}\n{masker.mask_text(line)}"[:_MOST_CHARACTERS]
            )
    if entry is not None:
        yield entry
