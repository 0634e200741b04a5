"""Everything that a run folder holds, read as far as it is there."""

import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_data.app.quality import Evidence, Verdict, describe_threshold, judge
from lit_data.app.reports.log import Log, read_log
from lit_data.app.reports.pictures import Picture
from lit_data.app.result import FAILURE, find_direction, find_monitor, read_number
from lit_data.app.run_folder import SPLIT_TABLE
from lit_data.app.untrusted import (
    Masker,
    as_dict,
    find_config_dir,
    load,
    open_inside,
    parse_csv,
    read_text,
)
from lit_data.core.files import flatten
from lit_data.core.plain import parse_json, parse_yaml
from lit_inspect.counts import counted

State = Literal["done", "failed", "unfinished"]

_FAILED = ("failed", "out of memory", "killed", "interrupted")
_MOST_TEXTS = 5
_MOST_CHARACTERS = 20_000
_SAME_ON_A_CPU = (
    "memory/allocated_bytes",
    "memory/peak_allocated_bytes",
    "memory/peak_bytes",
    "memory/peak_reserved_bytes",
    "memory/reserved_bytes",
)
"""Figures of a device's memory: on a CPU they are those of the resident memory again."""

_LEAST_F1 = 0.02  # of pixels
_REFERENCE = re.compile(r"\$\{((?:hydra:)?[\w.]+)\}")
_DEEPEST_REFERENCE = 3
_MOST_REFERENCES = 1000
_MOST_IN_A_TEXT = 20

_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)$"
)
_MOST_LOG_BYTES = 4 * 2**20  # of the begin of a log and of its end
_MOST_ENTRY_CHARACTERS = 4000
_MOST_READ_CHARACTERS = 8000  # so that no secret that is shown is cut, and not known as one
_MOST_WARNINGS = 100
_LIMITED = "DataWaitMonitor: "
_STOPPED = re.compile(r"SIG[A-Z]+: stopped after step ")


@dataclass(frozen=True)
class Settings:
    """Configuration and command line of a run, without secrets.

    Attributes:
        config: The configuration with references within it filled in. Environment variables stay as
            they were written: their values now need not be those of then.
        overrides: Of the command line.
        choices: The option chosen of each group.
        command_line: The one that would start the run again.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    command_line: str = ""


@dataclass
class LogEntry:
    """A line of the log, with the lines below it that belong to it.

    Attributes:
        time: Date and time as logged.
        level: ``INFO`` and so on.
        text: Without secrets.
    """

    time: str
    level: str
    text: str


@dataclass
class RunLog:
    """The log of a run.

    Attributes:
        began: Date and time of the first line; empty without a log.
        limited_by: Cause that limited the training, as `DataWaitMonitor` said last.
        warnings: Warnings and errors in the order of the file, the last 100.
    """

    began: str = ""
    limited_by: str = ""
    warnings: list[LogEntry] = field(default_factory=list)

    @property
    def stop(self) -> str:
        """The line on a signal that stopped the training; empty if there is none."""
        for entry in reversed(self.warnings):
            if _STOPPED.match(entry.text):
                return entry.text
        return ""

    @property
    def last_error(self) -> str:
        """The last error that was logged; empty if none was."""
        for entry in reversed(self.warnings):
            if entry.level in ("ERROR", "CRITICAL"):
                return entry.text
        return ""


@dataclass(frozen=True)
class Run:
    """A run; what its folder lacks is empty.

    Attributes:
        folder: Of the run.
        label: A short name that no other run of the page has.
        settings: Configuration and command line.
        summary: summary.json; none if the run did not come to its end.
        log: What the CSV logger wrote.
        journal: The text log.
        splits: splits.csv: split and class (empty if unknown) of each image.
        confusion: confusion.json: classes, and for ``val`` and ``test`` a row for each true class.
        curves: curves.json: precision over recall, and scores of images, by ``val`` and ``test``.
        detection: pod.json: sizes of defects that are found.
        loaders: loader.json: the workers of each stage and why.
        machine: machine.json: processor, device and versions.
        post_mortems: Name and text of each file on what held the memory when it ran out.
        notes: Sentences on what is missing or damaged.
        failure: Why the run failed, as far as that was recorded.
        written_s: Unix time at which something in it changed last.
        pictures: Scaled down.
    """

    folder: Path
    label: str
    settings: Settings
    summary: Mapping[str, Any] | None
    log: Log
    journal: RunLog
    splits: tuple[tuple[str, str], ...]
    confusion: Mapping[str, Any]
    curves: Mapping[str, Any]
    detection: Mapping[str, Any]
    loaders: Mapping[str, Any]
    machine: Mapping[str, Any]
    post_mortems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    failure: str
    written_s: float
    pictures: tuple[Picture, ...] = ()

    @property
    def status(self) -> State:
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
    def verdict(self) -> Verdict:
        """Judgement of the model."""
        return judge(Evidence(self.values, self.confusion, self.splits, self.settings.config))

    @property
    def threshold(self) -> str:
        """Return a line on how sure the threshold is; empty where no images chose it."""
        return describe_threshold(self.values)

    @property
    def zero_dice(self) -> list[str]:
        """Names of the Dice scores that are 0, but where another threshold finds pixels of defects."""
        names = []
        for stage in ("val", "test"):
            f1 = read_number(self.values, f"{stage}/f1_max")
            if self.values.get(f"{stage}/dice") == 0 and (f1 is None or f1 < _LEAST_F1):
                names.append(f"{stage}/dice")
        return names

    @property
    def monitor(self) -> tuple[str, int]:
        """Metric that chose the best checkpoint, and 1 if more of it is better or -1 if less is."""
        metric, mode = find_monitor(as_dict(self.settings.config.get("callbacks")))
        if metric is None:
            return "", 0
        signs = {"max": 1, "min": -1, None: find_direction(metric)}
        return metric, signs[mode]

    @property
    def scored_images(self) -> tuple[str, tuple[str, ...]]:
        """Root of the images and the split of each: figures of others are not of the same images."""
        root = str(as_dict(self.settings.config.get("data")).get("root"))
        return root.rstrip("/"), tuple(split for split, _ in self.splits)

    def repeats(self, name: str) -> bool:
        """Return True if a figure is the host's memory again under the name of a device's."""
        if name not in _SAME_ON_A_CPU:
            return False
        summary = self.summary or {}
        peaks = [summary.get(f"memory/peak_{kind}_bytes") for kind in ("allocated", "rss")]
        is_same = peaks[0] is not None and peaks[0] == peaks[1]
        return self.machine.get("device") == "cpu" or is_same


def read_run(folder: Path, label: str = "") -> Run:
    """Read a run folder, without its pictures.

    Args:
        folder: Of the run; any part of it may be missing or damaged.
        number: Its position on the page.
        label: A short name.
    """
    notes: list[str] = []
    masker = Masker()
    settings = read_settings(folder, masker, notes)  # first: the masker learns its secrets
    summary = _read_json(folder, "summary.json", masker, notes)
    journal = read_journal(folder, masker, notes)
    # With a summary the run came to its end, whatever an earlier start in its folder left.
    failure = ""
    if not summary:
        failure = _find_failure(folder, masker, notes) or journal.last_error
    rows = load(folder, SPLIT_TABLE, parse_csv, notes) or []
    return Run(
        folder=folder,
        label=label,
        settings=settings,
        summary=summary or None,
        log=read_log(folder, notes),
        journal=journal,
        splits=tuple((str(row.get("split") or ""), str(row.get("class") or "")) for row in rows),
        confusion=_read_json(folder, "confusion.json", masker, notes),
        curves=_read_json(folder, "curves.json", masker, notes),
        detection=_read_json(folder, "pod.json", masker, notes),
        loaders=_read_json(folder, "loader.json", masker, notes),
        machine=_read_json(folder, "machine.json", masker, notes),
        post_mortems=tuple(_read_texts(folder, masker, notes)),
        notes=tuple(masker.mask_text(note) for note in notes),
        failure=failure,
        written_s=_find_last_change(folder),
    )


def describe_age(written_s: float, now_s: float | None = None) -> str:
    """Return when something was written, in local time and in words."""
    now_s = time.time() if now_s is None else now_s
    ago_s = max(0.0, now_s - written_s)
    age = counted(round(ago_s), "second")
    for unit_s, unit in ((60, "minutes"), (3600, "hours"), (86400, "days")):
        if ago_s >= 2 * unit_s:  # so the plural is right
            age = f"{ago_s / unit_s:.0f} {unit}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    return f"{when}, {age} before this page was written"


def _read_json(folder: Path, name: str, masker: Masker, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    content = load(folder, name, parse_json, notes)
    if content is not None and not isinstance(content, dict):
        notes.append(f"{name} is not a JSON object")
    masked: dict[str, Any] = masker.mask_tree(as_dict(content))
    return masked


def _find_failure(folder: Path, masker: Masker, notes: list[str]) -> str:
    """Return why a run failed, from the record of its sweep or from its own."""
    for name in ("job.json", FAILURE):
        record = _read_json(folder, name, masker, notes)
        if record.get("status") in _FAILED:
            reason = str(record.get("reason") or "no reason was recorded")
            return reason if record["status"] == "failed" else f"{record['status']}: {reason}"
    return ""


def _read_texts(folder: Path, masker: Masker, notes: list[str]) -> list[tuple[str, str]]:
    texts = []
    for path in sorted(folder.glob("oom-*.txt"))[:_MOST_TEXTS]:
        try:
            text = read_text(folder, path)[:_MOST_CHARACTERS]
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
        else:
            texts.append((path.name, masker.mask_text(text)))
    return texts


def _find_last_change(folder: Path) -> float:
    times_s = []
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        if path.exists():  # a broken link does not
            times_s.append(path.stat().st_mtime)
    return max(times_s)


def read_settings(folder: Path, masker: Masker, notes: list[str]) -> Settings:
    """Read ``.hydra``; what is missing or damaged is noted and left empty.

    Args:
        folder: Of the run.
        masker: It learns the secrets of this run.
        notes: Gets a sentence for each file that cannot be used.
    """
    config = _read_yaml(folder, "config", notes)
    hydra = as_dict(_read_yaml(folder, "hydra", notes).get("hydra"))
    # Learn before anything is shown: the same secret may stand in a reference or an override.
    masker.mask_tree(config)
    typed = as_dict(hydra.get("overrides")).get("task")
    overrides = []
    if isinstance(typed, list):
        overrides = [masker.mask_text(str(override)) for override in typed]
    choices = as_dict(as_dict(hydra.get("runtime")).get("choices"))
    line = ""
    if overrides or config:
        command = str(config.get("command", "fit"))
        start = ["lit-data", command, *find_config_dir(hydra)]
        line = shlex.join([*map(masker.mask_text, start), *overrides])
    return Settings(
        config=masker.mask_tree(_fill_references(config, hydra)),
        overrides=tuple(overrides),
        choices={str(group): str(option) for group, option in choices.items()},
        command_line=line,
    )


def _fill_references(config: dict[str, Any], hydra: dict[str, Any]) -> dict[str, Any]:
    """Fill in references to values, as deep as a configuration of ours has them.

    OmegaConf would ask the environment, and a hostile configuration refers to itself ten times over.
    """
    for _ in range(_DEEPEST_REFERENCE):
        values = flatten(config)
        values |= {f"hydra:{key}": value for key, value in flatten(hydra).items()}
        references = [value for value in values.values() if "${" in str(value)]
        if len(references) > _MOST_REFERENCES:
            break
        config = _replace_references(config, values)
    return config


def _replace_references(node: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - YAML data
    """Replace each reference once, but for those to lists and to what is unknown."""
    if isinstance(node, dict):
        return {key: _replace_references(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_replace_references(value, values) for value in node]
    if not isinstance(node, str):
        return node
    reference = _REFERENCE.fullmatch(node)  # which may stand for a number
    if reference:
        value = values.get(reference[1], node)
        return node if isinstance(value, list) else value
    text = _REFERENCE.sub(
        lambda match: str(values.get(match[1], match[0])), node, count=_MOST_IN_A_TEXT
    )
    return text[:_MOST_CHARACTERS]


def _read_yaml(folder: Path, name: str, notes: list[str]) -> dict[str, Any]:
    path = f".hydra/{name}.yaml"
    if not (folder / path).exists():
        notes.append(f"there is no {path}, so the configuration is not known")
    return as_dict(_shorten(load(folder, path, parse_yaml, notes)))


def _shorten(node: Any) -> Any:  # noqa: ANN401 - YAML data
    """Return a copy of plain data whose texts have a length that can be shown."""
    if isinstance(node, dict):
        return {_shorten(key): _shorten(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_shorten(value) for value in node]
    if not isinstance(node, str) or len(node) <= _MOST_CHARACTERS:
        return node
    return f"{node[:_MOST_CHARACTERS]}... ({len(node)} letters)"


def read_journal(folder: Path, masker: Masker, notes: list[str]) -> RunLog:
    """Read the newest text log of a run folder, of a long one its begin and its end.

    Args:
        folder: Of the run.
        masker: That of the run.
        notes: Gets a sentence if something is left out.
    """
    journal = RunLog()
    paths = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return journal
    try:
        lines = _read_ends(folder, paths[-1], notes)
    except OSError as error:
        notes.append(f"{paths[-1].name} cannot be read: {error.strerror}")
        return journal
    entries = _read_entries(lines)
    if entries:
        journal.began = entries[0].time
    for entry in entries:
        if entry.level not in ("DEBUG", "INFO"):
            journal.warnings.append(entry)
        if entry.text.startswith(_LIMITED):
            journal.limited_by = masker.mask_text(entry.text.removeprefix(_LIMITED))
    journal.warnings = journal.warnings[-_MOST_WARNINGS:]
    for entry in journal.warnings:
        entry.text = masker.mask_text(entry.text)[:_MOST_ENTRY_CHARACTERS]
    return journal


def _read_ends(folder: Path, path: Path, notes: list[str]) -> list[str]:
    size_bytes = path.stat().st_size
    with open_inside(folder, path, most_bytes=sys.maxsize) as file:
        content = file.read(2 * _MOST_LOG_BYTES)
        if size_bytes > len(content):
            size = f"{size_bytes / 2**20:.0f} MiB"
            notes.append(f"{path.name} has {size}: only its beginning and its end are read")
            file.seek(-_MOST_LOG_BYTES, 2)
            # The lines at the cut are no whole ones.
            content = content[:_MOST_LOG_BYTES] + b"\n" + file.read(_MOST_LOG_BYTES)
    return content.decode("utf-8", "replace").splitlines()


def _read_entries(lines: Iterable[str]) -> list[LogEntry]:
    """Return the entries of a log with their secrets, as one may go over several lines."""
    entries: list[LogEntry] = []
    for line in lines:
        match = _LINE.match(line)
        if match:  # other lines belong to the one above, such as those of a traceback
            entries.append(LogEntry(match[1], match[2], match[4][:_MOST_READ_CHARACTERS]))
        elif entries and line.strip():
            space = max(0, _MOST_READ_CHARACTERS - len(entries[-1].text))
            entries[-1].text += f"\n{line}"[:space]
    return entries
