"""The text log of a run: when it began, what limited it, and what went wrong."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lit_data.commands.reports.untrusted import Masker, open_inside

_LINE: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)$"
)
_MOST_BYTES: Final = 4 * 2**20  # of the begin of a log and of its end
_MOST_CHARACTERS: Final = 4000
_MOST_WARNINGS: Final = 100
_LIMITED: Final = "DataWaitMonitor: "


@dataclass
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
    def is_error(self) -> bool:
        """Return True if something failed."""
        return self.level in ("ERROR", "CRITICAL")


@dataclass
class RunLog:
    """The log of a run.

    Attributes:
        began: Date and time of the first line; empty without a log.
        limited_by: What limited the training, as `DataWaitMonitor` said last.
        warnings: Warnings and errors in the order of the file, the last 100.
    """

    began: str = ""
    limited_by: str = ""
    warnings: list[LogEntry] = field(default_factory=list)

    @property
    def last_error(self) -> str:
        """The last error that was logged; empty if none was."""
        errors = [entry.text for entry in self.warnings if entry.is_error]
        return errors[-1] if errors else ""


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
    return _sum_up(_read_entries(lines, masker))


def _sum_up(entries: list[LogEntry]) -> RunLog:
    journal = RunLog()
    if entries:
        journal.began = entries[0].time
    for entry in entries:
        if entry.level not in ("DEBUG", "INFO"):
            journal.warnings.append(entry)
        if entry.text.startswith(_LIMITED):
            journal.limited_by = entry.text.removeprefix(_LIMITED)
    journal.warnings = journal.warnings[-_MOST_WARNINGS:]
    return journal


def _read_ends(folder: Path, path: Path, notes: list[str]) -> list[str]:
    size_bytes = path.stat().st_size
    with open_inside(folder, path, most_bytes=sys.maxsize) as file:
        if size_bytes <= 2 * _MOST_BYTES:
            content = file.read()
        else:
            size = f"{size_bytes / 2**20:.0f} MiB"
            notes.append(f"{path.name} has {size}: only its begin and its end are read")
            begin = file.read(_MOST_BYTES)
            file.seek(-_MOST_BYTES, 2)
            content = begin + b"\n" + file.read()  # the lines at the cut are no whole ones
        return content.decode("utf-8", "replace").splitlines()


def _read_entries(lines: Iterable[str], masker: Masker) -> list[LogEntry]:
    entries: list[LogEntry] = []
    for line in lines:
        match = _LINE.match(line)
        if match:  # other lines belong to the one above, such as those of a traceback
            text = masker.mask_text(match[4][:_MOST_CHARACTERS])
            entries.append(LogEntry(match[1], match[2], match[3], text))
        elif entries and line.strip() and len(entries[-1].text) < _MOST_CHARACTERS:
            longer = f"{entries[-1].text}\n{masker.mask_text(line)}"
            entries[-1].text = longer[:_MOST_CHARACTERS]
    return entries
