"""What the CSV logger wrote: one series for each metric."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

from lit_data.commands.reports.untrusted import open_inside

_FILES: Final = (
    "csv/metrics.csv",
    "metrics.csv",
    "lightning_logs/*/metrics.csv",
    "*/metrics.csv",
    "*/*/metrics.csv",
)
_MOST_BYTES: Final = 2**30
_MOST_STEPS: Final = 2**53
_NOT_METRICS: Final = ("step", "epoch")


@dataclass(frozen=True)
class Series:
    """A metric over the training.

    Attributes:
        steps: [N] the training steps.
        epochs: [N] the epochs; -1 where the log does not tell.
        values: [N] NaN and infinities as they were logged.
    """

    steps: NDArray[np.int64]
    epochs: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]

    @property
    def last(self) -> float:
        """The last value that is a number, NaN if none is."""
        return float(self.finite[-1]) if len(self.finite) else math.nan

    @property
    def is_constant(self) -> bool:
        """Whether it has several values and they are the same."""
        return (
            len(self.values) > 1
            and len(self.finite) == len(self.values)
            and bool(np.ptp(self.values) == 0)
        )


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
    found = next((paths for pattern in _FILES if (paths := list(folder.glob(pattern)))), [])
    if not found:
        return Log()
    path = max(found, key=lambda file: file.stat().st_mtime)
    if len(found) > 1:
        notes.append(
            f"there are {len(found)} files metrics.csv; the curves are those of {path.relative_to(folder)}"
        )
    columns: dict[str, list[tuple[int, int, float]]] = {}
    ends: dict[int, int] = {}
    try:
        with io.TextIOWrapper(
            open_inside(folder, path, most_bytes=_MOST_BYTES), "utf-8", "replace", newline=""
        ) as file:
            for step, epoch, values in _read_rows(file, path.relative_to(folder).as_posix(), notes):
                if epoch >= 0:
                    ends[epoch] = max(step, ends.get(epoch, 0))
                for name, value in values:
                    columns.setdefault(name, []).append((step, epoch, value))
    except OSError as error:
        notes.append(f"{path.relative_to(folder)} cannot be read: {error.strerror}")
    return Log(
        {name: _make_series(rows) for name, rows in columns.items()},
        dict(sorted(ends.items())),
        path,
    )


def split_off_last(series: Series) -> tuple[Series, Series | None]:
    """Part the score that ``fit`` takes of the best checkpoint after training from the curve.

    It stands one step and one epoch, which was never trained, after the last point.
    """
    steps, epochs = series.steps, series.epochs
    if (
        len(steps) < 2
        or steps[-1] - steps[-2] != 1
        or epochs[-2] < 0
        or epochs[-1] - epochs[-2] != 1
    ):
        return series, None
    return cut(series, 0, -1), cut(series, -1, None)


def cut(series: Series, first: int, end: int | None) -> Series:
    """Some points of a series."""
    return Series(series.steps[first:end], series.epochs[first:end], series.values[first:end])


def thin(series: Series, most: int) -> tuple[Series, NDArray[np.float64], NDArray[np.float64]]:
    """Make neighbours one point where there are too many: their mean, and the lowest and the
    highest of them.

    Args:
        series: Any length.
        most: Points at most.

    Returns:
        The means, and the lowest and the highest values, [N] each; NaN where no value is a number.
    """
    together = -(-len(series.values) // most)
    if together <= 1:
        return series, series.values, series.values
    firsts = np.arange(0, len(series.values), together)
    there = np.isfinite(series.values)
    counts = np.add.reduceat(there.astype(np.float64), firsts)
    sums = np.add.reduceat(np.where(there, series.values, 0.0), firsts)
    low = np.minimum.reduceat(np.where(there, series.values, np.inf), firsts)
    high = np.maximum.reduceat(np.where(there, series.values, -np.inf), firsts)
    empty = counts == 0
    means = np.where(empty, np.nan, sums / np.maximum(counts, 1))
    thinned = Series(series.steps[firsts], series.epochs[firsts], means)
    return thinned, np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def _read_rows(
    file: TextIO, name: str, notes: list[str]
) -> Iterator[tuple[int, int, list[tuple[str, float]]]]:
    """Step, epoch (-1 where unknown) and values of each row that can be read."""
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
        notes.append(f"{name} breaks off: {error}")
    if bad:
        notes.append(
            f"{name}: {bad} {'lines are' if bad > 1 else 'line is'} damaged or cut off, and left out"
        )


def _read_row(
    head: Sequence[str], cells: Sequence[str], number: int
) -> tuple[int, int, list[tuple[str, float]]] | None:
    if len(cells) != len(head):
        return None
    row = dict(zip(head, cells, strict=True))
    try:
        step, epoch = (
            float(row.get(key) or default) for key, default in (("step", number), ("epoch", -1))
        )
        values = [
            (key, float(text)) for key, text in row.items() if text and key not in _NOT_METRICS
        ]
    except (ValueError, OverflowError):
        return None
    return (
        (int(step), int(epoch), values)
        if all(abs(number) < _MOST_STEPS for number in (step, epoch))
        else None
    )


def _make_series(rows: Sequence[tuple[int, int, float]]) -> Series:
    steps, epochs, values = zip(*rows, strict=True)
    return Series(
        np.array(steps, np.int64), np.array(epochs, np.int64), np.array(values, np.float64)
    )
