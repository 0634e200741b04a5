"""Metrics that the CSV logger wrote: one series for each."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from lit_data.commands.reports.untrusted import open_inside
from lit_data.commands.result import split_stage

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
_BASELINE: Final = "_baseline"
_LIMITS: Final = ("memory/free_bytes", "memory/limit_bytes")
_MACHINE: Final = ("amp", "batch", "cache", "data", "memory", "time")


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
    paths = _find_files(folder)
    if not paths:
        return Log()
    # A training that went on has begun another file.
    path = max(paths, key=lambda file: file.stat().st_mtime)
    name = path.relative_to(folder).as_posix()
    if len(paths) > 1:
        notes.append(f"there are {len(paths)} files metrics.csv; the curves are those of {name}")
    points: dict[str, list[tuple[int, int, float]]] = {}
    ends: dict[int, int] = {}
    try:
        with (
            open_inside(folder, path, most_bytes=_MOST_BYTES) as raw,
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


def _find_files(folder: Path) -> list[Path]:
    for pattern in _FILES:
        paths = list(folder.glob(pattern))
        if paths:
            return paths
    return []


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


def thin(series: Series, most: int) -> tuple[Series, NDArray[np.float64], NDArray[np.float64]]:
    """Make neighbours one point where there are too many, with the range of their values.

    Args:
        series: Any length.
        most: Points at most.

    Returns:
        The means, and the lowest and the highest values, [N] each; NaN where no value is a number.
    """
    together = -(-len(series.values) // most)  # points that become one
    if together <= 1:
        return series, series.values, series.values
    firsts = np.arange(0, len(series.values), together)  # of each group of neighbours
    is_number = np.isfinite(series.values)
    counts = np.add.reduceat(is_number.astype(np.float64), firsts)
    sums = np.add.reduceat(np.where(is_number, series.values, 0.0), firsts)
    low = np.minimum.reduceat(np.where(is_number, series.values, np.inf), firsts)
    high = np.maximum.reduceat(np.where(is_number, series.values, -np.inf), firsts)
    empty = counts == 0
    means = np.where(empty, np.nan, sums / np.maximum(counts, 1))
    thinned = Series(series.steps[firsts], series.epochs[firsts], means)
    return thinned, np.where(empty, np.nan, low), np.where(empty, np.nan, high)


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
        notes.append(f"{name} breaks off: {error}")
    if bad:
        lines = "1 line is" if bad == 1 else f"{bad} lines are"
        notes.append(f"{name}: {lines} damaged or cut off, and left out")


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


@dataclass(frozen=True)
class ChartOf:
    """Chart that a metric is shown in, and its line there.

    Attributes:
        section: Scores of the model, or the machine.
        title: Of the chart.
        label: Of the line in it.
        stage: ``train``, ``val`` or ``test``; empty where the name tells none.
        is_baseline: It is what a simple rule scores.
    """

    section: Literal["model", "machine"]
    title: str
    label: str
    stage: str = ""
    is_baseline: bool = False


def find_chart(name: str) -> ChartOf:
    """Return the chart of a metric: stages share one, and so do memory and parts of a step."""
    stage, metric = split_stage(name)
    if stage:
        is_baseline = metric.endswith(_BASELINE)
        label = f"{stage}, baseline" if is_baseline else stage
        return ChartOf("model", metric.removesuffix(_BASELINE), label, stage, is_baseline)
    group, _, last = name.partition("/")
    if name in _LIMITS:
        return ChartOf("machine", "memory there is", last.removesuffix("_bytes"))
    if group == "memory" and last.endswith("_bytes"):
        return ChartOf("machine", "memory in use", last.removesuffix("_bytes"))
    if group == "time" and last.endswith("_s"):
        return ChartOf("machine", "time of a step", last.removesuffix("_s"))
    is_of_machine = group in _MACHINE and last != ""
    return ChartOf("machine" if is_of_machine else "model", name, name)
