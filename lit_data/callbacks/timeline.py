"""`Timeline`: the numbers and events of a run in bounded memory, and the two pictures of them.

memory.png shows memory and batch size over the time of a run. throughput.png shows the speed of a
training, batch by batch, and where its time went.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_data.callbacks.timing.step_clock import PARTS, Part
from lit_data.core.types import Doubles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

SERIES = (
    "allocated_bytes",
    "peak_bytes",
    "reserved_bytes",
    "rss_bytes",
    "pss_bytes",
    "batch_size",
)
"""Columns of the rows of a timeline of memory."""

_DEVICE_SERIES = ("reserved_bytes", "peak_bytes", "allocated_bytes")
_HOST_SERIES = ("rss_bytes", "pss_bytes")
_SERIES_STYLES = {
    "reserved_bytes": ("reserved", "#8fbce6"),
    "peak_bytes": ("peak", "#1f5fa8"),
    "allocated_bytes": ("allocated", "#17becf"),
    "rss_bytes": ("RSS, main process", "#f2a65a"),
    "pss_bytes": ("PSS, with workers", "#b5460f"),
}
_OOM_COLOUR = "#d62728"
MARK_STYLES = {
    "oom": ("out of memory", _OOM_COLOUR, "-"),
    "release": ("cache released", "#2ca02c", "--"),
    "precision": ("precision", "#9467bd", "-."),
    "checkpoint": ("checkpoint", "#7f7f7f", ":"),
    "validation": ("validation", "#dfe3ea", "-"),
}
"""Label, color and line of each kind of event, in the order of the legend."""

_PART_STYLES: dict[Part, tuple[str, str]] = {
    "forward": ("forward", "#1f5fa8"),
    "backward": ("backward", "#8fbce6"),
    "optimizer": ("optimizer", "#5fae8b"),
    "augment": ("augment", "#b9a3d8"),
    "transfer": ("transfer", "#f6d36b"),
    "assemble": ("assemble", "#f2a65a"),
    "wait": ("wait for data", "#b5460f"),
    "other": ("other", "#c8c8c8"),
}
"""Name and color of each part, from the bottom: the device's work, then what delays it."""

_SPEED_COLOUR = "#1f5fa8"
_SMOOTHED_POINTS = 15
_DRAWN_BARS = 120
"""Number of points in the lower picture; fractions of single steps would be too jagged."""

_TIME_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))
"""Shortest run in seconds, seconds of the unit, and its name."""

_MIB = 2.0**20


class Timeline:
    """Rows of numbers over steps or seconds, and events of several kinds, for runs of any length.

    If there are too many rows, each pair of neighbors is merged, and later rows are merged in
    groups of the same size. If there are too many events of a kind, every second one is dropped.

    Args:
        merge: Function that merges two neighboring rows.
        most_rows: Largest number of rows.
        most_marks: Largest number of events of each kind.

    Attributes:
        marks: Events by kind.
    """

    def __init__(
        self, merge: Callable[[Any, Any], Any], *, most_rows: int = 2000, most_marks: int = 200
    ) -> None:
        self.marks: defaultdict[str, Marks] = defaultdict(partial(Marks, most_marks))
        self._merge = merge
        self._most_rows = most_rows
        self._positions: list[float] = []
        self._rows: list[Any] = []
        self._rows_per_point = 1
        self._rows_in_last = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, position: float, row: Sequence[Any] | Doubles) -> None:
        """Add the numbers of a step or moment; merged rows keep their first position."""
        if self._rows and self._rows_in_last < self._rows_per_point:
            self._rows[-1] = self._merge(self._rows[-1], row)
            self._rows_in_last += 1
            return
        if len(self) == self._most_rows:
            self._halve()
            self.add(position, row)  # the last point may have room now
            return
        self._positions.append(position)
        self._rows.append(row)
        self._rows_in_last = 1

    def read(self) -> tuple[Doubles, Doubles]:
        """Return positions [N] and rows [N, ...]."""
        return np.array(self._positions, np.float64), np.array(self._rows, np.float64)

    def _halve(self) -> None:
        merged = []
        for first in range(0, len(self) - 1, 2):
            merged.append(self._merge(self._rows[first], self._rows[first + 1]))
        if len(self) % 2:
            merged.append(self._rows[-1])  # has no neighbor, and keeps its number of rows
        else:
            self._rows_in_last += self._rows_per_point
        self._rows = merged
        self._positions = self._positions[::2]
        self._rows_per_point *= 2


@dataclass
class Marks:
    """Events of one kind.

    Attributes:
        most: Largest number of events that are kept.
        count: Number of all events so far.
        spans: Begin and end of the kept events, in the unit of the positions; equal for a moment.
    """

    most: int
    count: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    _events_per_span: int = field(default=1, init=False)

    def add(self, began: float, ended: float | None = None) -> None:
        """Add an event; one without an end is a moment."""
        if self.count % self._events_per_span == 0:
            self.spans.append((began, began if ended is None else ended))
        self.count += 1
        if len(self.spans) > self.most:
            self.spans = self.spans[::2]
            self._events_per_span *= 2


def add_rows(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Add up two rows of sums, such as seconds or samples."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


def widen_rows(first: Doubles, second: Doubles) -> Doubles:
    """Return the extremes of two rows [2, K] of lowest and highest values, which may be NaN."""
    return np.stack([np.fmin(first[0], second[0]), np.fmax(first[1], second[1])])


def write_picture(path: Path, draw: Callable[[Path], None]) -> None:
    """Make the folder of a picture and draw it; a failure is logged and does not end the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except Exception as problem:
        log.warning("no %s could be written: %s: %s", path.name, type(problem).__name__, problem)


def draw_memory(timeline: Timeline, path: Path, *, device: str, limit_bytes: int) -> None:
    """Write a timeline as a PNG of 1210 x 770 pixels, or 1210 x 484 if there is only the host.

    Args:
        timeline: At least one row [2, series] of the lowest and the highest values of `SERIES`,
            over seconds.
        path: File to write; its folder exists.
        device: Name of the device; for ``cpu`` there is only host memory.
        limit_bytes: Bytes that the device can hold; drawn if the run comes close to them.
    """
    has_device = device != "cpu"
    figure = _make_figure(7 if has_device else 4.4)
    cells = figure.subplots(2 if has_device else 1, 1, sharex=True, squeeze=False)[:, 0]
    seconds, rows = timeline.read()
    unit_s, unit = _choose_unit(seconds[-1])
    times = seconds / unit_s
    if has_device:
        _draw_series(cells[0], times, rows, _DEVICE_SERIES, limit_bytes)
        cells[0].set_title(f"{device} memory", loc="left", fontsize=10)
    _draw_series(cells[-1], times, rows, _HOST_SERIES, 0 if has_device else limit_bytes)
    cells[-1].set_title("host memory", loc="left", fontsize=10)
    cells[-1].set_xlabel(f"{unit} since the start")
    sizes = rows[:, 1, SERIES.index("batch_size")]
    is_known = ~np.isnan(sizes)
    if is_known.any():
        _draw_sizes(cells[0].twinx(), times[is_known], sizes[is_known], "#767676", "-")
        # an empty line on the first axes, whose legend shows it
        cells[0].plot([], [], color="#767676", lw=1.1, label="batch size (right)")
    for cell in cells:
        _draw_marks(cell, timeline, unit_s)
        margin = max(0.01 * (times[-1] - times[0]), 1e-6)
        cell.set_xlim(times[0], times[-1] + margin)  # so that a mark at the very end shows too
        cell.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=5,
            fontsize=8,
            frameon=False,
            borderaxespad=0.2,
        )
    handles = list(_explain_marks(timeline))
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            fontsize=9,
            frameon=False,
        )
    figure.savefig(path, format="png")


def draw_throughput(speed: Timeline, parts: Timeline, path: Path, title: str) -> None:
    """Write the throughput of a training as a PNG of 1210 x 770 pixels.

    The upper part shows samples per second and the batch size, the lower part the fractions of the
    parts of a step.

    Args:
        speed: Number of steps, samples, seconds, and batch size times steps, of at least one step;
            marks of ``oom``.
        parts: Seconds of each of `PARTS`.
        path: File to write; its folder exists.
        title: Sentence above the picture.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _make_figure(7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_speed(upper, speed)
    _draw_parts(lower, parts)
    steps, _ = speed.read()
    lower.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))  # also of a few batches
    lower.set_xlabel("training batches")
    figure.suptitle(fill(title[:1].upper() + title[1:], 110), fontsize=11)
    figure.savefig(path, format="png")


def _make_figure(height_in: float) -> "Figure":
    """Return a figure without a window or any state in pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(11, height_in), dpi=110, layout="constrained")


def _tidy(cell: "Axes") -> None:
    cell.grid(axis="y", color="#e8e8e8", lw=0.8)
    cell.set_axisbelow(True)
    cell.spines[["top", "right"]].set_visible(False)


def _choose_unit(run_s: float) -> tuple[float, str]:
    for shortest_s, unit_s, unit in _TIME_UNITS:
        if run_s >= shortest_s:
            return unit_s, unit
    return 1.0, "seconds"


def _draw_series(
    cell: "Axes",
    times: Doubles,
    rows: Doubles,
    names: Sequence[str],
    limit_bytes: int,
) -> None:
    columns = [SERIES.index(name) for name in names]
    top_bytes = float(np.nanmax(rows[:, 1, columns], initial=1.0))
    scale, unit = (1024 * _MIB, "GiB") if top_bytes >= 2048 * _MIB else (_MIB, "MiB")
    for name, column in zip(names, columns, strict=True):
        is_known = ~np.isnan(rows[:, 1, column])
        if not is_known.any():
            continue
        lowest, highest = rows[is_known, :, column].T / scale
        text, colour = _SERIES_STYLES[name]
        label = f"{text}: up to {highest.max():.1f} {unit}"
        cell.fill_between(times[is_known], lowest, highest, color=colour, lw=0, alpha=0.3)
        cell.plot(times[is_known], highest, color=colour, lw=1.6, label=label)
    # a limit far above the curves would squeeze them into the lowest part of the picture
    if limit_bytes and top_bytes > 0.5 * limit_bytes:
        dashes = (0, (6, 3))
        cell.axhline(limit_bytes / scale, color=_OOM_COLOUR, lw=1, ls=dashes, label="limit")
    cell.set_ylabel(unit)
    cell.set_ylim(bottom=0)
    cell.margins(y=0.15)
    _tidy(cell)


def _draw_sizes(
    cell: "Axes",
    xs: Doubles,
    sizes: Doubles,
    colour: str,
    style: Any,  # noqa: ANN401 - as Matplotlib takes it
) -> None:
    """Draw batch sizes on separate axes to the right."""
    cell.step(xs, sizes, where="post", color=colour, lw=1.1, ls=style, label="batch size")
    cell.set_ylabel("samples at once", color=colour)
    cell.set_ylim(0, 1.25 * float(sizes.max()))
    cell.tick_params(axis="y", colors=colour)
    cell.spines["top"].set_visible(False)


def _draw_marks(cell: "Axes", timeline: Timeline, unit_s: float) -> None:
    for kind, (_, colour, style) in MARK_STYLES.items():
        for began_s, ended_s in timeline.marks[kind].spans:
            if ended_s > began_s:
                cell.axvspan(began_s / unit_s, ended_s / unit_s, color=colour, lw=0, zorder=0)
            else:
                cell.axvline(began_s / unit_s, color=colour, ls=style, lw=1.2, zorder=1)


def _explain_marks(timeline: Timeline) -> Iterator[Any]:
    """Yield a legend handle for each kind of event that occurred."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for kind, (label, colour, style) in MARK_STYLES.items():
        marks = timeline.marks[kind]
        if marks.count == 0:
            continue
        text = f"{label} ({marks.count})"
        if any(ended > began for began, ended in marks.spans):
            yield Patch(color=colour, label=text)
        else:
            yield Line2D([], [], color=colour, ls=style, label=text)


def _draw_speed(cell: "Axes", speed: Timeline) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, rows = speed.read()
    counts, samples, seconds, sizes = rows.T
    speeds = samples / seconds
    smooth_label = f"median of {_SMOOTHED_POINTS} points"
    cell.plot(steps, speeds, ".", color=_SPEED_COLOUR, ms=3, alpha=0.25)
    cell.plot(steps, _smooth(speeds), color=_SPEED_COLOUR, lw=1.6, label=smooth_label)
    ooms = speed.marks["oom"]
    oom_label = f"out of memory ({ooms.count})"
    for step, _ in ooms.spans:
        cell.axvline(step, color=_OOM_COLOUR, lw=1.2, zorder=1, label=oom_label)
        oom_label = ""  # the legend names only the first line
    mean = samples.sum() / seconds.sum()
    cell.set_title(f"samples per second, {mean:,.1f} on average", loc="left", fontsize=10)
    cell.set_ylim(0, 1.25 * float(np.quantile(speeds, 0.98)))
    _tidy(cell)
    second = cell.twinx()
    _draw_sizes(second, steps, sizes / counts, "#555555", (0, (1, 1)))
    second.yaxis.set_major_locator(MaxNLocator(integer=True))
    # one legend for the lines of both axes
    handles = [*cell.get_legend_handles_labels()[0], *second.get_legend_handles_labels()[0]]
    _put_legend_beside(second, handles)


def _draw_parts(cell: "Axes", parts: Timeline) -> None:
    steps, rows = parts.read()
    rows = rows[:, [PARTS.index(part) for part in _PART_STYLES]]
    percents = 100 * rows.sum(axis=0) / rows.sum()
    labels = []
    colours = []
    for (name, colour), percent in zip(_PART_STYLES.values(), percents, strict=True):
        labels.append(f"{name}  {percent:.0f} %")
        colours.append(colour)
    rows_per_bar = -(-len(rows) // _DRAWN_BARS)
    firsts = np.arange(0, len(rows), rows_per_bar)
    bars = np.add.reduceat(rows, firsts)
    heights = 100 * bars / bars.sum(axis=1, keepdims=True)
    # the last bar ends one step after the last point
    edges = np.append(steps[firsts], steps[-1] + 1)
    heights = np.vstack([heights, heights[-1:]])
    cell.stackplot(edges, heights.T, labels=labels, colors=colours, step="post", lw=0)
    cell.set_title("where the time goes, % of each step", loc="left", fontsize=10)
    cell.set_ylim(0, 100)
    _tidy(cell)
    handles, _ = cell.get_legend_handles_labels()
    _put_legend_beside(cell, handles[::-1])  # in the order of the picture, from the top


def _put_legend_beside(cell: "Axes", handles: list[Any]) -> None:
    cell.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.06, 0.5), fontsize=9, frameon=False
    )


def _smooth(values: Doubles) -> Doubles:
    """Return the median of the points around each point, of fewer at the ends."""
    half = _SMOOTHED_POINTS // 2
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.asarray(np.nanmedian(windows, axis=1))
