"""Metrics that the CSV logger wrote, and their curves as SVG, which the page turns dark by a filter."""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator, ScalarFormatter

from lit_data.commands.reports.untrusted import open_inside
from lit_data.commands.result import choose_scale, find_unit, format_value, split_stage
from lit_data.types import Doubles, Ints

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
_BASELINE = "_baseline"
_LIMITS = ("memory/free_bytes", "memory/limit_bytes")
_MACHINE_GROUPS = ("amp", "batch", "cache", "data", "memory", "time")

COLOURS = (
    "#1f5fa8",
    "#d9730d",
    "#2a8a57",
    "#8250c4",
    "#c2255c",
    "#0b8a9a",
    "#8a6d1d",
    "#64748b",
)
"""Of lines, by their numbers; those of page.css."""
_SOFT, _RULE = "#5a6576", "#e1e5ea"
_WIDTH_PX, _HEIGHT_PX = 400, 214
_PX = 1 / 72  # of the figure: a point of SVG is a pixel of ours
_DASHES: tuple[Any, ...] = ("solid", (0, (3, 2.2)), (0, (1, 2.5)))
_LOG_RANGE = 300.0  # largest by smallest value from which an axis is logarithmic
_MOST = 1e60  # a loss that runs away is shown up to here: ranges of larger numbers overflow
_LEAST = 1e-60
_FROM_ZERO = ("B", "%", "s", "us", "ms", "samples/s", "/s")
_MOST_EPOCHS = 8


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
        notes.append(f"there are {len(paths)} files metrics.csv; the curves are those of {name}")
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


def thin(series: Series, most: int) -> tuple[Series, Doubles, Doubles]:
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
    is_of_machine = group in _MACHINE_GROUPS and last != ""
    return ChartOf("machine" if is_of_machine else "model", name, name)


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: Of the metric, which tells the unit.
        label: In the legend.
        series: At least one point.
        look: Number of the colour; from as many as there are on, the line is dashed.
        is_dashed: Dashed whatever the number.
    """

    name: str
    label: str
    series: Series
    look: int
    is_dashed: bool = False

    @property
    def colour(self) -> int:
        """Number of the colour."""
        return self.look % len(COLOURS)

    @property
    def dash(self) -> int:
        """0 for a whole line, 1 for a dashed one, 2 for dots."""
        rounds = min(self.look // len(COLOURS), 2)
        return rounds or int(self.is_dashed)

    @property
    def end(self) -> str:
        """Its last value, and a remark where it ends in values that are no numbers."""
        if not len(self.series.finite):
            return "no number"
        last = format_value(self.name, self.series.last)
        return last if np.isfinite(self.series.values[-1]) else f"{last}, then not a number"


@dataclass(frozen=True)
class Chart:
    """A chart for the page.

    Attributes:
        title: Of the figure.
        unit: Of the numbers, and a remark where the axis is logarithmic.
        lines: For the legend.
        uri: The picture.
        description: The same in words.
        has_legend: Lines are named below.
    """

    title: str
    unit: str
    lines: Sequence[ChartLine]
    uri: str
    description: str
    has_legend: bool


@dataclass(frozen=True)
class AxisRange:
    """The upright axis, in the unit that is read."""

    low: float
    high: float
    divisor: float = 1.0
    unit: str = ""
    is_log: bool = False


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    epoch_ends: Mapping[int, int] | None = None,
    most_points: int = 240,
    has_legend: bool = True,
) -> Chart:
    """Draw curves. Values that are no numbers leave gaps.

    Args:
        title: Of the figure.
        lines: At least one.
        epoch_ends: The last step of each epoch, to mark them.
        most_points: Of each line; neighbours become their mean, with a band from the lowest to the
            highest.
        has_legend: Name the lines below, with their last values.
    """
    values = np.concatenate([line.series.values for line in lines])
    axis_range = _choose_range(values, find_unit(lines[0].name))
    first_step = min(int(line.series.steps[0]) for line in lines)
    last_step = max(int(line.series.steps[-1]) for line in lines)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 11.3}):
        figure = Figure(figsize=(_WIDTH_PX * _PX, _HEIGHT_PX * _PX), layout="constrained")
        axes = _open_axes(figure, axis_range)
        axes.set_xlim(first_step, max(last_step, first_step + 1))
        _mark_epochs(axes, epoch_ends or {}, first_step, last_step)
        for line in lines:
            _draw_line(axes, line, axis_range, most_points)
        uri = _write_svg(figure)
    units = [axis_range.unit] if axis_range.unit else []
    if axis_range.is_log:
        units.append("logarithmic")
    return Chart(
        title=title,
        unit=", ".join(units),
        lines=lines,
        uri=uri,
        description=_describe(title, lines),
        has_legend=has_legend,
    )


def _choose_range(values: Doubles, unit: str) -> AxisRange:
    drawable = values[np.abs(values) < _MOST]
    low, high = 0.0, 1.0
    if len(drawable):
        low, high = float(drawable.min()), float(drawable.max())
    divisor, name = choose_scale(unit, max(abs(low), abs(high)))
    # Losses and learning rates; bytes, seconds and fractions are compared by their lengths.
    if not unit and low > _LEAST and high / low > _LOG_RANGE:
        return AxisRange(low / 1.2, high * 1.2, is_log=True)
    if unit in _FROM_ZERO and low >= 0:
        low = 0.0
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    # Next to numbers that large a smaller margin would be rounded away.
    margin = max(margin, 1e-9 * abs(high), _LEAST)
    bottom = low - margin if low else low
    return AxisRange(bottom / divisor, (high + margin) / divisor, divisor, name)


def _open_axes(figure: Figure, axis_range: AxisRange) -> Axes:
    axes = figure.subplots()
    axes.set_ylim(axis_range.low, axis_range.high)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.set_xlabel("step", loc="right", color=_SOFT, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    if axis_range.is_log:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(axis_range.low, axis_range.high)
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    else:
        # It gives as many digits as neighbouring ticks differ in.
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
        axes.ticklabel_format(axis="y", scilimits=(-4, 5))
    axes.minorticks_off()
    axes.tick_params(length=0, colors=_SOFT, pad=5)
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    return axes


def _mark_epochs(
    axes: Axes, epoch_ends: Mapping[int, int], first_step: int, last_step: int
) -> None:
    """Mark where each epoch ends; of many epochs, where some do."""
    ends = [(epoch, step) for epoch, step in epoch_ends.items() if first_step < step <= last_step]
    if len(ends) > 1 and ends[-1][1] - ends[-2][1] == 1:
        ends.pop()  # the scores after training, which stand in an epoch of their own
    every = max(1, -(-len(ends) // _MOST_EPOCHS))
    for epoch, step in ends[every - 1 :: every]:
        text = f"epoch {epoch + 1}" if len(ends) < 6 else f"{epoch + 1}"
        axes.axvline(step, color=_SOFT, linewidth=1, linestyle=(0, (2, 4)), alpha=0.5)
        axes.annotate(
            text,
            (step, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            color=_SOFT,
        )


def _draw_line(axes: Axes, line: ChartLine, axis_range: AxisRange, most_points: int) -> None:
    mean, low, high = thin(line.series, most_points)
    colour = COLOURS[line.colour]
    if len(mean.values) < len(line.series.values):
        lower, upper = clip_line(low, axis_range), clip_line(high, axis_range)
        axes.fill_between(mean.steps, lower, upper, color=colour, alpha=0.16, linewidth=0)
    values = clip_line(mean.values, axis_range)
    style = {"color": colour, "clip_on": False}  # the frame would cut a line on its edge in half
    axes.plot(mean.steps, values, linewidth=2.1, linestyle=_DASHES[line.dash], **style)  # type: ignore[arg-type]
    if np.isfinite(values).sum() == 1:  # which makes no line
        axes.plot(mean.steps, values, "o", markersize=6, **style)  # type: ignore[arg-type]


def clip_line(values: Doubles, axis_range: AxisRange) -> Doubles:
    """Return values in the unit that is read; NaN for those that the axis has no room for."""
    with np.errstate(invalid="ignore"):
        is_shown = np.abs(values) < _MOST
        if axis_range.is_log:
            is_shown &= values > 0
        return np.where(is_shown, values / axis_range.divisor, np.nan)


def _write_svg(figure: Figure) -> str:
    """Return the figure as a data URI, without what only makes it longer."""
    text = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    svg = re.sub(r"\s+", " ", svg[svg.index("<svg") :])
    # A page may have hundreds of charts: tenths of a pixel do, but in labels, which end in <.
    svg = re.sub(r"(\d\.\d)\d{3,}(?!\d*<)", r"\1", svg)
    return f"data:image/svg+xml,{quote(svg, safe=' =:/;,.()-')}"


def _describe(title: str, lines: Sequence[ChartLine]) -> str:
    """Return the chart in words, of many lines the first ones."""
    texts = []
    for line in lines[: len(COLOURS)]:
        finite = line.series.finite
        if len(finite):
            first, last = format_value(line.name, finite[0]), format_value(line.name, finite[-1])
            course = last if len(finite) == 1 else f"from {first} to {last}"
            texts.append(f"{line.label}: {course}")
    left_out = len(lines) - len(COLOURS)
    more = f"; and {left_out} more" if left_out > 0 else ""
    return f"{title} over the steps of training. {'; '.join(texts) or 'no numbers'}{more}"
