"""Metrics that the CSV logger wrote."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np

from lit_data.app.untrusted import open_inside
from lit_data.core.types import Doubles, Ints
from lit_inspect.counts import counted

_FILES = (
    "csv/metrics.csv",
    "metrics.csv",
    "lightning_logs/*/metrics.csv",
    "*/metrics.csv",
    "*/*/metrics.csv",
)
_MOST_LOG_BYTES = 2**30
_MOST_STEPS = 2**53
_NOT_METRICS = ("step", "epoch")


@dataclass(frozen=True)
class Series:
    """A metric over the training.

    Attributes:
        steps: [N] the training steps.
        epochs: [N] the epochs; -1 where the log does not tell.
        values: [N] NaN and infinities as they were logged.
    """

    steps: Ints
    epochs: Ints
    values: Doubles

    @property
    def finite(self) -> Doubles:
        """Values that are numbers."""
        return self.values[np.isfinite(self.values)]

    @property
    def last(self) -> float:
        """Last value that is a number, NaN if none is."""
        return float(self.finite[-1]) if len(self.finite) else math.nan

    @property
    def is_constant(self) -> bool:
        """Return True if it has several values and they are the same."""
        all_finite = len(self.finite) == len(self.values)
        return len(self.values) > 1 and all_finite and bool(np.ptp(self.values) == 0)


@dataclass(frozen=True)
class Log:
    """The metrics of a run.

    Attributes:
        series: By the names of the metrics.
        epoch_ends: The last step of each epoch, by its number.
        path: The file; none if there is none.
    """

    series: Mapping[str, Series] = field(default_factory=dict)
    epoch_ends: Mapping[int, int] = field(default_factory=dict)
    path: Path | None = None


def read_log(folder: Path, notes: list[str]) -> Log:
    """Read the newest ``metrics.csv`` of a run folder, as far as it goes.

    Args:
        folder: Of the run.
        notes: Gets a sentence on what cannot be read.
    """
    matches = [list(folder.glob(pattern)) for pattern in _FILES]
    paths = next(filter(None, matches), [])
    if not paths:
        return Log()
    # A training that went on has begun another file.
    path = max(paths, key=lambda file: file.stat().st_mtime)
    name = path.relative_to(folder).as_posix()
    if len(paths) > 1:
        notes.append(f"there are {len(paths)} metrics.csv files; the curves are from {name}")
    points: dict[str, list[tuple[int, int, float]]] = {}
    ends: dict[int, int] = {}
    try:
        with (
            open_inside(folder, path, most_bytes=_MOST_LOG_BYTES) as raw,
            io.TextIOWrapper(raw, "utf-8", "replace", newline="") as file,
        ):
            for step, epoch, values in _read_rows(file, name, notes):
                if epoch >= 0:
                    ends[epoch] = max(step, ends.get(epoch, 0))
                for metric, value in values:
                    points.setdefault(metric, []).append((step, epoch, value))
    except OSError as error:
        notes.append(f"{name} cannot be read: {error.strerror}")
    series = {metric: _make_series(rows) for metric, rows in points.items()}
    return Log(series, dict(sorted(ends.items())), path)


def cut_final_score(series: Series) -> Series:
    """Return a series without the score that ``fit`` takes of the best checkpoint after training.

    It stands one step and one epoch, which was never trained, after the last point.
    """
    if len(series.steps) < 2:
        return series
    is_next_step = series.steps[-1] - series.steps[-2] == 1
    is_next_epoch = series.epochs[-2] >= 0 and series.epochs[-1] - series.epochs[-2] == 1
    if not (is_next_step and is_next_epoch):
        return series
    return Series(series.steps[:-1], series.epochs[:-1], series.values[:-1])


def _read_rows(
    file: TextIO, name: str, notes: list[str]
) -> Iterator[tuple[int, int, list[tuple[str, float]]]]:
    """Yield step, epoch (-1 where unknown) and values of each row that can be read."""
    # The module csv refuses NUL, which a machine that lost power leaves at the end of a file.
    reader = csv.reader(line.replace("\0", "") for line in file)
    bad = 0
    try:
        head = next(reader, [])
        if len(set(head)) < 2:
            notes.append(f"{name} has no columns")
            return
        for number, cells in enumerate(reader):
            row = _read_row(head, cells, number)
            if row is None:
                bad += 1
            else:
                yield row
    except csv.Error as error:
        notes.append(f"{name} ends early: {error}")
    if bad:
        lines = counted(bad, "line is", "lines are")
        notes.append(f"{name}: {lines} damaged or truncated, and skipped")


def _read_row(
    head: Sequence[str], cells: Sequence[str], number: int
) -> tuple[int, int, list[tuple[str, float]]] | None:
    if len(cells) != len(head):  # the last line of a run that was killed
        return None
    row = dict(zip(head, cells, strict=True))
    values = []
    try:
        step = float(row.get("step") or number)
        epoch = float(row.get("epoch") or -1)
        for name, text in row.items():
            if text and name not in _NOT_METRICS:
                values.append((name, float(text)))
    except ValueError:
        return None
    # Also refuses infinite and NaN steps, which are no whole numbers.
    if not (abs(step) < _MOST_STEPS and abs(epoch) < _MOST_STEPS):
        return None
    return int(step), int(epoch), values


def _make_series(rows: Sequence[tuple[int, int, float]]) -> Series:
    steps, epochs, values = zip(*rows, strict=True)
    return Series(
        steps=np.array(steps, np.int64),
        epochs=np.array(epochs, np.int64),
        values=np.array(values, np.float64),
    )
