"""Everything that a run folder holds, read as far as it is there."""

import csv
import io
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from lit_data.commands.reports.curves import Log, read_log
from lit_data.commands.reports.journal import RunLog, read_journal
from lit_data.commands.reports.pictures import Picture, read_pictures
from lit_data.commands.reports.settings import Settings, flatten, read_settings
from lit_data.commands.reports.units import find_direction
from lit_data.commands.reports.untrusted import Masker, parse_json, read_text

Status = Literal["done", "failed", "unfinished"]

_FAILED: Final = ("failed", "out of memory", "killed", "interrupted")
_MOST_TEXTS: Final = 5
_MOST_CHARACTERS: Final = 20_000
_SAME_ON_A_CPU: Final = (
    "memory/allocated_bytes",
    "memory/peak_allocated_bytes",
    "memory/peak_bytes",
    "memory/peak_reserved_bytes",
    "memory/reserved_bytes",
)
"""Figures of a device's memory: on a CPU they are those of the resident memory again."""


@dataclass(frozen=True)
class Run:
    """A run; what its folder lacks is empty.

    Attributes:
        folder: Of the run.
        number: Its place on the page, from 1.
        label: A short name that no other run of the page has.
        settings: Configuration and command line.
        summary: summary.json; none if the run did not come to its end.
        log: What the CSV logger wrote.
        journal: The text log.
        splits: splits.csv: split and class (empty if unknown) of each image.
        confusion: confusion.json: classes, and for ``val`` and ``test`` a row for each true class.
        loaders: loader.json: the workers of each stage and why.
        machine: machine.json: processor, device and versions.
        post_mortems: Name and text of each file on what held the memory when it ran out.
        notes: Sentences on what is missing or damaged.
        failure: Why the run failed, as far as that was recorded.
        written_s: Unix time at which something in it changed last.
        pictures: Scaled down.
    """

    folder: Path
    number: int
    label: str
    settings: Settings
    summary: Mapping[str, Any] | None
    log: Log
    journal: RunLog
    splits: tuple[tuple[str, str], ...]
    confusion: Mapping[str, Any]
    loaders: Mapping[str, Any]
    machine: Mapping[str, Any]
    post_mortems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    failure: str
    written_s: float
    pictures: tuple[Picture, ...] = ()

    @property
    def anchor(self) -> str:
        """Name of its section in the page."""
        return f"run-{self.number}"

    @property
    def status(self) -> Status:
        """State of the run; ``unfinished``: broken off, or still running."""
        if self.summary is not None:
            return "done"
        return "failed" if self.failure else "unfinished"

    @property
    def values(self) -> Mapping[str, Any]:
        """Figures of the summary, each once: on a CPU memory has one name; empty without one."""
        summary = self.summary or {}
        return {name: value for name, value in summary.items() if not self.repeats(name)}

    @property
    def experiment(self) -> str:
        """Name of the experiment."""
        name = self.values.get("experiment") or self.settings.config.get("name")
        return str(name or self.folder.name)

    @property
    def command(self) -> str:
        """Command that wrote it."""
        return str(self.values.get("command") or self.settings.config.get("command") or "run")

    @property
    def limited_by(self) -> str:
        """Sentence on what limited the training."""
        return str(self.values.get("train/limited_by") or self.journal.limited_by)

    @property
    def zero_dice(self) -> list[str]:
        """Names of the Dice scores that are 0: no pixel of a defect was found."""
        return [name for name in ("val/dice", "test/dice") if self.values.get(name) == 0]

    @property
    def monitor(self) -> tuple[str, int]:
        """Metric that chose the best checkpoint, and 1 if more of it is better or -1 if less is."""
        leaves = flatten(self.settings.config.get("callbacks") or {})
        for key, value in leaves.items():
            if key.endswith(".monitor") and isinstance(value, str):
                mode = leaves.get(f"{key.removesuffix('monitor')}mode")  # of the same callback
                return value, {"max": 1, "min": -1}.get(str(mode), find_direction(value))
        return "", 0

    def repeats(self, name: str) -> bool:
        """Return True if a figure is the host's memory again under the name of a device's."""
        if name not in _SAME_ON_A_CPU:
            return False
        summary = self.summary or {}
        peaks = [summary.get(f"memory/peak_{kind}_bytes") for kind in ("allocated", "rss")]
        is_same = peaks[0] is not None and peaks[0] == peaks[1]
        return self.machine.get("device") == "cpu" or is_same


def read_run(folder: Path, number: int, label: str) -> Run:
    """Read a run folder, without its pictures.

    Args:
        folder: Of the run; any part of it may be missing or damaged.
        number: Its place on the page.
        label: A short name.
    """
    notes: list[str] = []
    masker = Masker()
    settings = read_settings(folder, masker, notes)  # first: the masker learns its secrets
    summary = _read_json(folder / "summary.json", masker, notes)
    journal = read_journal(folder, masker, notes)
    # With a summary the run came to its end, whatever an earlier start in its folder left.
    failure = ""
    if not summary:
        failure = _find_failure(folder, masker, notes) or journal.last_error
    return Run(
        folder=folder,
        number=number,
        label=label,
        settings=settings,
        summary=summary or None,
        log=read_log(folder, notes),
        journal=journal,
        splits=tuple(_read_splits(folder, notes)),
        confusion=_read_json(folder / "confusion.json", masker, notes),
        loaders=_read_json(folder / "loader.json", masker, notes),
        machine=_read_json(folder / "machine.json", masker, notes),
        post_mortems=tuple(_read_texts(folder, masker)),
        notes=tuple(masker.mask_text(note) for note in notes),
        failure=failure,
        written_s=_find_last_change(folder),
    )


def add_pictures(run: Run, width_px: int) -> Run:
    """Return the run with its pictures.

    Args:
        run: Without.
        width_px: What is wider is scaled down; 0 leaves all of them out.
    """
    notes = list(run.notes)
    pictures = tuple(read_pictures(run.folder, notes, width_px=width_px))
    return replace(run, pictures=pictures, notes=tuple(notes))


def describe_age(written_s: float, now_s: float | None = None) -> str:
    """Return when something was written, in local time and in words."""
    now_s = time.time() if now_s is None else now_s
    ago_s = max(0.0, now_s - written_s)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    for unit_s, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if ago_s >= 2 * unit_s:
            return f"{when}, {ago_s / unit_s:.0f} {unit} before this page was written"
    return f"{when}, {ago_s:.0f} seconds before this page was written"


def _read_json(path: Path, masker: Masker, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    try:
        content = parse_json(read_text(path.parent, path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} is not an object of JSON")
        return {}
    masked: dict[str, Any] = masker.mask_tree(content)
    return masked


def _read_splits(folder: Path, notes: list[str]) -> list[tuple[str, str]]:
    try:
        text = read_text(folder, folder / "splits.csv")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except FileNotFoundError:
        return []
    except (OSError, csv.Error) as error:
        notes.append(f"splits.csv cannot be read: {error}")
        return []
    return [(str(row.get("split") or ""), str(row.get("class") or "")) for row in rows]


def _find_failure(folder: Path, masker: Masker, notes: list[str]) -> str:
    """Return why a run failed, from its own record or from that of its sweep."""
    for name in ("job.json", "failure.json"):
        record = _read_json(folder / name, masker, notes)
        if record.get("status") in _FAILED:
            reason = str(record.get("reason") or "no reason is on record")
            return reason if record["status"] == "failed" else f"{record['status']}: {reason}"
    return ""


def _read_texts(folder: Path, masker: Masker) -> list[tuple[str, str]]:
    texts = []
    for path in sorted(folder.glob("oom-*.txt"))[:_MOST_TEXTS]:
        with suppress(OSError):
            text = read_text(folder, path)[:_MOST_CHARACTERS]
            texts.append((path.name, masker.mask_text(text)))
    return texts


def _find_last_change(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        if path.exists():  # a broken link does not
            times.append(path.stat().st_mtime)
    return max(times)
